"""What is left of a run's speed under losses: every strategy under the same ones, with emulated compute or real one.

Losses come by the clock, one every so many undisturbed steps, at seeded nodes and moments; each node is back after a
while, as a new one. All strategies get the same losses, for as long as their run takes. Nodes are real processes and
are struck by SIGKILL; where compute is emulated only the layers sleep.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from benchmarks.computed import Computed
from benchmarks.emulated import Emulated
from benchmarks.lanes import Lanes
from culm.api import pickled
from culm.cluster.setup import Request
from culm.errors import NodeLost
from culm.market import Event
from culm.providers.local import LocalNursery, local_run
from culm.providers.rental import Rental
from culm.providers.trace import replay
from culm.runtime.clock import RealClock

PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A job, its shape, and how often a node is lost. Times in undisturbed steps."""

    pipelines: int
    stages: int
    each: int
    """Micro-batches of a pipeline."""
    unit_s: float | None
    """Emulated compute: seconds of F, of I and of W in one stage for one micro-batch. None: a GPT is computed."""
    steps: int
    loss_every: float = 10.0
    back_after: float = 5.0
    schedule: str = "1f1b"
    seed: int = 0

    @property
    def nodes(self) -> int:
        return self.pipelines * self.stages

    @property
    def work(self) -> Emulated | Computed:
        batch = self.pipelines * self.each
        if self.unit_s is None:
            return Computed(stages=self.stages, micro_batches=batch, steps=self.steps)
        return Emulated(stages=self.stages, micro_batches=batch, unit_s=self.unit_s, steps=self.steps)

    def request(self, strategy: str, **options: Any) -> Request:
        """`options` are those of the request."""
        return Request(
            pipelines=self.pipelines,
            stages=self.stages,
            schedule=self.schedule,
            strategy=strategy,
            cuts=self.work.cuts,
            **options,
        )

    def losses(self, step_s: float, *, notice_s: float = 0.0) -> Rental:
        """The first falls in the middle of an interval. More of them than any run here lives to see."""
        draw = random.Random(self.seed)
        there = [f"node {number}" for number in range(self.nodes)]
        first = tuple(Event(0.0, "add", node) for node in there)
        moves = []
        for number in range(100 * max(1, round(self.steps / self.loss_every))):
            at = (self.loss_every * (number + 0.5) + draw.random() - 0.5) * step_s
            slot = draw.randrange(self.nodes)
            moves.append(Event(at, "remove", there[slot]))
            there[slot] = f"in place of loss {number}"
            moves.append(Event(at + self.back_after * step_s, "add", there[slot]))
        return Rental(first, tuple(sorted(moves, key=lambda move: move.t)), 0.0, notice_s)


@dataclass(frozen=True)
class Ran:
    """A run that is over."""

    goodput: float
    """Samples that count in a second, from the first step on; 0 if the run was lost."""
    steps_s: tuple[float, ...] = ()
    """Of each step that followed on the one before it."""
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return median(self.steps_s)


def undisturbed(scene: Scene, nursery: LocalNursery) -> Ran:
    """The run that nothing befalls, under `none`: what all others are measured against."""
    return _ran(nursery, scene, scene.request("none"), None)


def under_losses(scene: Scene, nursery: LocalNursery, strategy: str, step_s: float, **options: Any) -> Ran:
    """A run under the scene's losses; `options` are those of the request, and `notice_s`. A run that is lost counts as
    one that made nothing: that is what `none` promises."""
    notice_s = options.pop("notice_s", 0.0)
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as folder:
        options.setdefault("out", str(Path(folder) / "run"))
        request = scene.request(strategy, **options)
        return _ran(nursery, scene, request, scene.losses(step_s, notice_s=notice_s))


def _ran(nursery: LocalNursery, scene: Scene, request: Request, losses: Rental | None) -> Ran:
    return asyncio.run(asyncio.wait_for(_run(nursery, scene, request, losses), PATIENCE_S))


async def _run(nursery: LocalNursery, scene: Scene, request: Request, losses: Rental | None) -> Ran:
    marks: list[tuple[int, float]] = []
    async with local_run(nursery, pickled(scene.work.job()), request) as run:
        striking = asyncio.create_task(replay(losses, run, RealClock())) if losses is not None else None
        try:
            while (metrics := await run.step()) is not None:
                marks.append((metrics["step"], metrics["t"]))
            result = await run.result()
        finally:
            if striking is not None:
                striking.cancel()
    if result.summary is None:
        if isinstance(result.failure(), NodeLost):
            return Ran(0.0)
        raise result.failure()
    steps = tuple(after - before for (a, before), (b, after) in pairwise(marks) if b == a + 1)
    summary: dict[str, Any] = dict(result.summary)
    return Ran(summary["goodput"], steps, summary)


@dataclass(frozen=True)
class Tuned:
    """The checkpoint baseline at its best: warm restarts, and the interval and the wait that came out on top."""

    ran: Ran
    every: int
    waits: bool
    """Whether a restart waits for a node in place of the lost one, instead of going on with fewer pipelines."""


def tries(
    scene: Scene, step_s: float, *, every: tuple[int, ...], waits: tuple[bool, ...]
) -> list[Callable[[LocalNursery], Tuned]]:
    """The baseline with each combination."""
    return [partial(_checkpointed, scene, step_s, n, wait) for n, wait in product(every, waits)]


def best(tried: Sequence[Tuned]) -> Tuned:
    """Each was tried once, and the best is kept: luck is on the side of the baseline."""
    return max(tried, key=lambda one: one.ran.goodput)


def _checkpointed(scene: Scene, step_s: float, every: int, wait: bool, nursery: LocalNursery) -> Tuned:
    patience = 2 * scene.back_after * step_s if wait else 0.0
    options = {"checkpoint_every": every, "replace_within": patience}
    return Tuned(under_losses(scene, nursery, "checkpoint", step_s, **options), every, wait)


def grid(scene: Scene, lanes: Lanes, cells: Sequence[tuple[float, float]], *, every: tuple[int, ...]) -> list[Cell]:
    """Re-routing beside the tuned baseline, for steps of a length and losses of a frequency."""
    scenes = [replace(scene, unit_s=unit_s, loss_every=n, steps=round(2 * n)) for unit_s, n in cells]
    calm = lanes.map([partial(undisturbed, replace(one, steps=12)) for one in scenes])
    ours = lanes.map([partial(_rerouted, one, c.step_s) for one, c in zip(scenes, calm, strict=True)])
    baseline = [tries(one, c.step_s, every=every, waits=(True,)) for one, c in zip(scenes, calm, strict=True)]
    tried = lanes.map([one for several in baseline for one in several])
    theirs = [best(tried[i * len(every) : (i + 1) * len(every)]) for i in range(len(scenes))]
    return [_cell(*each) for each in zip(scenes, calm, ours, theirs, strict=True)]


def _rerouted(scene: Scene, step_s: float, nursery: LocalNursery) -> Ran:
    return under_losses(scene, nursery, "reroute", step_s)


def _cell(scene: Scene, calm: Ran, ours: Ran, theirs: Tuned) -> Cell:
    return Cell(
        step_s=calm.step_s,
        loss_every_steps=scene.loss_every,
        reroute=ours.goodput / calm.goodput,
        checkpoint=theirs.ran.goodput / calm.goodput,
        ratio=ours.goodput / theirs.ran.goodput,
        checkpoint_every=theirs.every,
    )


class Cell(TypedDict):
    """One cell of the grid; goodput in shares of the undisturbed run."""

    step_s: float
    loss_every_steps: float
    reroute: float
    checkpoint: float
    ratio: float
    checkpoint_every: int
