"""The strategy of a run: the one that was asked for, if the shape allows it, or the cheapest. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.plan.failures import Case
from culm.plan.goodput import Risk
from culm.plan.layout import SHADOWING
from culm.plan.period import period
from culm.plan.relayout import segment_costs
from culm.plan.strategy import choose_strategy, interval
from culm.schedule import Costs, Plan, timing

if TYPE_CHECKING:
    from culm.cluster.setup import Request
    from culm.plan.profile import Profile

_BUBBLE = 0.02
"""With less of the time idle than this there is nothing to run forwards in."""
_SAVING = ("checkpoint", "migrate")
"""Strategies that a loss without notice throws back to a checkpoint."""
_PARTS = 10
"""These write as many checkpoints in a run at the least: the length of a step is an estimate, and may be off."""


@dataclass(frozen=True)
class Settled:
    """What a run does about losses."""

    strategy: str
    why: str
    eager: bool = False
    """Whether shadows run forwards ahead."""
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0: one at the end."""


@dataclass(frozen=True)
class Terms:
    """What the choice depends on, beside the request."""

    plan: Plan
    profile: Profile
    cuts: tuple[int, ...]
    joint: bool
    """Whether a step ends for all stages together."""
    steps: int

    @property
    def costs(self) -> Costs:
        forward, inputs, weight = zip(*segment_costs(self.profile.layers, self.cuts), strict=True)
        return Costs(forward=forward, input=inputs, weight=weight)

    @property
    def staggered(self) -> bool:
        return not self.joint and self.plan.segments == self.plan.stages

    @property
    def step_s(self) -> float:
        """A step when nothing happens."""
        return period(self.plan, self.costs) if self.staggered else timing(self.plan, self.costs).makespan

    @property
    def idle(self) -> float:
        """The share of a step in which workers wait."""
        timeline = timing(self.plan, self.costs)
        if not self.staggered:
            return timeline.bubble
        room = len(timeline.busy) * self.step_s
        return max(0.0, 1.0 - sum(timeline.busy) / room) if room else 0.0

    @property
    def case(self) -> Case:
        """The step as the planner has it: segments of a stage together."""
        parts = segment_costs(self.profile.layers, self.cuts)
        P = self.plan.stages
        stages = [[sum(kind) for kind in zip(*parts[stage::P], strict=True)] for stage in range(P)]
        forward, inputs, weight = zip(*stages, strict=True)
        return Case(
            pipelines=self.plan.pipelines,
            stages=P,
            micro_batches=self.plan.micro_batches,
            costs=Costs(forward=forward, input=inputs, weight=weight),
            stagger=not self.joint,
        )


def settle(request: Request, terms: Terms) -> Settled:
    """What is done about losses, and why. Raises UsageError for a strategy that can not work in this shape."""
    _check(request, terms.plan.pipelines, terms.plan.stages)
    state_bytes = sum(layer.resident_bytes for layer in terms.profile.layers)
    risk = Risk(losses=request.losses)
    strategy, why, seconds = request.strategy, f"strategy {request.strategy}, as asked", None
    if strategy == "auto":
        saves = request.out is not None
        chosen = choose_strategy(terms.case, terms.step_s, state_bytes=state_bytes, risk=risk, saves=saves)
        strategy, why, seconds = chosen.strategy, chosen.why, chosen.checkpoint_s
    elif strategy in _SAVING:
        seconds = interval(terms.case, terms.step_s, state_bytes=state_bytes, risk=risk)
    elif strategy == "drop":
        why += ": samples of a pipeline that misses a node are left out, which changes training"
    every, told = _interval(request, strategy, terms.step_s, terms.steps, seconds)
    eager, ahead = _eager(strategy, terms)
    return Settled(strategy, why + told + ahead, eager, every)


def _check(request: Request, D: int, P: int) -> None:
    asked = request.strategy
    if asked in ("reroute", "templates") and D == 1:
        raise UsageError(f"--strategy {asked} needs peers, and there is 1 pipeline: use --pipelines 2, or shadow")
    if asked == "drop" and D == 1:
        raise UsageError(
            "--strategy drop needs a pipeline that goes on, and there is 1: use --pipelines 2, or checkpoint"
        )
    if asked in SHADOWING and P == 1:
        raise UsageError(f"--strategy {asked} needs a predecessor, and there is 1 stage: use --stages 2, or reroute")
    if asked in _SAVING and D * P == 1:
        raise UsageError(f"--strategy {asked} needs somebody to go on, and there is 1 node: use --nodes 2, or none")
    if asked in _SAVING and request.out is None:
        raise UsageError(f"--strategy {asked} needs a folder for its checkpoints: add --out, as in --out runs/a")


def _interval(request: Request, strategy: str, step_s: float, steps: int, seconds: float | None) -> tuple[int, str]:
    """(steps between two checkpoints, what there is to say): as asked, or by what they cost and what a loss does."""
    if request.checkpoint_every or seconds is None or strategy == "none":
        bare = request.strategy == "auto" and strategy != "none" and request.out is None
        told = "; without --out there is no checkpoint for the day when all holders of a layer go" if bare else ""
        return request.checkpoint_every, told
    every = max(1, round(seconds / step_s)) if step_s else 1
    if strategy in _SAVING:
        every = min(every, max(1, steps // _PARTS))
    if every >= steps:
        return 0, f"; a checkpoint is due after {seconds:.0f} s, so one at the end will do"
    return every, f"; a checkpoint every {every} steps"


def _eager(strategy: str, terms: Terms) -> tuple[bool, str]:
    """(whether shadows run forwards ahead, what there is to say): where the schedule has bubbles."""
    if strategy != "shadow":
        return False, ""
    idle = terms.idle
    if idle < _BUBBLE:
        return False, f"; {terms.plan.name} leaves {idle:.1%} of the time idle, so eager becomes lazy"
    return True, f"; replicas run forward in the bubbles, {idle:.0%} of the time"
