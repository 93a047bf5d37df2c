"""StoreView: the state of a run, read from its store, for `culm dash --etcd` and `culm run --dash` without a folder.

It never writes. What happened before it started is known only from the leader's snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from culm.cluster.leader.recovery_record import RecoveryRecord
from culm.cluster.leader.stored_snapshot import join_snapshot
from culm.cluster.run_setup import (
    NodeRecord,
    RunSetup,
    decode_fleet_progress,
    decode_node_record,
    decode_result,
    decode_setup,
)
from culm.errors import RunError
from culm.observe.report.load_run import RunContents
from culm.observe.slot_assignments import epoch_event_fields, slot_assignments
from culm.observe.step_metrics import StepMetrics
from culm.plan.rent.fleet_decision import FleetProgress
from culm.providers.run_store import StoreLocation, open_etcd_store
from culm.runtime import messages
from culm.runtime.clock import RealClock
from culm.runtime.epoch import Epoch

if TYPE_CHECKING:
    from culm.cluster.store.store import Store
    from culm.runtime.clock import Clock

_MAX_STEPS = 100_000
"""Beyond this number pairs of steps are merged: a page shows a thousand points."""
_RECONNECT_S = 2.0


class SnapshotHistoryView(msgspec.Struct, frozen=True):
    """The fields of the leader's history that a page shows."""

    departed_nodes: tuple[int, ...]
    recoveries: tuple[RecoveryRecord, ...]
    checkpoints: tuple[int, ...] = ()


class LeaderSnapshotView(msgspec.Struct, frozen=True):
    """The fields of the leader's snapshot that a page shows. Decoding the snapshot itself would import torch."""

    started_at: float
    first_step_at: float | None
    next_step: int
    steps: int
    samples: int
    lost_samples: int
    duplicated_samples: int
    history: SnapshotHistoryView
    redone_samples: int = 0
    at_risk_s: float = 0.0


_decode_snapshot_view = msgspec.msgpack.Decoder(LeaderSnapshotView).decode


