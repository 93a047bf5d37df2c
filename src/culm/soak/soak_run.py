"""One soak: a run of eight real nodes under real faults, and what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from culm.cluster.run_setup import RunResult
from culm.cluster.timeouts import derive_timeouts
from culm.config import RunConfig
from culm.market.chart import ChartPanel, Points, draw_svg
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.soak.process_samples import (
    MemoryGrowth,
    ProcessSample,
    SampleFile,
    TotalGrowth,
    memory_growth,
    processes_by_role,
    sample_processes,
    total_growth,
)
from culm.soak.real_faults import RealFaults
from culm.soak.soak_job import soak_job
from culm.testing import reference
from culm.training import pickle_job

PIPELINES, STAGES = 4, 2
MAX_GROWTH_MB_PER_H = 1.0
MAX_TOTAL_GROWTH_MB = 8.0
"""A process that changes its role loads code and data once. More than this, after its warm-up, is more than that."""
MIN_GROWTH_MB = 1.0
"""Growth below this is within what allocators vary by, whatever it is per hour."""
MIN_JUDGED_S = 1200.0
"""A process that was observed for a shorter time after its warm-up is reported and not judged: recoveries make it grow
in jumps, and minutes of them do not show whether that ends."""
_ENDLESS = 10**9
_SUSPECT_AFTER_S = 1.0
_HANG_S = 90.0
"""Seconds without a committed step after which the run hangs."""
_END_S = 180.0
"""Seconds in which a run that is asked to end must have ended."""
_CALM_STEPS = 20
"""Steps after the last fault."""
_STEPS_BETWEEN_CHECKPOINTS = 25
_SAMPLES = 600
"""Number of samples over the soak."""


@dataclass(frozen=True, kw_only=True)
class SoakResult:
    """The result of a soak."""

    seconds: float
    seed: int
    steps: int = 0
    faults: Mapping[str, int] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    growth: Sequence[MemoryGrowth] = ()
    """Growth of the processes that were observed long enough, fastest first."""
    total_growth: Sequence[TotalGrowth] = ()
    """Growth of all processes over all their roles, largest first."""
    samples: Sequence[ProcessSample] = ()
    problems: Sequence[str] = ()
    """What went wrong; empty: nothing."""

    def to_fields(self) -> dict[str, Any]:
        """The result as plain data for JSON, without the samples."""
        return {
            "seconds": round(self.seconds, 1),
            "seed": self.seed,
            "steps": self.steps,
            "faults": dict(self.faults),
            "preemptions": self.summary.get("preemptions"),
            "recoveries": len(self.summary.get("recoveries", ())),
            "corruptions": self.summary.get("corruptions"),
            "samples_lost": self.summary.get("samples_lost"),
            "samples_duplicated": self.summary.get("samples_duplicated"),
            "growth": [growth._asdict() for growth in self.growth],
            "total_growth": [growth._asdict() for growth in self.total_growth],
            "survived": not self.problems,
            "problems": list(self.problems),
        }


def run_soak(
    seconds: float, seed: int, folder: Path, *, on_progress: Callable[[str], None] = lambda _: None
) -> SoakResult:
    """Run under faults for this many seconds, then compare with a failure-free run. `folder` gets the files of the run.

    `on_progress` is called with a sentence now and then.
    """
    with ForkServerClient() as fork_server:
        soak = _Soak(fork_server, seconds, seed, folder, on_progress)
        result, problems = asyncio.run(soak.run())
        leftover = sorted(set(processes_by_role(os.getpid(), fork_server.pid).values()) - {"supervisor", "fork server"})
    problems += [f"processes are left after the run: {', '.join(leftover)}"] * bool(leftover)
    summary: dict[str, Any] = dict(result.summary or {}) if result is not None else {}
    if summary:
        on_progress(f"{summary['steps']} steps are done; they are repeated without faults, to compare")
        problems += _differences(summary)
    samples = soak.read_samples()
    growth = memory_growth(samples, warm_up_s(seconds), 0.3 * seconds)
    total = total_growth(samples, warm_up_s(seconds))
    problems += _too_fast(growth) + _too_much(total)
    return SoakResult(
        seconds=seconds,
        seed=seed,
        steps=summary.get("steps", 0),
        faults=dict(sorted(soak.fault_counts.items())),
        summary=summary,
        growth=growth,
        total_growth=total,
        samples=samples,
        problems=problems,
    )


def warm_up_s(seconds: float) -> float:
    """How long after its start the growth of a process does not count."""
    return min(600.0, 0.25 * seconds)


def _differences(summary: Mapping[str, Any]) -> list[str]:
    """How a run differs from the failure-free one, as sentences."""
    expected = reference(soak_job(summary["steps"], layer_s=0.0))
    found = []
    if summary["state_sha256"] != expected.state_sha256:
        found.append("weights and optimizer state are not those of the failure-free run")
    for name in ("samples_lost", "samples_duplicated"):
        if summary[name]:
            found.append(f"{name} is {summary[name]}")
    return found


def _too_fast(growth: Sequence[MemoryGrowth]) -> list[str]:
    return [
        f"the {each.role} {each.pid} has grown by {each.mb_per_h:.1f} MB per hour in {each.observed_s:.0f} s"
        for each in growth
        if each.role != "etcd"  # it keeps every revision until it compacts them, every five minutes
        and each.observed_s >= MIN_JUDGED_S
        and each.mb_per_h > MAX_GROWTH_MB_PER_H
        and each.mb_per_h * each.observed_s / 3600 > MIN_GROWTH_MB
    ]


def _too_much(growth: Sequence[TotalGrowth]) -> list[str]:
    return [
        f"process {each.pid} ({', then '.join(each.roles)}) has grown by {each.mb:.1f} MB in {each.observed_s:.0f} s"
        for each in growth
        if each.roles != ("etcd",) and each.mb > MAX_TOTAL_GROWTH_MB
    ]


class _Soak:
    """The run, its faults, and samples of its processes."""

    def __init__(
        self,
        fork_server: ForkServerClient,
        seconds: float,
        seed: int,
        folder: Path,
        on_progress: Callable[[str], None],
    ) -> None:
        self._fork_server, self._seconds, self._seed, self._folder = fork_server, seconds, seed, folder
        self._on_progress = on_progress
        self._began = time.monotonic()
        self._last_step_at = self._began
        self._steps = 0
        self._samples = SampleFile(folder / "processes.csv")
        self.fault_counts: Mapping[str, int] = {}

    def read_samples(self) -> list[ProcessSample]:
        """The samples of the processes so far."""
        return self._samples.read()

    async def run(self) -> tuple[RunResult | None, list[str]]:
        """The result of the run, and what went wrong; no result: the run hangs."""
        disk, flip_file = self._folder / "run", self._folder / "flip"
        (self._folder / "disk").mkdir(parents=True)
        disk.symlink_to("disk")
        config = RunConfig(
            pipelines=PIPELINES,
            stages=STAGES,
            strategy="reroute",
            reconfigure="never",
            out=str(disk),
            checkpoint_every=_STEPS_BETWEEN_CHECKPOINTS,
            suspect_after=_SUSPECT_AFTER_S,
        )
        source = pickle_job(soak_job(_ENDLESS, flip_file=str(flip_file)))
        async with local_run(self._fork_server, source, config, gate="outside") as run:
            run.permit_steps_below(_ENDLESS)
            faults = RealFaults(
                run,
                self._fork_server,
                nodes=PIPELINES * STAGES,
                disk=disk,
                flip_file=flip_file,
                lease_s=derive_timeouts(_SUSPECT_AFTER_S).lease,
                seed=self._seed,
                committed_steps=lambda: self._steps,
                steps_between_checkpoints=_STEPS_BETWEEN_CHECKPOINTS,
            )
            self.fault_counts = faults.counts
            return await self._drive(run, faults)

    async def _drive(self, run: RunHandle, faults: RealFaults) -> tuple[RunResult | None, list[str]]:
        following = asyncio.create_task(self._follow(run))
        sampling = asyncio.create_task(self._sample(run))
        injecting: asyncio.Task[None] | None = None
        try:
            await run.wait_for_first_step()
            faults_began = time.monotonic()
            short = self._seconds < 120
            injecting = asyncio.create_task(faults.inject_every(*((0.2, 1.0) if short else (1.0, 8.0))))
            problem = await self._wait_for_end(run, injecting, faults_began + self._seconds)
            injecting.cancel()
            await asyncio.gather(injecting, return_exceptions=True)  # effects of the last fault are undone
            if problem:
                return (await run.wait_for_result() if run.has_ended else None), [problem]
            run.finish_before(self._steps + _CALM_STEPS)
            async with asyncio.timeout(_END_S):
                result = await run.wait_for_result()
            return result, [] if result.summary is not None else [f"the run ended: {result.message}"]
        except TimeoutError:
            return None, [f"the run has not ended {_END_S:.0f} s after it was asked to, in step {self._steps}"]
        finally:
            for task in filter(None, (following, sampling, injecting)):
                task.cancel()
            await asyncio.gather(*filter(None, (following, sampling, injecting)), return_exceptions=True)

    async def _wait_for_end(self, run: RunHandle, injecting: asyncio.Task[None], end: float) -> str:
        """Wait until a time is reached; returns what ended the run earlier."""
        while time.monotonic() < end:
            await asyncio.sleep(0.2)
            if run.has_ended:
                return f"the run ended in step {self._steps}: {(await run.wait_for_result()).message}"
            if injecting.done():
                injecting.result()
            if time.monotonic() - self._last_step_at > _HANG_S:
                return f"the run hangs: no step was committed for {_HANG_S:.0f} s after step {self._steps}"
        return ""

    async def _follow(self, run: RunHandle) -> None:
        """Take note of every committed step, and drop the events of the run, which would be kept for a reader."""
        while (metrics := await run.next_step()) is not None:
            self._steps, self._last_step_at = metrics["step"] + 1, time.monotonic()
            run.pending_events()

    async def _sample(self, run: RunHandle) -> None:
        """Sample the processes of the run, and report progress."""
        interval = max(0.5, self._seconds / _SAMPLES)
        while True:
            t = time.monotonic() - self._began
            etcd = self._fork_server.private_etcd
            with contextlib.suppress(AssertionError):
                leader = None if run.leader is None else self._fork_server.process_table.agent_pid(run.leader)
                processes = processes_by_role(
                    os.getpid(), self._fork_server.pid, None if etcd is None else etcd.pid, leader
                )
                self._samples.add(sample_processes(t, processes))
            self._on_progress(
                f"{t:.0f} of {self._seconds:.0f} s, step {self._steps}, {sum(self.fault_counts.values())} faults"
            )
            await asyncio.sleep(interval)


def plot_samples(samples: Sequence[ProcessSample], title: str) -> str:
    """Memory, open files and processes over time as an SVG: by role, the largest value of its processes."""
    roles = list(dict.fromkeys(sample.role for sample in samples))
    by_time: dict[tuple[str, float], list[ProcessSample]] = {}
    for sample in samples:
        by_time.setdefault((sample.role, sample.t), []).append(sample)

    def curves(value: Callable[[Sequence[ProcessSample]], float]) -> dict[str, Points]:
        return {
            role: [(t / 60, value(of)) for (of_role, t), of in by_time.items() if of_role == role] for role in roles
        }

    panels = [
        ChartPanel(
            "memory of the largest process, without pages of files, MB",
            curves(lambda of: max(s.memory for s in of) / 1e6),
            True,
        ),
        ChartPanel("open files of the process with the most", curves(lambda of: max(s.files for s in of)), True),
        ChartPanel("processes", curves(len), True),
    ]
    return draw_svg(title, panels, max((sample.t for sample in samples), default=60.0) / 60, "min")
