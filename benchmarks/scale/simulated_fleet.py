"""A leader with its production code, and nodes that only send the messages that real ones send.

The leader's state machine, its shell, the planner, the encoding of epochs, the store protocol and the input log are
those of a real run. Emulated are the nodes: they hold no layers, and answer with messages prepared outside of the
measured time. Processor time is that of this process, all threads together.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from culm.cluster.leader.events import CallBody, PlanRecovery, PublishEpoch
from culm.cluster.leader.hang_detector import HangDetector
from culm.cluster.leader.leader import Leader
from culm.cluster.leader.output.hook_runner import InlineHookRunner
from culm.cluster.prepare_run import prepare_run
from culm.cluster.run_setup import NodeRecord, RunSetup, encode
from culm.cluster.store.store import MemoryStore
from culm.config import RunConfig
from culm.job import Job
from culm.plan.recover.lineage import WorkerInventory, WorkKey
from culm.runtime import messages
from culm.runtime.clock import RealClock
from culm.runtime.epoch import Epoch
from culm.schedule import Kind, Plan
from culm.schedule.plan import clear_known_plans
from culm.schedule.plan_timing import time_plan
from culm.transport.interface import Transport

STAGES = 16
MICRO_BATCHES = 32
"""Of each pipeline."""
LEADER = "agent-0"
_WIDTH = 2
_DECIDED = "between planning and publication"
"""The time in which the leader adopts a planned epoch, encodes it and sends its parts."""


def fleet_job(pipelines: int, *, steps: int = 1000) -> Job:
    """A job with one tiny layer for each stage and 32 micro-batches for each pipeline."""
    return Job(
        layers=[lambda: nn.Linear(_WIDTH, _WIDTH)] * STAGES,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=[(torch.zeros(_WIDTH), torch.zeros(_WIDTH))] * 4,
        global_batch=pipelines * MICRO_BATCHES,
        micro_batch=1,
        steps=steps,
        device="cpu",
    )


def fleet_setup(job: Job, pipelines: int, out: str | None) -> RunSetup:
    """The setup of a run of `pipelines` pipelines of 16 stages that recovers by peers."""
    config = RunConfig(
        pipelines=pipelines,
        stages=STAGES,
        schedule="zb",
        strategy="reroute",
        reconfigure="never",
        suspect_after=600.0,
        out=out,
    )
    return prepare_run(job, config, measure=False)


class FleetTransport:
    """The leader's endpoint: counts what it sends."""

    def __init__(self) -> None:
        self.address = LEADER
        self.sent: Counter[str] = Counter()
        self.parts: list[bytes] = []
        """Parts of the newest epoch, as the leader has sent them."""
        self._awaited: tuple[str, int, asyncio.Future[None]] | None = None

    def send_message(self, to: str, body: bytes) -> None:
        del to
        kind = _KINDS.get(body[:16]) or _kind_of(body)
        self.sent[kind] += 1
        if kind == "EpochPart":
            self.parts.append(body)
        if self._awaited is not None and self._awaited[0] == kind and self.sent[kind] >= self._awaited[1]:
            self._awaited[2].set_result(None)
            self._awaited = None

    def expect(self, kind: str, messages: int) -> asyncio.Future[None]:
        """Done when this many more messages of a kind have been sent."""
        future = asyncio.get_running_loop().create_future()
        self._awaited = (kind, self.sent[kind] + messages, future)
        return future


_KINDS: dict[bytes, str] = {}


def _kind_of(body: bytes) -> str:
    """The class of a message. Remembered by its first bytes, so that counting costs the leader nothing."""
    kind = _KINDS[body[:16]] = type(messages.decode(body)).__name__
    return kind


@dataclass
class CallTimes:
    """Processor seconds of the leader's calls, by class."""

    seconds: dict[str, float] = field(default_factory=dict)
    decided_at: float = 0.0
    """Processor time at which the last epoch was planned."""
    published: asyncio.Event = field(default_factory=asyncio.Event)


class MeasuredLeader(Leader):
    """The leader, with the processor time of its calls recorded."""

    call_times: CallTimes

    async def _perform(self, body: CallBody) -> Any:
        times, start = self.call_times, time.process_time()
        if isinstance(body, PublishEpoch) and times.decided_at:
            times.seconds[_DECIDED] = start - times.decided_at
        result = await super()._perform(body)
        times.seconds[type(body).__name__] = time.process_time() - start
        if isinstance(body, PlanRecovery):
            times.decided_at = time.process_time()
        if isinstance(body, PublishEpoch):
            times.published.set()
        return result


