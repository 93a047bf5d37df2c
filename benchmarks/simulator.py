"""`culm bench simulator`: runs of culm under seeded faults, each predicted by the simulator before it is measured.

Compute is emulated: layers sleep, so that more workers than cores run side by side, as on machines of their own.
Everything else is real: processes, sockets, checkpoints, SIGKILL. What disturbances cost is measured on seeds of
their own first; no case that is reported has a part in it.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn

from benchmarks import scale
from culm.api import pickled
from culm.cluster.setup import STRATEGIES as ABLE
from culm.cluster.setup import Request
from culm.job import Job
from culm.market import Event, Trace
from culm.providers.local import LocalNursery, local_run
from culm.schedule import Costs
from culm.sim.costs import Charges
from culm.sim.engine import Run
from culm.sim.strategy import Scene
from culm.sim.study import Price, play
from culm.sim.workload import Workload

FORWARD_S, BACKWARD_S = 0.012, 0.024
MICRO_BATCH, MICRO_BATCHES = 2, 12
LAYERS = 8
PATIENCE_S = 300.0


class _Nap(torch.autograd.Function):
    """The same tensor, later; and its gradient, later still."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Nap(nn.Module):
    """A layer whose work is to sleep."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        slept: Tensor = _Nap.apply(x * self.weight, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return slept


def napping(steps: int) -> Job:
    """Eight layers that sleep, a batch of 24."""
    share = LAYERS // 4

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    return Job(
        layers=[lambda: Nap(FORWARD_S / share, BACKWARD_S / share) for _ in range(LAYERS)],
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        data=[(torch.zeros(4), torch.zeros(4)) for _ in range(64)],
        global_batch=MICRO_BATCH * MICRO_BATCHES,
        micro_batch=MICRO_BATCH,
        steps=steps,
    )


@dataclass(frozen=True)
class Case:
    """A run: a shape, a strategy, and the steps after which a node is killed."""

    name: str
    pipelines: int
    stages: int
    steps: int
    strategy: str = "none"
    kills: tuple[tuple[int, int], ...] = ()
    """(step, node): a strategy that survives goes on without it; else all is started again, with a node for it."""
    checkpoint_every: int = 0

    @property
    def survives(self) -> bool:
        return self.strategy not in ("none", "checkpoint")


@dataclass(frozen=True)
class Measured:
    """Seconds of all attempts together, and of the parts that a prediction needs."""

    seconds: float
    step_s: float
    """The median step."""
    again_s: float = 0.0
    """From a kill until steps come again, on average."""


def measure(case: Case, nursery: LocalNursery) -> Measured:
    """Run a case to its last step, however often that takes. Raises RunError if it does not get there."""
    folder = Path(tempfile.mkdtemp(prefix="culm-bench-"))
    try:
        return asyncio.run(asyncio.wait_for(_attempts(case, nursery, str(folder / "run")), PATIENCE_S))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _attempts(case: Case, nursery: LocalNursery, out: str) -> Measured:
    began = time.perf_counter()
    marks: list[float] = []
    gaps: list[float] = []
    kills = list(case.kills)
    resume: str | None = None
    while True:
        killed = await _attempt(case, nursery, out if case.checkpoint_every else None, resume, kills, marks, gaps)
        if not killed:
            break
        resume = out if case.checkpoint_every else None
    steps = sorted(b - a for a, b in pairwise(marks))
    return Measured(time.perf_counter() - began, steps[len(steps) // 2], fmean(gaps) if gaps else 0.0)


async def _attempt(
    case: Case,
    nursery: LocalNursery,
    out: str | None,
    resume: str | None,
    kills: list[tuple[int, int]],
    marks: list[float],
    gaps: list[float],
) -> bool:
    """One start. True if a kill ended it; `marks` gets the time of each step, `gaps` how long a kill held it up."""
    strategy = case.strategy if case.survives else "none"
    request = Request(
        pipelines=case.pipelines,
        stages=case.stages,
        schedule="1f1b",
        strategy=strategy,
        out=out,
        resume=resume,
        checkpoint_every=case.checkpoint_every,
    )
    async with local_run(nursery, pickled(napping(case.steps)), request) as run:
        while (metrics := await run.step()) is not None:
            if gaps and gaps[-1] < 0:
                gaps[-1] += time.perf_counter()
            marks.append(time.perf_counter())
            if kills and metrics["step"] + 1 == kills[0][0]:
                _, node = kills.pop(0)
                gaps.append(-time.perf_counter())
                os.kill(_children(nursery.pid)[node], signal.SIGKILL)
                if not case.survives:
                    await run.result()
                    return True
        result = await run.result()
    if result.summary is None:
        raise result.failure()
    return False


def _children(pid: int) -> list[int]:
    """Agents, in the order of their nodes."""
    return sorted(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@dataclass(frozen=True)
class Calibration:
    """What was measured on runs of its own."""

    action_s: float
    """F and B of a micro-batch in a stage: what they take however few layers there are."""
    layer_s: float
    """... and what each layer adds: its sleep, and waking up."""
    around_s: float
    """Before the first step and after the last."""
    again_s: dict[str, float]
    """By strategy: from a kill until steps come again, less the step itself."""

    def stage_s(self, stages: int) -> float:
        """F and B of a micro-batch in one of so many stages."""
        return self.action_s + self.layer_s * LAYERS / stages


def calibrate(nursery: LocalNursery, again_s: dict[str, float], steps: int) -> Calibration:
    """Two undisturbed runs of different depth, right before the case that they are for: machines drift."""
    deep, deeper = (measure(Case("calibration", 1, stages, steps), nursery) for stages in (4, 8))
    four, eight = (m.step_s / (MICRO_BATCHES + P - 1) for m, P in ((deep, 4), (deeper, 8)))
    around = fmean(m.seconds - steps * m.step_s for m in (deep, deeper))
    layer = (four - eight) / (LAYERS / 4 - LAYERS / 8)
    return Calibration(max(0.0, four - layer * LAYERS / 4), layer, around, again_s)


def pauses(nursery: LocalNursery, strategies: list[str], steps: int) -> dict[str, float]:
    """One run with a kill for each strategy: from the kill until steps come again, less the step itself."""
    found = {}
    for strategy in strategies:
        every = 4 if strategy == "checkpoint" else 0
        hurt = Case("calibration", 1 if every else 2, 4, steps, strategy, ((steps // 2 + 1, 1),), every)
        seen = measure(hurt, nursery)
        found[strategy] = max(0.0, seen.again_s - seen.step_s)
    return found


def predict(case: Case, known: Calibration) -> float:
    """Seconds until the last step, from the simulator."""
    scene = Scene.of(_workload(case, known), _charges(case, known))
    target = float(case.steps * MICRO_BATCH * MICRO_BATCHES)
    step_s = scene.steps.healthy(case.pipelines)
    low, high = known.around_s, known.around_s + 10 * case.steps * step_s + 60 * (1 + len(case.kills))
    for _ in range(40):
        middle = (low + high) / 2
        done = _play(case, scene, known, step_s, middle).samples >= target
        low, high = (low, middle) if done else (middle, high)
    return high


def _workload(case: Case, known: Calibration) -> Workload:
    third = known.stage_s(case.stages) / 3
    return Workload(
        name=case.name,
        pipelines=case.pipelines,
        stages=case.stages,
        micro_batches=MICRO_BATCHES,
        micro_batch=MICRO_BATCH,
        costs=Costs(forward=third, input=third, weight=third),
        split=False,
        stagger=False,
        memory="1f1b",
    )


def _charges(case: Case, known: Calibration) -> Charges:
    """A restart is what was measured from a kill to the next step; a survivor's pause goes on top of the redo."""
    again = known.again_s.get(case.strategy, 0.0)
    # Before the first step of a run nothing is charged but its start, which a loss then repeats.
    base = Charges(warm_up_s=0.0, restart_s=0.0, detect_s=again, decide_s=0.0, join_s=0.0, stall_s=0.0)
    return replace(base, checkpoint_every_s=1e9) if not case.checkpoint_every else base


