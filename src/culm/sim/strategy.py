"""What all strategies share: the scene that they act in, and the choice between ways to go on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from culm.plan.reconfigure import policy
from culm.sim.engine import Turn
from culm.sim.redo import Redo
from culm.sim.shapes import Shapes
from culm.sim.slots import Slots
from culm.sim.steps import Steps

if TYPE_CHECKING:
    from culm.plan import Slot
    from culm.sim.costs import Charges
    from culm.sim.engine import Node
    from culm.sim.workload import Workload


@dataclass(frozen=True)
class Scene:
    """What is trained, what things cost, and how long steps take."""

    workload: Workload
    charges: Charges
    steps: Steps
    redo: Redo
    shapes: Shapes
    reconfigure: str = "cost"
    """By which policy culm's own strategies change their shape: cost, bamboo or never."""

    @classmethod
    def of(cls, workload: Workload, charges: Charges, reconfigure: str = "cost") -> Scene:
        """Raises PlanError for a policy that there is not."""
        policy(reconfigure)
        steps = Steps(workload, charges)
        return cls(workload, charges, steps, Redo(steps), Shapes(steps), reconfigure)

    def rate(self, step_s: float) -> float:
        """Samples per second."""
        return self.workload.samples / step_s if step_s > 0 else 0.0


@dataclass(frozen=True)
class Way:
    """One way to go on: how fast, after what pauses."""

    why: str
    rate: float
    pauses: dict[str, float] = field(default_factory=dict)
    act: Callable[[], object] = lambda: None
    """Makes it so."""
    completes: bool = False
    """Whether the open step is completed first."""

    def worth(self, expected_s: float) -> float:
        """Samples until the next loss."""
        return self.rate * max(0.0, expected_s - sum(self.pauses.values()))


class Saving(ABC):
    """A strategy that writes checkpoints, at least for the day when nobody holds some layer any more."""

    name: ClassVar[str] = ""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.workload, self.charges, self.steps = scene.workload, scene.charges, scene.steps
        self.checkpoint_write_s = self.charges.load_s(self.workload)
        self.checkpoint_every_s = max(self.charges.checkpoint_every_s, self.checkpoint_write_s)
        self.checkpoint_stall_s = self.charges.stall_s
        self.expected_s = self.now = self.left_s = 0.0
        self.phase, self.step = 0.0, 0
        self.watches = 0

    @abstractmethod
    def lost(self, gone: Sequence[Node]) -> Turn | None:
        """Nodes have vanished together. None: it goes on as before."""

    @abstractmethod
    def joined(self, new: Sequence[Node]) -> Turn | None:
        """Nodes are ready to take part."""

    def looked(self) -> Turn | None:
        """Nothing has happened since: most strategies act on events alone."""
        return None

    def best(self, ways: Sequence[Way]) -> Turn:
        """Take the way that has trained most when the next loss is due; of equals the first."""
        chosen = max(ways, key=lambda way: way.worth(self.expected_s))
        chosen.act()
        return Turn(chosen.rate, chosen.pauses, why=chosen.why, completes=chosen.completes)

    def redo_s(self, pipelines: int, hit: Sequence[Slot]) -> float:
        """How much later the open step is complete because these slots are empty; with a notice not at all."""
        return 0.0 if self.charges.notice_s else self.scene.redo.seconds(self.name, pipelines, hit, self.phase)

    def reload(self, rate: float) -> Turn:
        """All begin again from the checkpoint."""
        pauses = {**self.charges.alarm, "restart": self.charges.restart_s, "load": self.charges.load_s(self.workload)}
        return Turn(rate, pauses, "checkpoint", "restart from the checkpoint")


class Slotted(Saving):
    """A strategy with D pipelines of P stages."""

    apart: ClassVar[bool] = False

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.slots = Slots(self.workload.stages, self.workload.pipelines, apart=self.apart)
        self.began = False
        self.hit: list[Slot] = []

    def lost(self, gone: Sequence[Node]) -> Turn | None:
        self.hit = self.slots.remove(gone)
        return self.after_loss() if self.hit else None

    def joined(self, new: Sequence[Node]) -> Turn | None:
        self.slots.add(new)
        if self.slots.pipelines:
            return self.after_join()
        if not self.slots.whole:
            return None
        return self.start()

    def start(self) -> Turn:
        """The first time from nothing; later from the checkpoint, as there were too few nodes to hold the model."""
        again, self.began = self.began, True
        self.slots.reform()
        if again:
            return self.reload(self.rate())
        return Turn(self.rate(), {"start": self.charges.restart_s}, why="start")

    @abstractmethod
    def after_loss(self) -> Turn:
        """Slots are empty now: those of `self.hit` since this moment."""

    @abstractmethod
    def after_join(self) -> Turn | None:
        """More stand by than before."""

    def step_s(self) -> float:
        """A step as things stand."""
        return self.steps.healthy(self.slots.pipelines)

    def rate(self) -> float:
        return self.scene.rate(self.step_s()) if self.slots.pipelines else 0.0

    def restart(self) -> Turn:
        """Nobody holds some layer: from the checkpoint, in as many pipelines as there are nodes for."""
        self.slots.reform()
        return self.reload(self.rate())
