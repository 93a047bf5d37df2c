"""Schedules of faults out of a seed: any that a strategy can survive, and none that it can not."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from culm.testing.faults import Faults, SlowDisk

if TYPE_CHECKING:
    from culm.schedule import Plan

PEERS = frozenset(("shadow", "shadow-lazy", "reroute"))
"""Strategies under which the workers of the same stage in other pipelines take over."""
SHADOWS = frozenset(("shadow", "shadow-lazy"))
"""Strategies under which a worker holds the layers of its successor, too."""
_LETHAL = {"kill": 8, "group": 3, "long pause": 2, "partition": 2, "notice": 6, "leader": 3}
_HARMLESS = {"pause": 3, "late": 1, "slow link": 1, "slow disk": 1, "reorder": 1, "lose": 1, "outage": 3}
"""What is drawn, and how often beside the others."""


def holders(strategy: str, pipelines: int, stages: int, stage: int) -> frozenset[int]:
    """The nodes that hold a stage at the start of a run. Pure."""
    owners = {pipeline * stages + stage for pipeline in range(pipelines)}
    shadows = {pipeline * stages + (stage - 1) % stages for pipeline in range(pipelines)}
    return frozenset(owners | (shadows if strategy in SHADOWS else set()))


def bearable(strategy: str, pipelines: int, stages: int, lost: Collection[int]) -> bool:
    """Whether each stage keeps a holder when these nodes are lost, even if lost protection is never restored. Pure."""
    if strategy not in PEERS:
        return not lost
    return all(holders(strategy, pipelines, stages, stage) - set(lost) for stage in range(stages))


@dataclass
class _Drawing:
    """A schedule in the making."""

    dice: random.Random
    plan: Plan
    strategy: str
    steps: int
    lease_s: float
    lost: frozenset[int] = frozenset()

    @property
    def nodes(self) -> int:
        return len(self.plan.workers)

    def victims(self, count: int, first: int | None = None) -> tuple[int, ...]:
        """Neighbours that the strategy can lose on top of those that are lost; none if these would be too many."""
        alive = [node for node in range(self.nodes) if node not in self.lost]
        first = self.dice.randrange(len(alive)) if first is None else first
        chosen = tuple((alive * 2)[first : first + count])
        lost = self.lost.union(chosen)
        if len(set(chosen)) < count or not bearable(self.strategy, self.plan.pipelines, self.plan.stages, lost):
            return ()
        self.lost = lost
        return chosen

    def moment(self, node: int, *, again: bool) -> dict[str, Any]:
        """When: at an action of the plan, at any action of a step, after a while, or in the midst of a recovery."""
        step = self.dice.randrange(self.steps)
        actions = [str(action) for action in self.plan.workers[node]]
        actions += [f"{action}+" for action in actions if action.endswith("S")]
        kind = self.dice.choice(("at", "at", "at", "nth", "after", "commit"))
        if again and self.dice.random() < 0.4:
            at, nth = self.dice.choice((("standing", 1), ("standing", 2), ("adopt", 2), ("adopt", 3), ("adopt", 1)))
            return {"at": at, "nth": nth}  # the first epoch is adopted, too
        if kind == "commit" and node == 0:
            return {"at": "commit", "step": step}
        if kind == "after":
            return {"after_s": round(self.dice.uniform(0.0, 0.02 * len(actions) * self.steps), 4)}
        if kind == "nth" or again:  # after a loss a node may run other actions than the plan says
            return {"step": step, "nth": self.dice.randint(1, len(actions))}
        return {"at": self.dice.choice(actions), "step": step}

    def lose(self, faults: Faults) -> Faults:
        """A fault more by which nodes are lost; where the strategy could not bear that, one that is harmless."""
        again, kind = bool(self.lost), self.drawn(_LETHAL)
        several = {"group": 2, "partition": self.dice.choice((1, 1, 2)), "notice": self.dice.choice((1, 1, 2))}
        nodes = self.victims(several.get(kind, 1), 0 if kind == "leader" else None)
        if not nodes:
            return self.hinder(faults)
        if kind == "leader":
            kind = self.dice.choice(("kill", "long pause", "notice"))
        when, node = self.moment(nodes[0], again=again), nodes if len(nodes) > 1 else nodes[0]
        longer = round(self.lease_s * self.dice.uniform(1.1, 4.0), 3)
        if kind == "long pause":
            return faults.pause(node, seconds=longer, **when)
        if kind == "partition":
            return faults.partition(node, seconds=longer, **when)
        if kind == "notice":
            return faults.warn(node, seconds=self.notice_s(), **when)
        return faults.kill(node, silence=self.dice.random() < 0.3, **when)

    def notice_s(self) -> float:
        """None at all, less than a step, or more."""
        span = self.dice.choice(((0.0, 0.0), (0.01, 0.1), (0.1, 0.5), (1.0, 10.0)))
        return round(self.dice.uniform(*span), 3)

    def ruin(self, faults: Faults, step: int) -> Faults:
        """A fault more that no strategy has to bear: all nodes but a few are lost together in a step."""
        alive = [node for node in range(self.nodes) if node not in self.lost]
        left = self.dice.sample(alive, self.dice.randint(1, max(1, len(alive) // 2)))
        nodes = tuple(node for node in alive if node not in left)
        if not nodes:
            return faults
        self.lost = self.lost.union(nodes)
        return faults.kill(nodes, step=step, nth=self.dice.randint(1, 6), silence=self.dice.random() < 0.3)

    def hinder(self, faults: Faults) -> Faults:
        """A fault more that nobody is lost by."""
        again, kind = bool(self.lost), self.drawn(_HARMLESS)
        node, other = self.dice.sample(range(self.nodes), 2) if self.nodes > 1 else (0, 0)
        seconds = round(self.dice.uniform(0.01, 0.5 * self.lease_s), 3)
        match kind:
            case "pause":
                return faults.pause(node, seconds=seconds, **self.moment(node, again=again))
            case "slow disk":
                return faults.slow_disk(node, seconds=seconds)
            case "outage":
                return faults.outage(node, seconds=round(4 * seconds, 3), **self.moment(node, again=again))
        return self.disturb(faults, kind, node, other, seconds)

    def disturb(self, faults: Faults, kind: str, node: int, other: int, seconds: float) -> Faults:
        """A fault more of what is on its way."""
        match kind:
            case "late":
                return faults.late(node, other, seconds=seconds, nth=self.dice.randint(1, 30))
            case "slow link":
                return faults.slow_link(node, other, latency=round(seconds / 20, 4))
            case "lose" if self.strategy != "none":
                return faults.lose(node, other, nth=self.dice.randint(1, 40))
        return faults.reorder(seconds=round(seconds / 20, 4), seed=self.dice.randrange(1000))

    def grow(self, faults: Faults) -> Faults:
        """Nodes come. Nothing counts on it: they may come too late, or to a cluster that is full."""
        if self.strategy not in PEERS:
            return self.hinder(faults)
        node = self.dice.randrange(self.nodes)
        faults = faults.join(node, count=self.dice.choice((1, 1, 2)), **self.moment(node, again=bool(self.lost)))
        if self.dice.random() < 0.3:  # and the first of them has to go again, perhaps before it is level
            return faults.warn(self.nodes, seconds=self.notice_s(), at=self.dice.choice(("adopt", "copy")))
        return faults

    def drawn(self, kinds: Mapping[str, int]) -> str:
        return self.dice.choices(list(kinds), list(kinds.values()))[0]


def draw_faults(
    dice: random.Random, plan: Plan, *, strategy: str, steps: int, lease_s: float, saved_from: int | None = None
) -> Faults:
    """One to four faults for a run. Nodes are lost, by a kill, by a silence that is longer than the lease, or after a
    notice, only while each layer keeps a holder; and, where there is a checkpoint from some step on, all but a few from
    there on."""
    drawing = _Drawing(dice, plan, strategy, steps, lease_s)
    faults = Faults()
    for _ in range(dice.choice((1, 2, 2, 3, 3, 4))):
        faults = drawing.lose(faults) if dice.random() < 0.7 else drawing.hinder(faults)
    if strategy in PEERS and dice.random() < 0.4:
        faults = drawing.grow(faults)
    slow = any(isinstance(fault, SlowDisk) for fault in faults.all)  # the checkpoint may not be there in time
    if saved_from is not None and strategy in PEERS and not slow and dice.random() < 0.5:
        faults = drawing.ruin(faults, saved_from)
    return faults
