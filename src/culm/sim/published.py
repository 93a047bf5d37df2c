"""The systems that culm is measured against, as their papers describe them: 1F1B, and their own reactions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.plan.reconfigure import Outlook, bamboo
from culm.sim.engine import Turn
from culm.sim.led import Seen
from culm.sim.strategy import Saving, Scene, Slotted, Way
from culm.sim.uneven import Templates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.sim.engine import Node

_NO_OUTLOOK = Outlook(steps={}, next_event=0.0)
"""Bamboo's rule looks at no cost and no clock."""


class OnDemand(Slotted):
    """`on-demand`: nodes that stay, at their price, on 1F1B. Losses and newcomers of the trace are not its own."""

    name = "on-demand"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.checkpoint_every_s = 0.0

    def step_s(self) -> float:
        return self.steps.one_f_one_b(self.slots.pipelines)

    def after_loss(self) -> Turn:
        self.slots.reform()
        return Turn(self.rate())

    def after_join(self) -> Turn | None:
        return Turn(self.rate(), why="a further pipeline") if self.slots.extend() else None


class CheckpointRestart(Slotted):
    """`checkpoint-restart`: the baseline that Bamboo's authors measured, on 64 spot nodes with a model of 3.8 B.

    88 s to form anew, 50 s to load, 89 s to write a checkpoint and the next one right behind, each of which holds
    training up for 3.9 s. Newcomers too are taken in by a restart from the checkpoint.
    """

    name = "checkpoint-restart"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.checkpoint_every_s = self.checkpoint_write_s = 89.0
        self.checkpoint_stall_s = 3.9

    def step_s(self) -> float:
        return self.steps.one_f_one_b(self.slots.pipelines)

    def after_loss(self) -> Turn:
        return self._again({"detect": self.charges.detect_s})

    def after_join(self) -> Turn | None:
        return self._again({}) if self.slots.whole > self.slots.pipelines else None

    def _again(self, pauses: dict[str, float]) -> Turn:
        self.slots.reform()
        again = {**pauses, "restart": 88.0, "load": 50.0}
        return Turn(self.rate(), again, "checkpoint", "restart from the checkpoint")


class Varuna(Saving):
    """`varuna`: the job is morphed to the best D x P for the nodes at hand, by a restart from the checkpoint.

    A checkpoint after every tenth step, which training waits for.
    """

    name = "varuna"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.members: dict[str, Node] = {}
        self.used = 0
        self.rate = 0.0
        self.checkpoint_write_s = 0.0
        self.checkpoint_stall_s = self.charges.load_s(self.workload)

    def fastest(self) -> tuple[float, int]:
        """Rate and nodes of the fastest even shape."""
        w, n = self.workload, len(self.members)
        shapes = [(n // P, P) for P in range(w.fewest, (w.layers or n) + 1) if 1 <= n // P <= w.micro_batches]
        found = [(self.scene.rate(self.steps.even(D, P)), D * P) for D, P in shapes]
        return max(found, default=(0.0, 0))

    def morph(self) -> None:
        self.rate, self.used = self.fastest()
        self.checkpoint_every_s = 10 * self.workload.samples / self.rate if self.rate else 0.0

    def lost(self, gone: Sequence[Node]) -> Turn | None:
        for node in gone:
            self.members.pop(node.name, None)
        if not self.used:
            return None
        self.morph()
        return self.reload(self.rate)

    def joined(self, new: Sequence[Node]) -> Turn | None:
        self.members.update((node.name, node) for node in new)
        rate = self.fastest()[0]
        pauses = {"restart": self.charges.restart_s, "load": 2 * self.charges.load_s(self.workload)}
        stay = [Way("go on", self.rate)] if self.used else []
        return self.best([*stay, Way("morph", rate, pauses, self.morph)]) if rate else None


class Oobleck(Templates):
    """`oobleck`: templates as published, on 1F1B: pipelines of unequal depth over all nodes, the step lost."""

    name = "oobleck"
    published = True


class Bamboo(Slotted):
    """`bamboo`: redundant computation as published, with the rules of the authors' simulator and what it leaves out.

    Steps carry the cost of eager redundancy. A loss is taken over by the predecessor, at 1.5 times the step; a
    rendezvous (20 s) rebalances when those that stand by can relieve all overloaded nodes, when more than 5 % of the
    losses would be fatal, or when a further pipeline fits. A fatal loss goes back to the checkpoint.
    """

    name = "bamboo"
    apart = True

    def step_s(self) -> float:
        step = self.steps.redundant(self.slots.pipelines)
        return step * 1.5 if self.slots.holes else step

    def after_loss(self) -> Turn:
        if self.fatal():
            return self.restart()
        redo = len(self.hit) * self.charges.redo_s(self.workload, pipelines=self.slots.pipelines, phase=self.phase)
        pauses = {**self.charges.alarm, "redo": redo}
        if not self.due():
            return Turn(self.rate(), pauses, why="the shadow takes over")
        self.slots.reform()
        return Turn(self.rate(), {**pauses, "restart": 20.0}, why="rendezvous")

    def fatal(self) -> bool:
        """A lost node carried two stages, or its predecessor did: two neighbours are gone."""
        holes = self.slots.holes
        return any((d, (s - 1) % self.slots.stages) in holes for d, s in holes) or self.slots.stages == 1

    def due(self) -> bool:
        """The published rule for a rebalancing, as the planner has it."""
        slots = self.slots
        everyone = [*slots.nodes.values(), *slots.standby.values()]
        state = Seen(
            alive={node.name: node.zone for node in everyone},
            slots={slot: node.name for slot, node in slots.nodes.items()},
            depths=(slots.stages,) * slots.pipelines,
            most=slots.most,
            empty=frozenset(slots.holes),
            spare=tuple(slots.standby),
        )
        return bamboo(state, _NO_OUTLOOK, 0.0)[0].kind != "stay"

    def after_join(self) -> Turn | None:
        if not self.due():
            return None
        self.slots.reform()
        return Turn(self.rate(), {"restart": 20.0}, why="rendezvous")
