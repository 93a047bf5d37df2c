"""Run files: cost.json while the run goes on; summary.json and trace.json at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from culm.cluster.leader.output.run_output import HANDOVER_TIMEOUT_S
from culm.cluster.leader.output.run_summary import slot_label, speed_fields, summary_fields
from culm.errors import RunError
from culm.market.cost_record import CostRecord, cost_fields
from culm.observe.writers.run_folder import perfetto_trace
from culm.runtime.storage_retry import STALL_S
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.leader.background_tasks import BackgroundTasks
    from culm.cluster.leader.leader_state import LeaderState
    from culm.cluster.leader.output.run_output import RunOutput
    from culm.job import Job
    from culm.runtime.clock import Clock


class RunFiles:
    """Builds the files from the leader's state, which it does not change, and writes them to the run's output."""

    def __init__(self, job: Job, state: LeaderState, clock: Clock, output: RunOutput, tasks: BackgroundTasks) -> None:
        self._job, self._state, self._clock, self._output, self._tasks = job, state, clock, output, tasks
        self._cost: CostRecord | None = None
        """The newest account of what the nodes have cost."""
        self._cost_write: asyncio.Task[None] | None = None

    # cost.json.

    def write_cost(self, record: CostRecord) -> None:
        """Write cost.json in the background. A write that fails is repeated with the next change."""
        self._cost = record
        if self._cost_write is None or self._cost_write.done():
            self._cost_write = self._tasks.start(self._write_newest_cost())

    async def _write_newest_cost(self) -> None:
        written: CostRecord | None = None
        with contextlib.suppress(RunError):
            while (record := self._cost) is not None and record is not written:
                await self._output.write_json("cost.json", msgspec.to_builtins(record))
                written = record

    async def write_final_cost(self) -> None:
        """Write cost.json of a run that failed, unless that takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HANDOVER_TIMEOUT_S):
                self._final_cost()
                await self._write_newest_cost()

    def _final_cost(self) -> Mapping[str, float | None]:
        """The fields of summary.json about cost. The run ends now, and all of its nodes with it."""
        if not self._state.spending.is_active:
            return {}
        self._cost = self._state.handlers.costs.record(self._clock.now(), ended=True)
        return cost_fields(self._cost)

    # summary.json and trace.json.

    def build_summary(self) -> dict[str, Any]:
        """The summary of a run whose steps are all committed."""
        state, ledger = self._state, self._state.ledger
        finals = list(state.final_reports.values())
        started = state.started_at if state.first_step_at is None else state.first_step_at
        ended = self._clock.now() if ledger.last_step is None else state.started_at + ledger.last_step.t
        summary = {
            **summary_fields(self._job, state.initial_setup, ledger, finals),
            **speed_fields(ledger.samples, state.started_at, started, ended),
            **self._final_cost(),
            "checkpoints": state.checkpoints.completed_steps,
            **state.evaluation_monitor.summary_fields(ledger.evaluation_values),
            "preemptions": len(state.members.departed_nodes),
            "recoveries": [msgspec.to_builtins(recovered) for recovered in state.recovery_metrics.recoveries],
            "at_risk_s": state.recovery_metrics.at_risk_s,
            "samples_redone": ledger.samples_redone,
            "corruptions": state.corruptions,
        }
        self._output.log_event("finished", steps=ledger.steps, samples=ledger.samples)
        return summary

    async def write(self, summary: Mapping[str, Any]) -> None:
        """Write all files and lines. Raises RunError if that fails for too long."""
        files = {"summary.json": summary}
        if self._cost is not None:
            files["cost.json"] = msgspec.to_builtins(self._cost)
        await self._output.write_final_files(files, self._write_trace)

    async def _write_trace(self) -> None:
        """Write trace.json, unless that fails: a disk that is too full for it has everything that the run is for."""
        if self._state.setup.out is None:
            return
        try:
            async with asyncio.timeout(STALL_S):
                await self._output.write_json("trace.json", self._trace())
        except (RunError, TimeoutError) as error:
            why = str(error) or f"it was not written within {STALL_S:.0f} s"
            self._output.log_event("trace_failed", why=why)

    def _trace(self) -> dict[str, Any]:
        """The last actions of every worker."""
        state = self._state
        assert state.epoch is not None
        stages = Plan.from_text(state.epoch.plan).stages
        labels = {
            member.worker: f"{member.label}: {slot_label(slot, stages)}"
            for slot, member in enumerate(state.epoch.members)
            if member is not None
        }
        spans = {final.worker: final.spans for final in state.final_reports.values()}
        return perfetto_trace(spans, labels)
