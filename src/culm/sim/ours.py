"""culm's baselines: strategies that keep their shape, but for how many pipelines there are."""

from __future__ import annotations

from dataclasses import replace

from culm.sim.engine import Turn
from culm.sim.strategy import Scene, Slotted, Way


class Nothing(Slotted):
    """`none`: a loss ends the run, and whoever started it starts it again from the first step."""

    name = "none"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.checkpoint_every_s = 0.0

    def after_loss(self) -> Turn:
        self.slots.reform()
        pauses = {"detect": self.charges.detect_s, "restart": self.charges.restart_s}
        return Turn(self.rate(), pauses, "start", "start again")

    def after_join(self) -> Turn | None:
        return None


class Checkpoint(Slotted):
    """`checkpoint`: every loss goes back to the newest checkpoint; newcomers are taken in when they fill a pipeline."""

    name = "checkpoint"

    def after_loss(self) -> Turn:
        return self.restart()

    def after_join(self) -> Turn | None:
        if self.slots.whole <= self.slots.pipelines:
            return None
        more = self.scene.rate(self.steps.healthy(self.slots.whole))
        pauses = {"restart": self.charges.restart_s, "load": 2 * self.charges.load_s(self.workload)}
        stay = Way("go on", self.rate())
        return self.best([stay, Way("checkpoint and restart with more", more, pauses, self.slots.reform)])


class Drop(Slotted):
    """`drop`: a pipeline that has lost a node rests, and its samples of each step are dropped. It changes training."""

    name = "drop"

    def rate(self) -> float:
        resting = {slot.pipeline for slot in self.slots.holes}
        awake = self.slots.pipelines - len(resting)
        return super().rate() * awake / self.slots.pipelines if awake else 0.0

    def after_loss(self) -> Turn:
        filled = self.slots.fill()
        if not self.rate():
            return self.restart()
        joined = {"join": self.charges.join_s} if filled else {}
        return Turn(self.rate(), {**self.charges.alarm, **joined}, why="drop the pipeline's samples")

    def after_join(self) -> Turn | None:
        before = self.rate()
        self.slots.fill()
        if not self.slots.holes:
            self.slots.extend()
        return Turn(self.rate(), {"join": self.charges.join_s}, why="fill") if self.rate() > before else None


NOTICE_S = 120.0
"""What `migrate` lives on where nobody says otherwise: the notice of AWS."""


class Migrate(Slotted):
    """`migrate`: within the notice a node hands its state on; when that is too short, back to the checkpoint."""

    name = "migrate"

    def after_loss(self) -> Turn:
        told = replace(self.charges, notice_s=self.charges.notice_s or NOTICE_S)
        if not told.handed_over(self.workload):
            return self.restart()
        self.slots.fill()
        pauses = {"decide": self.charges.decide_s, "join": self.charges.join_s}
        if self.slots.holes:
            self.slots.reform()
            pauses["move"] = self.charges.move_s(self.workload)
        return Turn(self.rate(), pauses, why="move away within the notice")

    def after_join(self) -> Turn | None:
        if not self.slots.extend():
            return None
        return Turn(self.rate(), {"join": self.charges.join_s}, why="a further pipeline")
