"""What is to be planned when slots have failed: a step of which some micro-batches have lost their worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from culm.errors import PlanError
from culm.plan.partition import count
from culm.schedule import UNIT, Costs, Kind, blocks
from culm.schedule.plan import check_shape
from culm.schedule.timing import prices, sends

if TYPE_CHECKING:
    from collections.abc import Sequence

Memory: TypeAlias = int | Literal["1f1b"] | None
"""The most live activations on a worker: a number for all, as many as 1F1B keeps in that stage (P - s), or no cap."""


class Slot(NamedTuple):
    """A place that one worker fills; written 2.1."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.stage}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step to be planned. Raises PlanError or ScheduleError, in one sentence, if no plan can exist."""

    pipelines: int
    """D."""
    stages: int
    """P."""
    micro_batches: int
    """M, over all pipelines."""
    costs: Costs = UNIT
    failed: frozenset[Slot] = frozenset()
    split: bool = True
    """Backward in two halves, I and W; otherwise as B."""
    stagger: bool = True
    """Each stage steps on its own clock: it may begin the next step while others finish this one."""
    memory: Memory = None

    def __post_init__(self) -> None:
        check_shape(self.pipelines, self.stages, self.micro_batches)
        self._check_failed()
        if self.memory not in (None, "1f1b") and not (isinstance(self.memory, int) and self.memory >= 1):
            raise PlanError(f"memory is {self.memory!r}: use none, 1f1b, or a number of activations of at least 1")
        prices(self.costs, self.stages)
        sends(self.costs, self.stages)

    def _check_failed(self) -> None:
        for slot in sorted(self.failed):
            if not (0 <= slot.pipeline < self.pipelines and 0 <= slot.stage < self.stages):
                last = Slot(self.pipelines - 1, self.stages - 1)
                raise PlanError(f"the failed slot {slot} does not exist: use 0.0 to {last}")
        for stage, lost in sorted(Counter(slot.stage for slot in self.failed).items()):
            if lost == self.pipelines:
                raise PlanError(
                    f"stage {stage} has lost all of its {count(lost, 'worker')}, so nobody holds its layers: "
                    f"at most {lost - 1} of a stage may fail"
                )

    @cached_property
    def blocks(self) -> tuple[range, ...]:
        """The micro-batches of each pipeline."""
        return blocks(self.pipelines, self.micro_batches)

    @cached_property
    def prices(self) -> dict[Kind, Sequence[float]]:
        """What each kind costs, by stage."""
        return prices(self.costs, self.stages)

    @cached_property
    def sends(self) -> tuple[float, ...]:
        """What it costs to get from a stage to the next, or back."""
        return sends(self.costs, self.stages)

    @property
    def backward(self) -> Kind:
        """The action that the stage before waits for."""
        return Kind.I if self.split else Kind.B

    def live(self, stage: int) -> list[int]:
        """The pipelines whose worker of the stage is alive."""
        return [pipeline for pipeline in range(self.pipelines) if Slot(pipeline, stage) not in self.failed]

    def load(self, stage: int) -> int:
        """Micro-batches of the busiest worker of a stage when those of the failed ones are shared evenly."""
        alive = self.live(stage)
        return max(-(-self.micro_batches // len(alive)), *(len(self.blocks[pipeline]) for pipeline in alive))

    def cap(self, stage: int) -> int:
        """The most activations that a worker of the stage may have alive; M means any number."""
        if self.memory is None:
            return self.micro_batches
        return self.stages - stage if self.memory == "1f1b" else self.memory


def absorbed(case: Case, stage: int) -> bool:
    """Whether the bubble of 1F1B has room for what a worker of the stage runs in place of failed peers.

    That is, with equal costs, whether the failures can be free: ceil(m f / (D - f)) <= P - 1, with m per pipeline.
    """
    return case.load(stage) - len(case.blocks[0]) <= case.stages - 1
