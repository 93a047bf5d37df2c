"""Random fault schedules from a seed, for a run whose shape changes.

Other layouts are requested, and nodes join and leave so that the policy changes the shape, too. Faults occur
during a change: while layers move, while open steps drain, and right after the new shape has started.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from culm.plan.model.shape_prediction import near_equal_depths
from culm.plan.reshape.pipeline_shape import format_depths
from culm.testing.fault_schedule import Faults

RESHAPE_SHAPES = ((1, 4), (2, 2), (2, 3), (3, 2))
_LAYERS = 6
_LETHAL_WEIGHTS = {"kill": 10, "notice": 6, "long pause": 3, "partition": 3}
_HARMLESS_WEIGHTS = {"pause": 2, "outage": 4, "late": 2, "slow link": 2, "lose": 2}
"""Kinds of faults that are drawn, with their weights."""
_MOMENTS = (
    *(("layers_sent", 1), ("layers_sent", 2), ("layers_received", 1), ("layers_received", 2)),
    *(("adopt", 2), ("adopt", 3), ("inventory", 1)),
)
"""Moments of a change of shape, and which occurrence of the moment; the first epoch counts."""


@dataclass
class _ReshapeFaultGenerator:
    """Builds a fault schedule. Layouts count workers, everything else counts nodes.

    With checkpoints, all nodes but a few may be lost from step `checkpoint_from` on. Without, at most one node is lost
    and every node has a slot: then each layer has another holder, whatever the shape is.
    """

    rng: random.Random
    pipelines: int
    nodes: int
    steps: int
    lease_s: float
    checkpoint_from: int | None
    """From this step on there is a checkpoint; None: there is none."""
    workers_per_node: int = 1
    joined_count: int = 0
    lost_nodes: set[int] = field(default_factory=set)
    layout_request_steps: list[int] = field(default_factory=list)
    """The steps in which a layout is requested."""

    @property
    def first_step(self) -> int:
        """The first step in which a fault may strike."""
        return self.checkpoint_from or 0

    def early_moment(self) -> dict[str, Any]:
        """A moment early in the run, so that steps are left for its consequences."""
        step = self.rng.randint(self.first_step, max(self.first_step, self.steps // 2))
        return {"step": step, "nth": self.pick_nth()}

    def pick_nth(self) -> int:
        """The number of an action in a step: a node has at least five, and many more in long pipelines."""
        return self.rng.randint(1, self.rng.choice((5, 5, 12)))

    def reshape_moment(self) -> dict[str, Any]:
        """A moment before, during or right after a change of shape."""
        if self.rng.random() < 0.6:
            at, nth = self.rng.choice(_MOMENTS)
            return {"at": at, "nth": nth}
        if not self.layout_request_steps:
            return self.early_moment()
        step = min(self.rng.choice(self.layout_request_steps) + self.rng.randint(1, 4), self.steps - 1)
        return {"step": step, "nth": self.pick_nth()}

    def add_layout_request(self, faults: Faults) -> Faults:
        """Add a request for a layout; now and then one for which there are too few nodes."""
        moment = self.early_moment()
        there = self.nodes + self.rng.choice(
            (0, 0, 0, 0, 5) if self.checkpoint_from is None else (self.joined_count, -1, 0, 0, 0, 5)
        )
        fewest = 2 if self.checkpoint_from is None else 1  # one pipeline cannot lose a node without a checkpoint
        workers = there * self.workers_per_node
        pipelines = self.rng.choice([D for D in range(fewest, min(4, workers) + 1) if self.pipelines != D])
        depths = tuple(min(depth, _LAYERS) for depth in near_equal_depths(workers, pipelines))
        self.layout_request_steps.append(moment["step"])
        return faults.request_layout(format_depths(depths), node=self.rng.randrange(self.nodes), **moment)

    def add_join(self, faults: Faults) -> Faults:
        count = self.rng.choice((1, 1, 2, 3))
        self.joined_count += count
        return faults.join(self.rng.randrange(self.nodes), count=count, **self.early_moment())

    def pick_victims(self) -> tuple[int, ...]:
        """Nodes to lose, newcomers included. The node with the lowest number is most likely the leader."""
        alive = [node for node in range(self.nodes + self.joined_count) if node not in self.lost_nodes]
        staying = 2 if self.workers_per_node == 1 else 1
        spare = (1 if self.checkpoint_from is None else self.nodes - staying) - len(self.lost_nodes)
        first = 0 if self.rng.random() < 0.25 else self.rng.randrange(len(alive))
        return tuple(alive[first : first + min(spare, self.rng.choice((1, 1, 1, 2)))])

    def add_fault(self, faults: Faults) -> Faults:
        """Add a fault."""
        kinds = _LETHAL_WEIGHTS if self.rng.random() < 0.7 else _HARMLESS_WEIGHTS
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        nodes = self.pick_victims() if kinds is _LETHAL_WEIGHTS else ()
        return self.add_loss(faults, kind, nodes) if nodes else self.add_harmless(faults, kind)

    def add_loss(self, faults: Faults, kind: str, nodes: tuple[int, ...]) -> Faults:
        moment = self.reshape_moment() if self.layout_request_steps or self.lost_nodes else self.early_moment()
        self.lost_nodes.update(nodes)
        node = nodes if len(nodes) > 1 else nodes[0]
        longer = round(self.lease_s * self.rng.uniform(1.1, 4.0), 3)
        match kind:
            case "notice":
                span = self.rng.choice(((0.0, 0.0), (0.01, 0.1), (0.1, 0.5), (1.0, 10.0)))
                return faults.warn(node, seconds=round(self.rng.uniform(*span), 3), **moment)
            case "long pause":
                return faults.pause(node, seconds=longer, **moment)
            case "partition":
                return faults.partition(node, seconds=longer, **moment)
        return faults.kill(node, silence=self.rng.random() < 0.5, **moment)

    def add_harmless(self, faults: Faults, kind: str) -> Faults:
        """Add a fault by which no node is lost. A lost message may start an epoch before there is a checkpoint, and
        nodes may be lost in that epoch; so messages are dropped only where no checkpoint is needed."""
        node, other = self.rng.sample(range(self.nodes), 2)
        seconds = round(self.rng.uniform(0.01, 0.5 * self.lease_s), 3)
        match kind:
            case "outage":
                return faults.outage(node, seconds=round(4 * seconds, 3), **self.reshape_moment())
            case "lose" if self.checkpoint_from is None:
                return faults.drop_message(node, other, nth=self.rng.randint(1, 80))
            case "late":
                return faults.delay_message(node, other, seconds=seconds, nth=self.rng.randint(1, 80))
            case "slow link":
                return faults.slow_link(node, other, latency=round(seconds / 20, 4))
        return faults.pause(node, seconds=seconds, **self.reshape_moment())


def random_reshape_faults(
    rng: random.Random,
    pipelines: int,
    nodes: int,
    *,
    steps: int,
    lease_s: float,
    saved_from: int | None = None,
    workers_per_node: int = 1,
) -> Faults:
    """Layout requests, newcomers and one to four faults for a run whose shape may change. `saved_from`: from this step
    on there is a checkpoint; None: there is none, and at most one node is lost."""
    generator = _ReshapeFaultGenerator(rng, pipelines, nodes, steps, lease_s, saved_from, workers_per_node)
    faults = Faults()
    if saved_from is not None and rng.random() < 0.6:
        faults = generator.add_join(faults)
    for _ in range(rng.choice((0, 1, 2, 2, 3))):
        faults = generator.add_layout_request(faults)
    for _ in range(rng.choice((1, 2, 3, 3, 4))):
        faults = generator.add_fault(faults)
    return faults