@dataclass(frozen=True)
class LossCost:
    """Processor seconds from a loss to the new epoch, by part."""

    halt_s: float
    """The loss is handled and all survivors are told to halt."""
    report_s: float
    """The reports of the survivors are decoded and handled."""
    decide_s: float
    """The next epoch is planned."""
    spread_s: float
    """The next epoch is encoded, published and sent, on the leader."""
    adopt_s: float
    """One worker reads the epoch: it decodes it and derives its own work."""
    epoch_bytes: int
    """Bytes of the whole epoch."""
    node_bytes: int
    """Bytes that a node receives of it, on average."""
    leader_bytes: int
    """Bytes that the leader sends of it to other nodes, which send them on; 0: the epoch is in the announcement."""


class SimulatedFleet:
    """A run with `pipelines` x 16 nodes, driven step by step."""

    def __init__(self, pipelines: int, out: str | None = None) -> None:
        self.pipelines, self.nodes = pipelines, pipelines * STAGES
        self.job = fleet_job(pipelines)
        self.setup = fleet_setup(self.job, pipelines, out)
        self.store = MemoryStore()
        self.transport = FleetTransport()
        self.hang_detector = HangDetector(self.setup.suspect_after, 0.0)
        self.leader = MeasuredLeader(
            self.job,
            self.setup,
            0,
            cast(Transport, self.transport),
            RealClock(),
            self.store.client("0"),
            self.hang_detector,
            InlineHookRunner(self.job),
        )
        self.leader.call_times = CallTimes()
        self._leading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the leader, let all nodes join, and bring the first epoch to its first step. As on a real node, the
        garbage collection does not look through torch and the job."""
        gc.collect()
        gc.freeze()
        self._leading = asyncio.create_task(self.leader.run())
        for node in range(self.nodes):
            self.store.write(f"nodes/{node}", encode(_record(node)), f"{node}")
        await self._wait_for_epoch()
        await self.make_ready()

    async def make_ready(self) -> None:
        """All members have built their layers."""
        epoch, members = self.epoch, self._members()
        permitted = self.transport.expect("StepPermit", len(members))
        self._deliver([messages.encode(messages.LayersReady(m.worker, epoch.number, 0.0)) for m in members])
        await permitted

    @property
    def epoch(self) -> Epoch:
        epoch = self.leader.state.epoch
        assert epoch is not None
        return epoch

    def _members(self) -> list[Any]:
        return [member for member in self.epoch.present_members if member.node in self.leader.state.members.nodes]

    async def run_step(self) -> float:
        """All workers report a step. Returns the processor seconds that the leader spends on it."""
        step, now = self.leader.state.ledger.next_step, self.leader.clock.now()
        bodies = self._step_reports(step, now)
        committed = self.transport.expect("Commit", len(self.epoch.present_members))
        start = time.process_time()
        self._deliver(bodies)
        await committed
        return time.process_time() - start

    def _step_reports(self, step: int, now: float) -> list[bytes]:
        """The messages with the reports of all workers: in a large cluster one for each pipeline. Reports of the last
        stage contain the loss."""
        micro_batches = self.job.micro_batches
        counts = messages.count_runs((1,) * micro_batches, (1,) * micro_batches)
        last = STAGES - 1
        by_pipeline: dict[int, list[messages.StepReport]] = {}
        for slot, member in enumerate(self.epoch.members):
            if member is not None:
                report = messages.StepReport(
                    member.worker,
                    self.epoch.number,
                    step,
                    now,
                    counts=counts,
                    grad_norm=1.0,
                    busy_s=0.1,
                    actions={f"{slot % STAGES}{kind}": MICRO_BATCHES for kind in "FIW"},
                    loss_sum=1.0 if slot % STAGES == last else None,
                    weight_sum=float(micro_batches) if slot % STAGES == last else None,
                )
                by_pipeline.setdefault(slot // STAGES, []).append(report)
        if self.epoch.report_collectors:
            return [messages.encode(messages.ReportBundle(tuple(reports))) for reports in by_pipeline.values()]
        return [messages.encode(report) for reports in by_pipeline.values() for report in reports]

    async def run_heartbeats(self) -> float:
        """Every worker sends a heartbeat. Returns the processor seconds that the leader spends on them."""
        bodies = [
            messages.encode(messages.Heartbeat(member.worker, self.epoch.number, 1, 0.1)) for member in self._members()
        ]
        start = time.process_time()
        self._deliver(bodies)
        while not self.leader.inbox.empty():
            await asyncio.sleep(0)
        return time.process_time() - start

    async def wait_for_precomputed_plans(self) -> None:
        """Wait until no thread of the leader computes: plans for the next loss are ready."""
        idle = 0
        while idle < 3:
            before = time.process_time()
            await asyncio.sleep(0.1)
            idle = idle + 1 if time.process_time() - before < 0.02 else 0

    async def lose_node(self, node: int, progress: float = 0.5) -> LossCost:
        """Lose a node after a share of the step, and bring the survivors into the next epoch."""
        epoch, calls = self.epoch, self.leader.call_times
        calls.seconds.clear()
        calls.published.clear()
        reports = self._halt_reports(epoch, node, progress)
        halted_all = self.transport.expect("Halt", len(reports))
        start = time.process_time()
        self.store.write(f"nodes/{node}", None)
        await halted_all
        halted = time.process_time()
        self.transport.parts.clear()
        self._deliver(reports)
        await self._wait_for_epoch()
        published = time.process_time()
        decide = calls.seconds.get(PlanRecovery.__name__, 0.0)
        body, parts = self.store.read("epoch") or b"", self.transport.parts
        adopt = _seconds(lambda: _read_epoch(max(parts, key=len) if parts else body))
        received, sent = _part_bytes(parts) if parts else (len(body) * len(reports), 0)
        spread = calls.seconds[PublishEpoch.__name__] + calls.seconds[_DECIDED]
        return LossCost(
            halt_s=halted - start,
            report_s=published - halted - decide - spread,
            decide_s=decide,
            spread_s=spread,
            adopt_s=adopt,
            epoch_bytes=len(body),
            node_bytes=round(received / len(reports)),
            leader_bytes=sent,
        )

    def _halt_reports(self, epoch: Epoch, lost_node: int, progress: float) -> list[bytes]:
        """What the survivors hold after a share of a step."""
        step = self.leader.state.ledger.next_step
        held = inventories_at(Plan.from_text(epoch.plan), step, progress)
        return [
            messages.encode(messages.HaltReport(member.worker, epoch.number + 1, held[slot]))
            for slot, member in enumerate(epoch.members)
            if member is not None and member.node != lost_node
        ]

    def _deliver(self, bodies: list[bytes]) -> None:
        """What the agent of the leader's node does with every message."""
        leader, now = self.leader, self.leader.clock.now()
        for body in bodies:
            message = messages.decode(body)
            leader.hang_detector.handle_message(message, now)
            leader.receive(message)

    async def _wait_for_epoch(self) -> None:
        """Wait until the leader has published an epoch. Raises AssertionError if it ended instead."""
        published = asyncio.ensure_future(self.leader.call_times.published.wait())
        assert self._leading is not None
        await asyncio.wait([published, self._leading], return_when=asyncio.FIRST_COMPLETED)
        assert published.done(), f"the leader ended: {self.store.read('result')!r}"

    async def close(self) -> None:
        if self._leading is not None:
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)
        gc.unfreeze()


