"""How long a run on GPUs pauses at a loss: ten nodes are preempted in one exact run, and each is replaced.

Nodes get SIGKILL at any moment, also while kernels run. Under CUDA MPS this ends all processes of a GPU, so these rows
are not measured while MPS is running.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from benchmarks.common.gpt_job import StageCut
from benchmarks.pipeline.culm_pipeline import job_from_spec

from culm.config import RunConfig
from culm.market import NodeEvent
from culm.providers.local_provider import ForkServerClient, local_run
from culm.providers.trace_market import RentalSchedule
from culm.providers.trace_replay import replay_rental
from culm.runtime.clock import RealClock
from culm.training import pickle_job

if TYPE_CHECKING:
    from benchmarks.common.gpt_job import GPTSpec

PausePart: TypeAlias = Literal["detect_ms", "decide_ms", "move_ms", "redo_ms"]
PAUSE_PARTS: tuple[PausePart, ...] = ("detect_ms", "decide_ms", "move_ms", "redo_ms")


@dataclass(frozen=True, kw_only=True)
class PauseScenario:
    """Losses of one run. Times in failure-free steps."""

    strategy: str
    losses: int = 10
    pipelines: int = 2
    steps_between: float = 8.0
    replaced_after: float = 2.0
    micro_batches: int = 4
    """Of a step, so that it takes about half a second on an H200."""
    timeout_s: float = 280.0
    """Of one run."""

    @property
    def steps(self) -> int:
        return round(self.steps_between * (self.losses + 1))

    def rental(self, nodes: int, step_s: float) -> RentalSchedule:
        """Each loss hits the next slot in turn."""
        names = [f"node {number}" for number in range(nodes)]
        initial = tuple(NodeEvent(0.0, "add", name) for name in names)
        changes = []
        for number in range(self.losses):
            at, slot = self.steps_between * (number + 0.5) * step_s, number % nodes
            changes.append(NodeEvent(at, "remove", names[slot]))
            names[slot] = f"in place of loss {number}"
            changes.append(NodeEvent(at + self.replaced_after * step_s, "add", names[slot]))
        return RentalSchedule(initial, tuple(changes), 0.0)


class PauseRow(TypedDict):
    """The pauses of one run. Milliseconds are medians over its recoveries."""

    median: float
    """Seconds."""
    max: float
    pauses: list[float]
    preemptions: int
    bit_identical: bool
    """Whether weights, buffers and optimizer state equal those of the failure-free run."""
    step_s: float
    """Of the failure-free run."""
    reduce: list[str]
    """What summed gradients: nccl or gloo."""
    detect_ms: float
    decide_ms: float
    move_ms: float
    redo_ms: float


def measure_pause(
    spec: GPTSpec, cut: StageCut, scenario: PauseScenario, fork_server: ForkServerClient, *, reduce: str = "auto"
) -> PauseRow:
    """Run without losses, then with them. Raises RunError if a run is lost."""
    spec = replace(spec, micro_batches=scenario.micro_batches)
    calm, step_ends, _ = _run(spec, cut, scenario, fork_server, reduce, None)
    step_s = median(later - earlier for earlier, later in pairwise(step_ends))
    struck, _, libraries = _run(spec, cut, scenario, fork_server, reduce, step_s)
    recoveries = struck["recoveries"]
    pauses = [sum(each[part] for part in PAUSE_PARTS) / 1e3 for each in recoveries]
    parts = {part: median(each[part] for each in recoveries) if recoveries else 0.0 for part in PAUSE_PARTS}
    return PauseRow(
        median=median(pauses) if pauses else 0.0,
        max=max(pauses, default=0.0),
        pauses=pauses,
        preemptions=struck["preemptions"],
        bit_identical=struck["state_sha256"] == calm["state_sha256"],
        step_s=step_s,
        reduce=libraries,
        detect_ms=parts["detect_ms"],
        decide_ms=parts["decide_ms"],
        move_ms=parts["move_ms"],
        redo_ms=parts["redo_ms"],
    )


def _run(
    spec: GPTSpec,
    cut: StageCut,
    scenario: PauseScenario,
    fork_server: ForkServerClient,
    reduce: str,
    step_s: float | None,
) -> tuple[Mapping[str, Any], list[float], list[str]]:
    """The summary, when each step was committed, and what summed gradients. `step_s`: of a failure-free run; None:
    nobody is lost."""
    with tempfile.TemporaryDirectory(prefix="culm-bench-") as folder:
        request = RunConfig(
            pipelines=scenario.pipelines,
            stages=len(cut),
            cuts=tuple(part.start for part in cut[1:]),
            strategy=scenario.strategy,
            reduce=reduce,  # type: ignore[arg-type]
            reconfigure="never",
            out=str(Path(folder) / "run"),
        )
        work = _run_to_end(spec, scenario, request, fork_server, step_s)
        summary, step_ends = asyncio.run(asyncio.wait_for(work, scenario.timeout_s))
        return summary, step_ends, _reduce_libraries(Path(folder) / "run")


async def _run_to_end(
    spec: GPTSpec, scenario: PauseScenario, request: RunConfig, fork_server: ForkServerClient, step_s: float | None
) -> tuple[Mapping[str, Any], list[float]]:
    job = replace(job_from_spec(spec, exact=True), steps=scenario.steps)
    step_ends: list[float] = []
    async with local_run(fork_server, pickle_job(job), request) as run:
        losses = None
        if step_s is not None:
            schedule = scenario.rental(scenario.pipelines * (request.stages or 1), step_s)
            losses = asyncio.create_task(replay_rental(schedule, run, RealClock()))
        try:
            while (metrics := await run.next_step()) is not None:
                step_ends.append(metrics["t"])
            result = await run.wait_for_result()
        finally:
            if losses is not None:
                losses.cancel()
    if result.summary is None:
        raise result.to_error()
    return result.summary, step_ends


def _reduce_libraries(folder: Path) -> list[str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return sorted({event["reduce"] for event in events if event["kind"] == "ready" and event.get("reduce")})
