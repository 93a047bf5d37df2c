"""The planning problem after failures: a step in which some micro-batches have lost their worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from culm.errors import PlanError
from culm.schedule import UNIT_COSTS, Costs, Kind, split_micro_batches
from culm.schedule.plan import check_plan_counts
from culm.schedule.plan_timing import action_costs, send_costs
from culm.text_format import count_noun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.plan.replan.two_range_schedule import TwoRanges

ActivationLimit: TypeAlias = int | tuple[int, ...] | Literal["1f1b"] | None
"""Limit of live activations on a worker: a number for all, one for each stage, "1f1b" (P - s in stage s, as in 1F1B),
or None."""


class Slot(NamedTuple):
    """A position in the plan that one worker fills; written pipeline.stage, for example 2.1."""

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.stage}"


@dataclass(frozen=True, kw_only=True)
class PlanCase:
    """A step to plan. Raises PlanError or ScheduleError if no plan can exist."""

    pipelines: int
    """D."""
    stages: int
    """P."""
    micro_batches: int
    """M, over all pipelines."""
    costs: Costs = UNIT_COSTS
    failed: frozenset[Slot] = frozenset()
    split: bool = True
    """Whether the backward is split into I and W; otherwise it is one B."""
    stagger: bool = True
    """Whether stages run the optimizer at different times: a stage may begin the next step while others finish."""
    memory: ActivationLimit = None
    early_sends: bool = False
    """Whether the schedules with whole backwards split those that another stage waits for, as a run does where it
    knows the overhead of splitting (`costs.split`)."""

    two_ranges: TwoRanges | None = None
    """The model cut into two segments per worker, for the schedule `planned` with every slot filled; None: it cannot
    be, or must not."""

    def __post_init__(self) -> None:
        check_plan_counts(self.pipelines, self.stages, self.micro_batches)
        self._check_failed()
        self._check_memory()
        action_costs(self.costs, self.stages)
        send_costs(self.costs, self.stages)

    def _check_memory(self) -> None:
        limits = self.memory if isinstance(self.memory, tuple) else (self.memory,) * self.stages
        numbers = len(limits) == self.stages and all(isinstance(limit, int) and limit >= 1 for limit in limits)
        if self.memory not in (None, "1f1b") and not numbers:
            raise PlanError(
                f"memory is {self.memory!r}: use none, 1f1b, or a number of activations of at least 1, for all stages "
                "or one for each"
            )

    def _check_failed(self) -> None:
        for slot in sorted(self.failed):
            if not (0 <= slot.pipeline < self.pipelines and 0 <= slot.stage < self.stages):
                last = Slot(self.pipelines - 1, self.stages - 1)
                raise PlanError(f"the failed slot {slot} does not exist: use 0.0 to {last}")
        for stage, lost in sorted(Counter(slot.stage for slot in self.failed).items()):
            if lost == self.pipelines:
                raise PlanError(
                    f"stage {stage} has lost all of its {count_noun(lost, 'worker')}, so its layers are lost: "
                    f"at most {lost - 1} of a stage may fail"
                )

    @cached_property
    def micros_by_pipeline(self) -> tuple[range, ...]:
        """The micro-batches of each pipeline."""
        return split_micro_batches(self.pipelines, self.micro_batches)

    @cached_property
    def action_costs(self) -> dict[Kind, Sequence[float]]:
        """The cost of each kind of action, by stage."""
        return action_costs(self.costs, self.stages)

    @cached_property
    def send_costs(self) -> tuple[float, ...]:
        """The time to send from a stage to the next, or back."""
        return send_costs(self.costs, self.stages)

    @property
    def backward_kind(self) -> Kind:
        """The action that the previous stage waits for."""
        return Kind.I if self.split else Kind.B

    def live_pipelines(self, stage: int) -> list[int]:
        """The pipelines whose worker of the stage is alive."""
        return [pipeline for pipeline in range(self.pipelines) if Slot(pipeline, stage) not in self.failed]

    def max_micros_per_worker(self, stage: int) -> int:
        """Micro-batches of the busiest worker of a stage when those of failed workers are shared evenly."""
        if not self.failed:
            return len(self.micros_by_pipeline[0])
        alive = self.live_pipelines(stage)
        return max(
            -(-self.micro_batches // len(alive)), *(len(self.micros_by_pipeline[pipeline]) for pipeline in alive)
        )

    def max_activations(self, stage: int) -> int:
        """The most activations that a worker of the stage may keep; M means no limit."""
        if self.memory is None:
            return self.micro_batches
        if isinstance(self.memory, tuple):
            return self.memory[stage]
        return self.stages - stage if self.memory == "1f1b" else self.memory


def fits_in_bubble(case: PlanCase, stage: int) -> bool:
    """Whether the bubble of 1F1B is large enough for the micro-batches that a worker runs for failed peers.

    With equal costs this means that the failures cost nothing: ceil(m f / (D - f)) <= P - 1, with m per pipeline.
    """
    return case.max_micros_per_worker(stage) - len(case.micros_by_pipeline[0]) <= case.stages - 1
