"""Restart from a checkpoint: the next epoch under the baseline strategies `checkpoint` and `migrate`. Pure.

`checkpoint` uses no live copy: after every loss all nodes return to the newest checkpoint, on as many whole pipelines
as there are nodes for. `migrate` does the same after a loss without notice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from culm.cluster.leader.next_epoch import NextEpoch, restart_epoch, start_phrase
from culm.cluster.run_setup import RunSetup
from culm.plan.reshape.whole_pipelines import choose_whole_pipelines
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan
from culm.text_format import count_noun


def returns_to_checkpoint(setup: RunSetup, lost_nodes: Collection[int]) -> bool:
    """Whether the next epoch starts from the checkpoint no matter which layers survive: under `checkpoint` always,
    under `migrate` after a loss without notice."""
    return setup.strategy_object.returns_to_checkpoint(lost_nodes)


def assign_whole_pipelines(
    setup: RunSetup, present_members: Mapping[int, Member], waiting_members: Sequence[Member]
) -> dict[int, Member]:
    """The members of the next epoch by slot, from those that have a slot and those that wait for one.

    Fills whole pipelines, those with the fewest empty slots first; the other workers stay on standby. If there are too
    few workers for one pipeline, each of them gets several stages.
    """
    slots = choose_whole_pipelines(setup.pipelines, setup.stages, present_members.keys(), len(waiting_members))
    members_by_slot = {slot: present_members[slot] for slot in slots if slot in present_members}
    free = [
        *(member for slot, member in sorted(present_members.items()) if slot not in members_by_slot),
        *waiting_members,
    ]
    empty_slots = [slot for slot in slots if slot not in members_by_slot]
    return dict(sorted({**members_by_slot, **dict(zip(empty_slots, free, strict=False))}.items()))


def checkpoint_epoch(
    setup: RunSetup,
    old: Epoch,
    number: int,
    leader: str,
    present_members: Mapping[int, Member],
    waiting_members: Sequence[Member],
    step: int,
    checkpoint_folder: str | None,
) -> NextEpoch:
    """The epoch in which the remaining members (by slot) and the waiting ones restart from a checkpoint; without a
    folder, from the start of the run."""
    members_by_slot = assign_whole_pipelines(setup, present_members, waiting_members)
    next_epoch = restart_epoch(
        setup, old, number, leader, members_by_slot.keys(), step, checkpoint_folder, members_by_slot
    )
    idle = sorted(
        {member.node for member in present_members.values()} - {member.node for member in members_by_slot.values()}
    )
    lost_nodes = sorted(
        {member.node for member in old.present_members}
        - {member.node for member in (*present_members.values(), *waiting_members)}
    )
    sentences = [f"{_node_phrase(lost_nodes)} gone"] * bool(lost_nodes) + [
        f"all nodes restart {start_phrase(step, checkpoint_folder)}"
    ]
    sentences += [_coverage_phrase(setup, next_epoch.epoch)] + [f"{_node_phrase(idle)} on standby"] * bool(idle)
    return replace(next_epoch, why=f"strategy {setup.strategy}: {', '.join(sentences)}")


def _node_phrase(numbers: Sequence[int]) -> str:
    return f"node {numbers[0]} is" if len(numbers) == 1 else f"nodes {', '.join(map(str, numbers))} are"


def _coverage_phrase(setup: RunSetup, epoch: Epoch) -> str:
    """Which part of the shape has nodes, as a phrase."""
    plan = Plan.from_text(epoch.plan)
    empty = sum(member is None for member in epoch.members)
    if not empty:
        return "all slots filled"
    if any(len(stages) > 1 for _, stages in plan.stage_overrides):
        noun = "node" if setup.workers_per_node == 1 else "worker"
        return f"on {count_noun(len(epoch.present_members), noun)} with several stages on each"
    return f"on {count_noun((len(epoch.members) - empty) // setup.stages, 'whole pipeline')} of {setup.pipelines}"
