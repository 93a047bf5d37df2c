"""Runs of culm with emulated compute: layers sleep, so that more workers than cores can run side by side.

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

from culm.config import RunConfig
from culm.job import Job
from culm.plan.model.model_profile import LayerCost, Profile
from culm.providers.local_provider import ForkServerClient, local_run
from culm.schedule import Action
from culm.training import pickle_job

ACTION_S = 0.036
"""Seconds of F, I and W of one of four stages."""
MICRO_BATCH, MICRO_BATCHES = 2, 12
LAYERS = 8
TIMEOUT_S = 300.0


class _SleepFunction(torch.autograd.Function):
    """Identity that sleeps in the forward and in the backward."""

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


class SleepingScale(nn.Module):
    """A layer that sleeps, equally long in F, I and W."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.action_s = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = _SleepFunction.apply(self.weight, 0.0, self.action_s)  # type: ignore[no-untyped-call]
        slept: Tensor = _SleepFunction.apply(x * weight, self.action_s, self.action_s)  # type: ignore[no-untyped-call]
        return slept


@dataclass(frozen=True, kw_only=True)
class EmulatedCase:
    """A run: a shape, a strategy, and the kills."""

    name: str
    pipelines: int
    stages: int
    steps: int
    strategy: str = "none"
    schedule: str = "1f1b"
    kills: tuple[str, ...] = ()
    """Kills as in `culm run --kill`, each with its step and action."""
    checkpoint_every: int = 0
    reconfigure: str = "cost"
    """The policy that decides on changes of shape, as in `culm run --reconfigure`."""
    action_s: float = ACTION_S
    workers_per_node: int = 1
    """Neighbouring stages share a node and are lost together."""

    @property
    def nodes(self) -> int:
        return self.pipelines * self.stages // self.workers_per_node

    @property
    def survives_loss(self) -> bool:
        """Whether the run continues after a loss; otherwise it is restarted with a replacement node."""
        return self.strategy not in ("none", "checkpoint")


def sleeping_job(case: EmulatedCase) -> Job:
    """Eight layers that sleep, with a batch of 24."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean()

    return Job(
        layers=[lambda: SleepingScale(case.action_s * 4 / LAYERS) for _ in range(LAYERS)],
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
        data=[(torch.zeros(4), torch.zeros(4)) for _ in range(64)],
        global_batch=MICRO_BATCH * MICRO_BATCHES,
        micro_batch=MICRO_BATCH,
        steps=case.steps,
        device="cpu",
    )


def sleeping_profile(case: EmulatedCase) -> Profile:
    """The profile that `culm profile` would measure."""
    action_s = case.action_s * 4 / LAYERS
    layer = LayerCost(
        name=SleepingScale.__name__,
        forward_s=action_s,
        input_s=action_s,
        weight_s=action_s,
        parameter_bytes=4,
        state_bytes=4,
        activation_bytes=32,
        output_bytes=32,
    )
    return Profile(layers=(layer,) * LAYERS, device="emulated", micro_batch=MICRO_BATCH, threads=1, source="measured")


@dataclass
class EmulatedRun:
    """The measurements of a run, including all of its restarts."""

    steps: int = 0
    """Number of steps of the run."""
    commit_times: list[float] = field(default_factory=list)
    """When each step was committed, including steps that were repeated."""
    wall_s: float = 0.0
    """From the beginning of the first step to the end of the last, as reported by the last start."""
    restart_gaps: list[float] = field(default_factory=list)
    """From the last step before each restart to the first one after it."""
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    action_seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of actions, by kind and segment."""

    @property
    def seconds(self) -> float:
        """From the beginning of the first step of the first start to the end of the last step."""
        if not self.restart_gaps:
            return self.wall_s
        step_s = median(b - a for a, b in pairwise(self.commit_times))
        return self.commit_times[-1] - self.commit_times[0] + step_s

    @property
    def step_s(self) -> float:
        """Mean time of a step; commits of single steps may come in pairs."""
        return self.seconds / self.steps


def measure_case(case: EmulatedCase, fork_server: ForkServerClient) -> EmulatedRun:
    """Run a case to its last step, with as many restarts as it takes. Raises the error of any other failure."""
    folder = Path(tempfile.mkdtemp(prefix="culm-bench-"))
    try:
        return asyncio.run(asyncio.wait_for(_run_until_done(case, fork_server, folder), TIMEOUT_S))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _run_until_done(case: EmulatedCase, fork_server: ForkServerClient, folder: Path) -> EmulatedRun:
    """Start the run again and again until it reaches its last step."""
    sleeping_profile(case).save(folder / "profile.json")
    run, kills, resume = EmulatedRun(steps=case.steps), list(case.kills), None
    while True:
        request = RunConfig(
            pipelines=case.pipelines,
            stages=case.stages,
            schedule=case.schedule,
            ranges=1,  # times are measured and predicted by stage
            strategy=case.strategy if case.survives_loss else "none",
            out=str(folder / "run"),
            resume=resume,
            checkpoint_every=case.checkpoint_every,
            profile=str(folder / "profile.json"),
            kills=tuple(kills if case.survives_loss else kills[:1]),
            reconfigure=case.reconfigure,
            workers_per_node=case.workers_per_node,
            improve_plan=0.0,  # a better plan during the run would not be the one that was predicted
        )
        if await _run_once(sleeping_job(case), fork_server, request, run):
            _read_run_folder(folder / "run", run)
            return run
        kills.pop(0)
        resume = str(folder / "run") if case.checkpoint_every else None


async def _run_once(job: Job, fork_server: ForkServerClient, request: RunConfig, measured: EmulatedRun) -> bool:
    """Whether the run reached its last step; False if a requested kill ended it."""
    first = True
    async with local_run(fork_server, pickle_job(job), request) as run:
        while await run.next_step() is not None:
            measured.commit_times.append(time.perf_counter())
            if first and len(measured.commit_times) > 1:
                measured.restart_gaps.append(measured.commit_times[-1] - measured.commit_times[-2])
            first = False
        result = await run.wait_for_result()
    if result.summary is not None:
        return True
    if request.strategy == "none" and request.kills:
        return False
    raise result.to_error()


def _read_run_folder(folder: Path, run: EmulatedRun) -> None:
    """Read the measurements from the run folder."""
    summary = json.loads((folder / "summary.json").read_text())
    run.recoveries, run.wall_s = summary["recoveries"], summary["wall_s"]
    for event in json.loads((folder / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            action = Action.parse(event["name"])
            run.action_seconds[action.kind.name, action.segment].append(event["dur"] / 1e6)
