"""Strategies side by side: over one trace, or over many markets out of seeds, with how sure the numbers are."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from culm.errors import UsageError
from culm.market.trace import HOUR, Event, Trace
from culm.sim import led, ours, published, uneven
from culm.sim.costs import Charges
from culm.sim.engine import Engine, Run
from culm.sim.strategy import Saving, Scene
from culm.sim.workload import Workload

_MADE: tuple[type[Saving], ...] = (
    led.Reroute,
    led.Shadow,
    led.ShadowLazy,
    uneven.Templates,
    ours.Migrate,
    ours.Drop,
    ours.Checkpoint,
    ours.Nothing,
    published.Bamboo,
    published.Oobleck,
    published.Varuna,
    published.CheckpointRestart,
    published.OnDemand,
)
STRATEGIES: dict[str, Callable[[Scene], Saving]] = {"auto": led.auto, **{each.name: each for each in _MADE}}
"""By name: culm's own, then those of others."""

ON_DEMAND = "on-demand"


@dataclass(frozen=True)
class Price:
    """Dollars per hour of a node."""

    spot: float
    on_demand: float


@dataclass(frozen=True)
class Mean:
    """The mean over runs, and where it would lie in 95 of 100 studies like this."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        mean = fmean(values)
        if len(values) < 2 or not math.isfinite(mean):
            return cls(mean, mean, mean)
        half = student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
        return cls(mean, mean - half, mean + half)


def student(freedom: int) -> float:
    """The 97.5 % point of Student's t (Hill's expansion around the normal; within 1 % from 3 degrees of freedom on)."""
    z = 1.959964
    exact = {1: 12.706, 2: 4.303}
    g1, g2, g3 = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return exact.get(freedom, z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3)


@dataclass
class Outcome:
    """One strategy, over all runs."""

    name: str
    runs: list[Run] = field(default_factory=list)
    hits: int = 0
    misses: int = 0

    @property
    def goodput(self) -> Mean:
        """Useful samples per second over all of the time."""
        return Mean.of([run.samples / run.seconds for run in self.runs])

    @property
    def cost_per_h(self) -> Mean:
        return Mean.of([run.usd / run.seconds * HOUR for run in self.runs])

    @property
    def value(self) -> Mean:
        """Samples per second per dollar per hour."""
        return Mean.of([run.samples / run.usd / HOUR if run.usd else 0.0 for run in self.runs])

    @property
    def usd_per_million(self) -> Mean:
        """Infinite where a run got nowhere."""
        return Mean.of([run.usd / run.samples * 1e6 if run.samples else math.inf for run in self.runs])

    @property
    def split(self) -> dict[str, float]:
        """Shares of the time, which add up to 1."""
        kinds = dict.fromkeys(kind for run in self.runs for kind in run.split)
        return {kind: fmean(run.split.get(kind, 0.0) / run.seconds for run in self.runs) for kind in kinds}

    def mean(self, of: Callable[[Run], float]) -> float:
        return fmean(of(run) for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        million = self.usd_per_million
        return {
            "goodput": self.goodput.value,
            "goodput_ci": [self.goodput.low, self.goodput.high],
            "cost_per_h": self.cost_per_h.value,
            "cost_usd": self.mean(lambda run: run.usd),
            "value": self.value.value,
            "value_ci": [self.value.low, self.value.high],
            "usd_per_million": million.value if math.isfinite(million.value) else None,
            "usd_per_million_ci": [million.low, million.high] if math.isfinite(million.value) else None,
            "split": self.split,
            "preemptions": self.mean(lambda run: run.preemptions),
            "recoveries": self.mean(lambda run: run.recoveries),
            "rollbacks": self.mean(lambda run: run.rollbacks),
            "nodes": self.mean(lambda run: run.node_s / run.seconds),
            "decisions": _summed(run.reasons for run in self.runs),
            "plans": {"hits": self.hits, "misses": self.misses},
        }


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for count in counts:
        for name, many in count.items():
            found[name] = found.get(name, 0) + many
    return found


def names_of(text: str) -> list[str]:
    """`--strategy`: a name, several with commas, or all. Raises UsageError for one that is not there."""
    if text == "all":
        return list(STRATEGIES)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names or [text]:
        if name not in STRATEGIES:
            close = difflib.get_close_matches(name, STRATEGIES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use all, or {', '.join(STRATEGIES)}"
            raise UsageError(f"there is no --strategy {name!r}: {hint}")
    return names


def simulate(
    workload: Workload,
    traces: Iterable[Trace],
    names: Sequence[str],
    *,
    charges: Charges,
    price: Price,
    reconfigure: str = "cost",
) -> dict[str, Outcome]:
    """Every strategy over every trace, and what it came to, by name. `reconfigure` is the policy by which culm's own
    change their shape; PlanError is raised for one that there is not.

    Step times are worked out once for all of them: what one strategy has planned, the next finds.
    """
    scene = Scene.of(workload, charges, reconfigure)
    found = {name: Outcome(name) for name in names}
    for trace in traces:
        _check(trace, workload)
        for name, outcome in found.items():
            hits, misses = scene.steps.hits, scene.steps.misses
            outcome.runs.append(play(scene, name, trace, price))
            outcome.hits += scene.steps.hits - hits
            outcome.misses += scene.steps.misses - misses
    return found


def play(scene: Scene, name: str, trace: Trace, price: Price) -> Run:
    """One strategy over one trace."""
    strategy = STRATEGIES[name](scene)
    if name == ON_DEMAND:
        return Engine(steady(scene.workload.nodes, trace.span_s), strategy, scene.charges, price.on_demand).play()
    return Engine(trace, strategy, scene.charges, price.spot, scene.workload.samples).play()


def steady(nodes: int, span_s: float) -> Trace:
    """Nodes that are there from the start and stay."""
    return Trace(tuple(Event(0.0, "add", f"node{n + 1}") for n in range(nodes)), span_s, "steady")


def _check(trace: Trace, workload: Workload) -> None:
    if not trace.span_s > 0:
        raise UsageError(f"{trace.source} spans no time: use --hours")
    if trace.peak < workload.fewest:
        raise UsageError(
            f"{trace.source} never has more than {trace.peak} nodes, and a pipeline of {workload.name} takes "
            f"{workload.fewest}: use a plan with at most {trace.peak} stages"
        )
