"""Settings of `culm bench resilience`: how long it measures, and which scenarios."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.resilience.preemption_goodput import PreemptionScenario
from benchmarks.resilience.strategy_overhead import OverheadEffort

from benchmarks.resilience import strategy_overhead
from culm.strategies import known_names

STRATEGY_ORDER = ("none", "checkpoint", "migrate", "drop", "templates", "shadow-lazy", "shadow", "reroute", "auto")
STRATEGIES = tuple(name for name in STRATEGY_ORDER if name in known_names())
NOTICE_STEPS = 2.0
"""Notice of a loss that `migrate` gets: without it, it equals `checkpoint`. The other strategies get no notice."""
RESTART_STEPS, WRITE_STEPS, BAMBOO_LOSS_EVERY = 17.0, 11.0, 45.0
"""Costs of the baseline measured by Bamboo's authors: a step took 8.3 s on 64 nodes, a restart with loading 138 s, a
write 89 s."""


@dataclass(frozen=True, kw_only=True)
class ResilienceSettings:
    """How long the bench measures, and which scenarios."""

    scenario: PreemptionScenario
    strategies: tuple[str, ...] = STRATEGIES
    checkpoint_intervals: tuple[int, ...]
    """Checkpoint intervals, in steps, over which the baseline is tuned ..."""
    wait_options: tuple[bool, ...]
    """... and whether a restart waits for a node."""
    pause_kills: int
    pause_action_s: float | None
    detect_kills: int = 0
    integrity_rounds: int = 20
    grid: tuple[tuple[float, float], ...] = ()
    """(seconds of an action, steps between two losses) of each cell."""
    bamboo_scenario: PreemptionScenario | None
    effort: OverheadEffort = strategy_overhead.FULL
    real_settings: ResilienceSettings | None = None


_SCENARIO = PreemptionScenario(pipelines=4, stages=4, micro_batches_per_pipeline=4, action_s=2 / 21, steps=40)
"""Steps of two seconds, 21 actions long; nine of them are bubbles, in which peers run a lost node's micro-batches."""
_REAL_SCENARIO = PreemptionScenario(pipelines=4, stages=3, micro_batches_per_pipeline=4, action_s=None, steps=30)
FULL = ResilienceSettings(
    scenario=_SCENARIO,
    checkpoint_intervals=(1, 2, 4),
    wait_options=(True, False),
    pause_kills=40,
    pause_action_s=0.05,
    detect_kills=40,
    grid=tuple((unit_s, every) for unit_s in (0.01, 0.025, 0.05) for every in (5.0, 10.0, 20.0)),
    bamboo_scenario=replace(_SCENARIO, action_s=0.02, steps=90, steps_between_losses=BAMBOO_LOSS_EVERY),
    real_settings=ResilienceSettings(
        scenario=_REAL_SCENARIO,
        strategies=("checkpoint", "templates", "shadow", "reroute"),
        checkpoint_intervals=(1, 2),
        wait_options=(True,),
        pause_kills=12,
        pause_action_s=None,
        bamboo_scenario=replace(_REAL_SCENARIO, steps=90, steps_between_losses=BAMBOO_LOSS_EVERY),
    ),
)
QUICK = ResilienceSettings(
    scenario=PreemptionScenario(pipelines=4, stages=3, micro_batches_per_pipeline=3, action_s=0.025, steps=14),
    checkpoint_intervals=(4,),
    wait_options=(False,),
    pause_kills=2,
    pause_action_s=0.03,
    detect_kills=4,
    integrity_rounds=3,
    bamboo_scenario=None,
    effort=strategy_overhead.QUICK,
)
