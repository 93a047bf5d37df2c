"""Random fault schedules from a seed, limited to faults that the strategy of the run survives."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from culm.testing.fault_schedule import Faults, SlowDisk

if TYPE_CHECKING:
    from culm.schedule import Plan
    from culm.strategies import Strategy

_LETHAL_WEIGHTS = {"kill": 8, "group": 3, "long pause": 2, "partition": 2, "notice": 6, "leader": 3}
_HARMLESS_WEIGHTS = {"pause": 3, "late": 1, "slow link": 1, "slow disk": 1, "reorder": 1, "lose": 1, "outage": 3}
"""Kinds of faults that are drawn, with their weights."""


@dataclass
class _FaultGenerator:
    """Builds a fault schedule."""

    rng: random.Random
    plan: Plan
    strategy: Strategy
    steps: int
    lease_s: float
    workers_per_node: int = 1
    lost_nodes: frozenset[int] = frozenset()

    @property
    def nodes(self) -> int:
        return len(self.plan.workers) // self.workers_per_node

    def slots_of(self, nodes: Iterable[int]) -> list[int]:
        """The slots that nodes fill at the start."""
        K = self.workers_per_node
        return [node * K + index for node in nodes for index in range(K)]

    def pick_victims(self, count: int, first: int | None = None) -> tuple[int, ...]:
        """Adjacent nodes that the strategy can lose in addition to `lost_nodes`; empty if it could not."""
        alive = [node for node in range(self.nodes) if node not in self.lost_nodes]
        first = self.rng.randrange(len(alive)) if first is None else first
        chosen = tuple((alive * 2)[first : first + count])
        lost = self.lost_nodes.union(chosen)
        if len(set(chosen)) < count or not self._survives(lost):
            return ()
        self.lost_nodes = lost
        return chosen

    def _survives(self, lost_nodes: Collection[int]) -> bool:
        slots = self.slots_of(lost_nodes)
        if self.workers_per_node == 1:
            return self.strategy.survives(self.plan, slots)
        return self.strategy.survives(self.plan, slots, workers_per_node=self.workers_per_node)

    def pick_moment(self, node: int, *, again: bool) -> dict[str, Any]:
        """When a fault strikes: at an action of the plan, any action of a step, after some time, or in a recovery."""
        step = self.rng.randrange(self.steps)
        actions = [str(action) for slot in self.slots_of([node]) for action in self.plan.workers[slot]]
        actions += [f"{action}+" for action in actions if action.endswith("S")]
        kind = self.rng.choice(("at", "at", "at", "nth", "after", "commit"))
        if again and self.rng.random() < 0.4:
            at, nth = self.rng.choice((("inventory", 1), ("inventory", 2), ("adopt", 2), ("adopt", 3), ("adopt", 1)))
            return {"at": at, "nth": nth}  # counting includes the first epoch
        if kind == "commit" and node == 0:
            return {"at": "commit", "step": step}
        if kind == "after":
            return {"after_s": round(self.rng.uniform(0.0, 0.02 * len(actions) * self.steps), 4)}
        if kind == "nth" or again:  # after a loss a node may run other actions than the plan says
            return {"step": step, "nth": self.rng.randint(1, len(actions))}
        return {"at": self.rng.choice(actions), "step": step}

    def add_loss(self, faults: Faults) -> Faults:
        """Add a fault that loses nodes; if the strategy could not survive it, add a harmless one."""
        again, kind = bool(self.lost_nodes), self.pick_kind(_LETHAL_WEIGHTS)
        several = {"group": 2, "partition": self.rng.choice((1, 1, 2)), "notice": self.rng.choice((1, 1, 2))}
        nodes = self.pick_victims(several.get(kind, 1), 0 if kind == "leader" else None)
        if not nodes:
            return self.add_harmless(faults)
        if kind == "leader":
            kind = self.rng.choice(("kill", "long pause", "notice"))
        when, node = self.pick_moment(nodes[0], again=again), nodes if len(nodes) > 1 else nodes[0]
        longer = round(self.lease_s * self.rng.uniform(1.1, 4.0), 3)
        if kind == "long pause":
            return faults.pause(node, seconds=longer, **when)
        if kind == "partition":
            return faults.partition(node, seconds=longer, **when)
        if kind == "notice":
            return faults.warn(node, seconds=self.pick_notice_s(), **when)
        return faults.kill(node, silence=self.rng.random() < 0.3, **when)

    def pick_notice_s(self) -> float:
        """Seconds of notice: none, less than a step, or more."""
        span = self.rng.choice(((0.0, 0.0), (0.01, 0.1), (0.1, 0.5), (1.0, 10.0)))
        return round(self.rng.uniform(*span), 3)

    def add_mass_loss(self, faults: Faults, step: int) -> Faults:
        """Add a fault that only a checkpoint survives: all nodes but a few are lost together in a step."""
        alive = [node for node in range(self.nodes) if node not in self.lost_nodes]
        left = self.rng.sample(alive, self.rng.randint(1, max(1, len(alive) // 2)))
        nodes = tuple(node for node in alive if node not in left)
        if not nodes:
            return faults
        self.lost_nodes = self.lost_nodes.union(nodes)
        return faults.kill(nodes, step=step, nth=self.rng.randint(1, 6), silence=self.rng.random() < 0.3)

    def add_harmless(self, faults: Faults) -> Faults:
        """Add a fault by which no node is lost."""
        again, kind = bool(self.lost_nodes), self.pick_kind(_HARMLESS_WEIGHTS)
        node, other = self.rng.sample(range(self.nodes), 2) if self.nodes > 1 else (0, 0)
        seconds = round(self.rng.uniform(0.01, 0.5 * self.lease_s), 3)
        match kind:
            case "pause":
                return faults.pause(node, seconds=seconds, **self.pick_moment(node, again=again))
            case "slow disk":
                return faults.slow_disk(node, seconds=seconds)
            case "outage":
                return faults.outage(node, seconds=round(4 * seconds, 3), **self.pick_moment(node, again=again))
        return self.add_link_fault(faults, kind, node, other, seconds)

    def add_link_fault(self, faults: Faults, kind: str, node: int, other: int, seconds: float) -> Faults:
        """Add a fault of messages or links."""
        match kind:
            case "late":
                return faults.delay_message(node, other, seconds=seconds, nth=self.rng.randint(1, 30))
            case "slow link":
                return faults.slow_link(node, other, latency=round(seconds / 20, 4))
            case "lose" if self.strategy.survives_losses:
                return faults.drop_message(node, other, nth=self.rng.randint(1, 40))
        return faults.reorder(seconds=round(seconds / 20, 4), seed=self.rng.randrange(1000))

    def add_join(self, faults: Faults) -> Faults:
        """Add nodes that join. They may come too late, or when the cluster has no empty slot."""
        if not self.strategy.recovers_in_place:
            return self.add_harmless(faults)
        node = self.rng.randrange(self.nodes)
        faults = faults.join(
            node, count=self.rng.choice((1, 1, 2)), **self.pick_moment(node, again=bool(self.lost_nodes))
        )
        if self.rng.random() < 0.3:  # the first of them gets notice, perhaps before it has caught up
            return faults.warn(self.nodes, seconds=self.pick_notice_s(), at=self.rng.choice(("adopt", "copy")))
        return faults

    def pick_kind(self, kinds: Mapping[str, int]) -> str:
        return self.rng.choices(list(kinds), list(kinds.values()))[0]


def random_faults(
    rng: random.Random,
    plan: Plan,
    *,
    strategy: Strategy,
    steps: int,
    lease_s: float,
    saved_from: int | None = None,
    workers_per_node: int = 1,
) -> Faults:
    """One to four faults for a run, each of whole nodes.

    Nodes are lost by a kill, by a silence longer than the lease or after a notice, and only if the strategy survives
    it. Where a checkpoint exists from step `saved_from` on, all nodes but a few may be lost from then on.
    """
    generator = _FaultGenerator(rng, plan, strategy, steps, lease_s, workers_per_node)
    faults = Faults()
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
        faults = generator.add_loss(faults) if rng.random() < 0.7 else generator.add_harmless(faults)
    if strategy.recovers_in_place and rng.random() < 0.4:
        faults = generator.add_join(faults)
    slow = any(isinstance(fault, SlowDisk) for fault in faults.all)  # the checkpoint may be incomplete by then
    if saved_from is not None and strategy.recovers_in_place and not slow and rng.random() < 0.5:
        faults = generator.add_mass_loss(faults, saved_from)
    return faults
