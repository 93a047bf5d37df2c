"""Runs of culm whose compute is emulated: layers sleep, so that more workers than cores run side by side.

Everything else is real: processes, sockets, plans, recoveries, checkpoints, SIGKILL.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from culm.api import pickled
from culm.cluster.setup import Request
from culm.job import Job
from culm.plan.profile import LayerCost, Profile
from culm.providers.local import LocalNursery, local_run
from culm.schedule import Action

ACTION_S = 0.036
"""F, I and W of one of four stages."""
MICRO_BATCH, MICRO_BATCHES = 2, 12
LAYERS = 8
PATIENCE_S = 300.0


class _Nap(torch.autograd.Function):
    """The same tensor, later; and its gradient, later too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        if forward_s:
            time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Nap(nn.Module):
    """A layer whose work is to sleep, as long in F as in I and in W."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = _Nap.apply(self.weight, 0.0, self.seconds)  # type: ignore[no-untyped-call]
        slept: Tensor = _Nap.apply(x * weight, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        return slept


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: a shape, a strategy, and what is struck down when."""

    name: str
    pipelines: int
    stages: int
    steps: int
    strategy: str = "none"
    schedule: str = "1f1b"
    kills: tuple[str, ...] = ()
    """As `culm run --kill` has them, each with its step and action."""
    checkpoint_every: int = 0
    reconfigure: str = "cost"
    """By which policy the shape changes, as `culm run --reconfigure`."""
    action_s: float = ACTION_S

    @property
    def survives(self) -> bool:
        """Whether the run goes on without whoever is lost; else all is started again, with a node for it."""
        return self.strategy not in ("none", "checkpoint")


def napping(case: Case) -> Job:
    """Eight layers that sleep, a batch of 24."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    return Job(
        layers=[lambda: Nap(case.action_s * 4 / LAYERS) for _ in range(LAYERS)],
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        data=[(torch.zeros(4), torch.zeros(4)) for _ in range(64)],
        global_batch=MICRO_BATCH * MICRO_BATCHES,
        micro_batch=MICRO_BATCH,
        steps=case.steps,
        device="cpu",
    )


def profile(case: Case) -> Profile:
    """What `culm profile` would find."""
    each = case.action_s * 4 / LAYERS
    layer = LayerCost(
        name="Nap",
        forward_s=each,
        input_s=each,
        weight_s=each,
        parameter_bytes=4,
        state_bytes=4,
        activation_bytes=32,
        output_bytes=32,
    )
    return Profile(layers=(layer,) * LAYERS, device="emulated", micro_batch=MICRO_BATCH, threads=1, source="measured")


@dataclass
class Seen:
    """What a run, with all its starts, came to."""

    steps: int = 0
    """That the run was to make."""
    marks: list[float] = field(default_factory=list)
    """When each step was committed, also those that had to be done again."""
    wall_s: float = 0.0
    """From the beginning of the first step to the end of the last, by the account of the last start."""
    gaps: list[float] = field(default_factory=list)
    """From the last step before each new start to the first one after it."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    spans: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of actions, by kind and segment."""

    @property
    def seconds(self) -> float:
        """From the beginning of the first step of the first start to the end of the last."""
        if not self.gaps:
            return self.wall_s
        step_s = median(b - a for a, b in pairwise(self.marks))
        return self.marks[-1] - self.marks[0] + step_s

    @property
    def step_s(self) -> float:
        """On average; commits of single steps may come in pairs."""
        return self.seconds / self.steps


def measure(case: Case, nursery: LocalNursery) -> Seen:
    """Run a case to its last step, however often that takes. Raises what a run raises if it does not get there."""
    folder = Path(tempfile.mkdtemp(prefix="culm-bench-"))
    try:
        return asyncio.run(asyncio.wait_for(_attempts(case, nursery, folder), PATIENCE_S))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _attempts(case: Case, nursery: LocalNursery, folder: Path) -> Seen:
    """One start after the other, until one gets to the end."""
    profile(case).save(folder / "profile.json")
    seen, kills, resume = Seen(steps=case.steps), list(case.kills), None
    while True:
        request = Request(
            pipelines=case.pipelines,
            stages=case.stages,
            schedule=case.schedule,
            strategy=case.strategy if case.survives else "none",
            out=str(folder / "run"),
            resume=resume,
            checkpoint_every=case.checkpoint_every,
            profile=str(folder / "profile.json"),
            kills=tuple(kills if case.survives else kills[:1]),
            reconfigure=case.reconfigure,
        )
        if await _attempt(napping(case), nursery, request, seen):
            _note(folder / "run", seen)
            return seen
        kills.pop(0)
        resume = str(folder / "run") if case.checkpoint_every else None


async def _attempt(job: Job, nursery: LocalNursery, request: Request, seen: Seen) -> bool:
    """Whether a start got to the last step; False if a kill that it asked for ended it."""
    first = True
    async with local_run(nursery, pickled(job), request) as run:
        while await run.step() is not None:
            seen.marks.append(time.perf_counter())
            if first and len(seen.marks) > 1:
                seen.gaps.append(seen.marks[-1] - seen.marks[-2])
            first = False
        result = await run.result()
    if result.summary is not None:
        return True
    if request.strategy == "none" and request.kills:
        return False
    raise result.failure()


def _note(folder: Path, seen: Seen) -> None:
    """What the run itself wrote down."""
    summary = json.loads((folder / "summary.json").read_text())
    seen.recoveries, seen.wall_s = summary["recoveries"], summary["wall_s"]
    for event in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            action = Action.parse(event["name"])
            seen.spans[action.kind.name, action.segment].append(event["dur"] / 1e6)