class StoreView:
    """The state of a run so far, from changes of its store."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._reset()

    def _reset(self) -> None:
        self._setup: RunSetup | None = None
        self._snapshot: LeaderSnapshotView | None = None
        self._histories: dict[int, bytes] = {}
        self._summary: Mapping[str, Any] | None = None
        self._events: list[tuple[float, dict[str, Any]]] = []
        self._steps: list[StepMetrics] = []
        self._nodes: dict[int, NodeRecord] = {}
        self._progress: FleetProgress | None = None
        self._leader: int | None = None
        self._epoch: Epoch | None = None
        self._began_at: float | None = None
        """Start of the run by the clock; an estimate until a snapshot was read."""
        self._ended = False

    def handle_change(self, key: str, value: bytes | None) -> None:
        """Apply a change of a key."""
        kind, _, name = key.partition("/")
        if kind == "nodes":
            self._handle_node(int(name), value)
        elif value is None:
            return
        elif kind == "setup":
            self._handle_setup(decode_setup(value))
        elif kind == "leader":
            self._leader = int(value)
        elif kind == "step":
            self._handle_step(StepMetrics.from_fields(msgspec.msgpack.decode(value)))
        elif kind == "epoch":
            self._handle_epoch(messages.decode(value))
        elif kind == "progress":
            self._progress = decode_fleet_progress(value)
        elif kind == "history":
            self._histories[int(name)] = value
        elif kind == "record":
            snapshot = join_snapshot(value, self._histories)
            if snapshot is not None:
                self._handle_snapshot(_decode_snapshot_view(snapshot))
        elif kind == "incident":
            self._add_event("incident", text=value.decode())
        elif kind == "result" and not self._ended:
            self._handle_result(value)

    def _add_event(self, kind: str, **fields: Any) -> None:
        self._events.append((self._clock.now(), {"kind": kind, "node": None, **fields}))

    def _handle_setup(self, setup: RunSetup) -> None:
        """A run began, or another one after it ended. Its nodes may be known already: a watch starts with all keys in
        the order of their names."""
        if setup == self._setup:
            return
        if self._ended:
            self._reset()
        self._setup = setup
        self._add_event(
            "run_started",
            job=setup.name,
            nodes=setup.nodes,
            pipelines=setup.pipelines,
            stages=setup.stages,
            schedule=setup.schedule,
            strategy=setup.strategy,
            exact=setup.job_facts.get("exact"),
            layers=len(setup.layers) or None,
            global_batch=setup.job_facts.get("global_batch"),
            start=setup.start,
            steps=setup.steps,
            why=setup.reason,
            config=setup.config,
        )
        self._events.insert(0, self._events.pop())

    def _handle_node(self, node: int, value: bytes | None) -> None:
        before = self._nodes.get(node)
        if value is None:
            if self._nodes.pop(node, None) is not None and not self._ended:
                leaves = before is not None and before.leaves_in_s is not None
                step = self._steps[-1].step + 1 if self._steps else 0
                self._add_event("left" if leaves else "lost", node=node, step=step)
            return
        record = self._nodes[node] = decode_node_record(value)
        if before is None:
            self._add_event("node_joined", node=node)
        if record.leaves_in_s is not None and (before is None or before.leaves_in_s is None):
            self._add_event("notice", node=node, seconds=record.leaves_in_s)

    def _handle_step(self, step: StepMetrics) -> None:
        if self._began_at is None:
            self._began_at = self._clock.now() - step.t
        while self._steps and self._steps[-1].step >= step.step:  # the run restarted from a checkpoint
            self._steps.pop()
        self._steps.append(step)
        if len(self._steps) > _MAX_STEPS:
            self._steps = merge_step_pairs(self._steps)

    def _handle_epoch(self, epoch: messages.Message) -> None:
        assert isinstance(epoch, Epoch)
        if self._epoch is not None and self._epoch.number == epoch.number:
            return
        self._epoch = epoch
        self._add_event("epoch", number=epoch.number, **epoch_event_fields(epoch))

    def _handle_snapshot(self, snapshot: LeaderSnapshotView) -> None:
        known = len(self._snapshot.history.recoveries) if self._snapshot is not None else 0
        self._snapshot, self._began_at = snapshot, snapshot.started_at
        for recovered in snapshot.history.recoveries[known:]:
            self._add_event("recovered", **msgspec.to_builtins(recovered))

    def _handle_result(self, value: bytes) -> None:
        result = decode_result(value)
        self._ended = True
        if result.summary is not None:
            self._summary = result.summary
            self._add_event("finished", steps=result.summary.get("steps"), samples=result.summary.get("samples"))
        else:
            self._add_event("failed", error=result.error, message=result.message)

    def read(self) -> RunContents:
        """The data of a page."""
        began = self._began_at if self._began_at is not None else min((at for at, _ in self._events), default=0.0)
        return RunContents(
            name=self._name,
            summary=self._summary if self._ended else self._partial_summary() or None,
            steps=list(self._steps),
            events=[{"t": max(0.0, at - began), **event} for at, event in self._events],
            live=not self._ended and bool(self._events),
            current=self._current_state(),
        )

    def _partial_summary(self) -> dict[str, Any]:
        """The keys of summary.json that the snapshot determines."""
        snapshot, setup = self._snapshot, self._setup
        if snapshot is None or setup is None:
            return {}
        found: dict[str, Any] = {
            "steps": snapshot.next_step,
            "samples": snapshot.samples,
            "samples_lost": snapshot.lost_samples,
            "samples_duplicated": snapshot.duplicated_samples,
            "preemptions": len(snapshot.history.departed_nodes),
            "recoveries": [msgspec.to_builtins(recovered) for recovered in snapshot.history.recoveries],
            "checkpoints": list(snapshot.history.checkpoints),
            "samples_redone": snapshot.redone_samples,
            "at_risk_s": snapshot.at_risk_s,
        }
        if self._progress is not None:
            found["cost_usd"] = self._progress.cost_usd
        batch = setup.job_facts.get("global_batch")
        if isinstance(batch, int):
            found["samples_expected"] = snapshot.steps * batch
        if snapshot.first_step_at is not None:
            found["start_s"] = snapshot.first_step_at - snapshot.started_at
            wall = snapshot.started_at + self._steps[-1].t - snapshot.first_step_at if self._steps else 0.0
            found |= {"wall_s": wall, "goodput": snapshot.samples / wall} if wall > 0 else {}
        return found

    def _current_state(self) -> dict[str, Any]:
        if self._ended or self._epoch is None:
            return {}
        assignments = list(slot_assignments(self._epoch))
        rows = []
        for node in sorted({*self._nodes, *(each.node for each in assignments)}):
            own = [each for each in assignments if each.node == node]
            row = {"node": node, "slot": ", ".join(p.slot for p in own), "layers": " | ".join(p.layers for p in own)}
            rows.append({**row, "more": self._node_remarks(node)})
        return {"leader": self._leader, "epoch": self._epoch.number, "assignments": rows}

    def _node_remarks(self, node: int) -> str:
        """Remarks on a node: leader, zone, notice, address."""
        record = self._nodes.get(node)
        if record is None:
            return "gone"
        remarks = ["leads"] if node == self._leader else []
        remarks += [f"zone {record.zone}"] if record.zone else []
        remarks += [f"notice: {record.leaves_in_s:.0f} s"] if record.leaves_in_s is not None else []
        return ", ".join([*remarks, record.agent])


def merge_step_pairs(steps: list[StepMetrics]) -> list[StepMetrics]:
    """Merge pairs of steps: the later step with the samples of both. Evaluations are kept."""
    found = []
    for one, other in zip(steps[::2], steps[1::2], strict=False):
        kept = one.eval_loss if other.eval_loss is None else other.eval_loss
        found.append(msgspec.structs.replace(other, samples=one.samples + other.samples, eval_loss=kept))
    return found + steps[len(found) * 2 :]


@contextlib.asynccontextmanager
async def watch_open_store(store: Store, name: str) -> AsyncIterator[StoreView]:
    """A view of the store of a run of this process."""
    view = StoreView(name, RealClock())
    task = asyncio.create_task(_apply_changes(store, view))
    try:
        yield view
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def watch_run_store(location: StoreLocation, on_note: Callable[[str], None]) -> AsyncIterator[StoreView]:
    """A view of the store of a run on other machines. Raises UsageError if etcd cannot be used or the secret differs.

    A lost session is replaced by a new one; the run is not affected.
    """
    view = StoreView(location.job, RealClock())
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_etcd_store(location, RealClock(), on_note))
        task = asyncio.create_task(_watch_with_reconnect(location, store, view, on_note))
        try:
            yield view
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _watch_with_reconnect(
    place: StoreLocation, store: Store, view: StoreView, on_note: Callable[[str], None]
) -> None:
    """Apply changes, over a new session after each lost one."""
    with contextlib.suppress(RunError):
        await _apply_changes(store, view)
    while True:
        await asyncio.sleep(_RECONNECT_S)
        try:
            async with open_etcd_store(place, RealClock(), on_note) as again:
                await _apply_changes(again, view)
        except RunError as error:
            on_note(str(error))


async def _apply_changes(store: Store, view: StoreView) -> None:
    async with contextlib.aclosing(store.watch("")) as changes:
        async for key, value in changes:
            view.handle_change(key, value)
