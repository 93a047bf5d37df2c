"""culm's own strategies, with the planner's own functions: what a real run does, by another clock."""

from __future__ import annotations

from dataclasses import replace

from culm.sim.engine import Turn
from culm.sim.led import neighbours
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


class Shadow(Slotted):
    """`shadow`: the predecessor of a lost worker has its layers and runs both stages until the hole is filled."""

    name = "shadow"
    apart = True

    def step_s(self) -> float:
        return self.steps.shadowed(self.slots.pipelines) * self.steps.taken_over(self.slots.pipelines, self.slots.holes)

    def after_loss(self) -> Turn:
        D, slots = self.slots.pipelines, self.slots
        pauses = {**self.charges.alarm, "redo": self.redo_s(D, self.hit)}
        bare = self.unshadowed()
        if bare and max(slots.spread()) >= D:
            return self.restart()
        if slots.fill():
            pauses["join"] = self.charges.join_s
        ways = [] if bare and slots.holes else [Way("the shadow takes over", self.rate(), pauses, completes=True)]
        if slots.holes:
            rate = self.scene.rate(self.steps.shadowed(slots.whole)) if slots.whole else 0.0
            moving = {**pauses, "move": self.charges.move_s(self.workload), "join": self.charges.join_s}
            ways.append(Way("fewer whole pipelines", rate, moving, slots.reform, completes=True))
        return self.best(ways)

    def unshadowed(self) -> bool:
        """Whether two neighbours are gone: then the predecessor of one has nothing to take over from."""
        return self.workload.stages == 1 or neighbours(self.slots.holes, self.slots.stages)

    def after_join(self) -> Turn | None:
        filled, grown = self.slots.fill(), 0
        if not self.slots.holes:
            grown = self.slots.extend()
        return Turn(self.rate(), {"join": self.charges.join_s}, why="fill") if filled or grown else None


class ShadowLazy(Shadow):
    """`shadow-lazy`: the shadow is kept current, but runs nothing ahead of time."""

    name = "shadow-lazy"


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