def inventories_at(plan: Plan, step: int, progress: float) -> dict[int, WorkerInventory]:
    """What the workers hold of a step after a share of its time, by slot. Actions take one unit of time each."""
    timeline = time_plan(plan)
    now = progress * timeline.makespan
    found: dict[int, WorkerInventory] = {}
    for slot, spans in enumerate(timeline.spans):
        done = [span.action for span in spans if span.end <= now]
        keys = {kind: [WorkKey(step, a.segment, a.micro or 0) for a in done if a.kind is kind] for kind in Kind}
        summed = {*keys[Kind.W], *keys[Kind.B]}
        after_input = {*keys[Kind.I]} - summed
        found[slot] = WorkerInventory(
            rebuild_epoch=1,
            weight_versions=dict.fromkeys(plan.stages_of(slot), step),
            tapes_after_forward=tuple(key for key in keys[Kind.F] if key not in after_input and key not in summed),
            tapes_after_input_grad=tuple(sorted(after_input)),
            accumulated_grads=tuple(sorted(summed)),
            outputs=tuple(keys[Kind.F]),
            input_grads=tuple(key for key in (*keys[Kind.I], *keys[Kind.B]) if key.segment),
        )
    return found


def _part_bytes(parts: list[bytes]) -> tuple[int, int]:
    """(bytes that all nodes receive, bytes that the leader sends)."""
    received = 0
    for body in parts:
        part = messages.decode(body)
        assert isinstance(part, messages.EpochPart)
        received += len(part.body) * (1 + len(part.forward_to))
    return received, sum(map(len, parts))


def _record(node: int) -> NodeRecord:
    return NodeRecord(node, f"agent-{node}", (f"worker-{node}",), "simulated")


def _read_epoch(body: bytes) -> None:
    clear_known_plans()
    found = messages.decode(body)
    epoch = messages.decode(found.body) if isinstance(found, messages.EpochPart) else found
    assert isinstance(epoch, Epoch)
    Plan.from_text(epoch.plan)


def _seconds(call: Any) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start