def _play(case: Case, scene: Scene, known: Calibration, step_s: float, span_s: float) -> Run:
    """The run as a trace: it begins when the nodes are up, and each kill comes after its step."""
    every = case.checkpoint_every * step_s
    charges = replace(scene.charges, checkpoint_every_s=every) if every else scene.charges
    nodes = case.pipelines * case.stages
    events = [Event(known.around_s, "add", f"node{n}") for n in range(nodes)]
    at = known.around_s
    done = 0
    for step, node in case.kills:
        at += (step - done) * step_s
        events.append(Event(at, "remove", f"node{node}"))
        done = step
        if not case.survives:
            events.append(Event(at, "add", f"spare{step}"))
            done -= step % case.checkpoint_every if case.checkpoint_every else step
            at += known.again_s[case.strategy]
    trace = Trace(tuple(event for event in events if event.t < span_s), span_s)
    return play(Scene(scene.workload, charges, scene.steps), case.strategy, trace, Price(1.0, 1.0))


def cases(strategies: list[str], *, quick: bool) -> list[Case]:
    """Undisturbed shapes, then each strategy under a few seeded faults."""
    steps = 16 if quick else 30
    found = [Case(f"{D} x {P}, undisturbed", D, P, steps) for D, P in ((1, 2), (2, 2), (2, 4))[: 2 if quick else 3]]
    for strategy in strategies:
        for seed in range(1 if quick else 3):
            draw = random.Random(f"{strategy} {seed}")
            every = 4 if strategy == "checkpoint" else 0
            shape = (1, 4) if every else (2, 4)
            # Late enough for a checkpoint to be complete.
            kill = (draw.randrange(steps // 2, steps - 3), draw.randrange(1, shape[0] * shape[1]))
            found.append(
                Case(f"{shape[0]} x {shape[1]}, {strategy}, seed {seed}", *shape, steps, strategy, (kill,), every)
            )
    return found


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Calibrate, predict, measure, compare: goodput in samples per second."""
    strategies = ["checkpoint", *(name for name in ("reroute", "shadow") if name in ABLE)]
    rows: list[dict[str, Any]] = []
    with LocalNursery() as nursery:
        progress("calibrating")
        measure(Case("warm up", 1, 4, 2), nursery)
        again_s = pauses(nursery, strategies, 12 if quick else 20)
        for case in cases(strategies, quick=quick):
            known = calibrate(nursery, again_s, 6 if quick else 8)
            samples = case.steps * MICRO_BATCH * MICRO_BATCHES
            predicted = samples / predict(case, known)
            measured = samples / measure(case, nursery).seconds
            rows.append({"case": case.name, "predicted": predicted, "measured": measured})
            progress(f"{case.name}: predicted {predicted:.2f}, measured {measured:.2f}")
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    grown = scale.run(quick=quick, progress=progress)
    error = {"error_mean": fmean(errors), "error_max": max(errors)}
    return {"rows": rows, **error, "compute": "emulated", "cores": os.cpu_count(), "scale": grown}


def table(result: dict[str, Any]) -> Table:
    found = Table("case", "predicted", "measured", "error", box=box.SIMPLE, pad_edge=False)
    for row in result["rows"]:
        error = row["predicted"] / row["measured"] - 1
        found.add_row(row["case"], f"{row['predicted']:.2f}", f"{row['measured']:.2f}", f"{error:+.1%}")
    found.caption = (
        f"samples/s, compute emulated; error {result['error_mean']:.1%} on average, {result['error_max']:.1%} at most"
    )
    return found
