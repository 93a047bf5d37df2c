"""What the baselines decide after a loss: the strategies that culm is measured against, in the same machinery. Pure.

`checkpoint` counts no live copy: everyone goes back to the newest checkpoint, on as many whole pipelines as there are
nodes for. `migrate` does the same after a loss that came without notice. (`drop` is `dropping`'s business.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from culm.cluster.regroup import Regrouped, restart
from culm.cluster.setup import Setup
from culm.plan.partition import count
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan


def rewinds(setup: Setup, lost: Collection[int]) -> bool:
    """Whether the next epoch begins at the checkpoint, whoever holds what: always where nothing is kept, and where only
    a notice saves."""
    return setup.strategy == "checkpoint" or (setup.strategy == "migrate" and bool(lost))


def crew_of(setup: Setup, there: Mapping[int, Member], waiting: Sequence[Member]) -> dict[int, Member]:
    """By slot: who goes on, of those in a slot and those that wait for one. Whole pipelines, those that miss the fewest
    first; the others stand by. Are there too few for one pipeline, its nodes carry several stages each."""
    P = setup.stages
    pipelines = min(setup.pipelines, max(1, (len(there) + len(waiting)) // P))
    missing = {d: sum(d * P + stage not in there for stage in range(P)) for d in range(setup.pipelines)}
    chosen = sorted(sorted(missing, key=lambda d: missing[d])[:pipelines])
    slots = [d * P + stage for d in chosen for stage in range(P)]
    crew = {slot: there[slot] for slot in slots if slot in there}
    free = [*(member for slot, member in sorted(there.items()) if slot not in crew), *waiting]
    return dict(sorted({**crew, **dict(zip([s for s in slots if s not in crew], free, strict=False))}.items()))


def more_pipelines(setup: Setup, epoch: Epoch, waiting: int) -> bool:
    """Whether nodes that wait would make another pipeline whole: only then is a restart worth its while."""
    filled = {slot for slot, member in enumerate(epoch.members) if member is not None}
    running = len({slot // setup.stages for slot in filled}) if len(filled) >= setup.stages else 0
    return min(setup.pipelines, (len(filled) + waiting) // setup.stages) > running


def back_to(
    setup: Setup,
    old: Epoch,
    number: int,
    leader: str,
    there: Mapping[int, Member],
    waiting: Sequence[Member],
    step: int,
    saved: str | None,
) -> Regrouped:
    """The epoch in which those that are left, by slot, and those that wait begin again from a checkpoint, or as the run
    began."""
    crew = crew_of(setup, there, waiting)
    made = restart(setup, old, number, leader, crew.keys(), step, saved, crew)
    idle = sorted({member.node for member in there.values()} - {member.node for member in crew.values()})
    gone = sorted({member.node for member in old.alive} - {member.node for member in (*there.values(), *waiting)})
    told = [f"{_nodes(gone)} gone"] * bool(gone) + [f"everyone begins again {_whence(step, saved)}"]
    told += [_extent(setup, made.epoch)] + [f"{_nodes(idle)} standing by"] * bool(idle)
    return replace(made, why=f"strategy {setup.strategy}: {', '.join(told)}")


def _nodes(numbers: Sequence[int]) -> str:
    return f"node {numbers[0]} is" if len(numbers) == 1 else f"nodes {', '.join(map(str, numbers))} are"


def _whence(step: int, saved: str | None) -> str:
    return "as it began" if saved is None else f"from the checkpoint after step {step}"


def _extent(setup: Setup, epoch: Epoch) -> str:
    """How much of the shape is there."""
    plan = Plan.from_text(epoch.plan)
    empty = sum(member is None for member in epoch.members)
    if not empty:
        return "all slots filled"
    if any(len(stages) > 1 for _, stages in plan.held):
        return f"on {count(len(epoch.alive), 'node')} with several stages on each"
    return f"on {count((len(epoch.members) - empty) // setup.stages, 'whole pipeline')} of {setup.pipelines}"
