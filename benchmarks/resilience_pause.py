"""How long a loss holds real nodes up, beside the least that it could: SIGKILL at seeded actions of a step, one run
each, with emulated compute or real one. The bound is that of `benchmarks.pause`, for the same shape, strategy and
moment.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks import pause as simulated
from benchmarks.lanes import Lanes
from benchmarks.resilience_losses import Scene
from culm.api import pickled
from culm.providers.local import LocalNursery, local_run

STRATEGIES = ("reroute", "shadow", "shadow-lazy")
PIPELINES, EACH = 2, 4
HIT, STEPS = 6, 9
"""The first step sets things up, the next four show what is usual; the step before the hit one may be open still."""
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Held:
    """One loss: how long it held the run up, the length of a step, and the bound in steps."""

    pause_s: float
    step_s: float
    bound_steps: float

    @property
    def pause_steps(self) -> float:
        return self.pause_s / self.step_s

    @property
    def within(self) -> bool:
        """Whether it is no more than the bound, a tenth of a step and half a second."""
        return self.pause_s <= (self.bound_steps + 0.1) * self.step_s + 0.5


def held(lanes: Lanes, strategy: str, *, kills: int, unit_s: float | None, seed: int = 0) -> list[Held]:
    """That many losses, each at a moment of its own. `unit_s` is None where compute is real."""
    setup, job = simulated.prepared(strategy, "1f1b", PIPELINES, EACH)
    moments = random.Random(seed).choices(simulated.moments(setup), k=kills)
    distinct = sorted(set(moments))
    bounds = {(one.node, one.at): one.bound for one in simulated.pauses(setup, job, distinct)}
    blows = [(), *((f"node={node} step={HIT} at={at}",) for node, at in moments)]
    (calm, _), *struck = lanes.map([partial(_ran, strategy, unit_s, blow) for blow in blows])
    return [
        late(ended, calm, summary["recoveries"][0]["step"], bounds[moment])
        for moment, (ended, summary) in zip(moments, struck, strict=True)
    ]


def late(ended: Sequence[float], calm: Sequence[float], last: int, bound: float) -> Held:
    """How much later the last step that was open was over than in a calm run, which went as fast before the loss.

    What is known is when steps were committed. Under a shadow that is when the copies have made the step, too: in a
    calm run about a step later, but for the last one. What a loss leaves open is committed when all copies have it.
    """
    before = HIT - 2
    pace = (ended[before] - ended[0]) / (calm[before] - calm[0])
    step_s = median(later - earlier for earlier, later in pairwise(calm[:-1]))
    lag = step_s - (calm[-1] - calm[-2])
    expected = ended[before] + pace * (calm[last] - lag - calm[before])
    return Held(ended[last] - expected, pace * step_s, bound)


def _ran(
    strategy: str, unit_s: float | None, kills: tuple[str, ...], nursery: LocalNursery
) -> tuple[list[float], dict[str, Any]]:
    return asyncio.run(asyncio.wait_for(_run(nursery, strategy, unit_s, kills), PATIENCE_S))


async def _run(
    nursery: LocalNursery, strategy: str, unit_s: float | None, kills: tuple[str, ...]
) -> tuple[list[float], dict[str, Any]]:
    """When each step was committed, and the summary."""
    scene = Scene(pipelines=PIPELINES, stages=simulated.STAGES, each=EACH, unit_s=unit_s, steps=STEPS)
    request = scene.request(strategy, kills=kills)
    job = scene.work.job()
    ended: list[float] = []
    async with local_run(nursery, pickled(job), request) as run:
        while (metrics := await run.step()) is not None:
            ended.append(metrics["t"])
        result = await run.result()
    if result.summary is None:
        raise result.failure()
    return ended, dict(result.summary)


def row(losses: Sequence[Held]) -> dict[str, float | None]:
    """Medians, in the words of the bench."""
    if not losses:
        return dict.fromkeys(("pause_s", "pause_steps", "pause_bound_steps", "pause_within", "pause_step_s"))
    return {
        "pause_s": median(one.pause_s for one in losses),
        "pause_steps": median(one.pause_steps for one in losses),
        "pause_bound_steps": median(one.bound_steps for one in losses),
        "pause_within": sum(one.within for one in losses) / len(losses),
        "pause_step_s": median(one.step_s for one in losses),
    }
