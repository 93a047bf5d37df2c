"""The leader: a coroutine on one of the nodes. It makes the epoch, keeps the ledger and ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from culm import errors
from culm.checkpoint import Catalog, ShardReceipt, Storage
from culm.cluster.setup import NodeRecord, Result, Setup, decode_node, encode
from culm.cluster.store import Change
from culm.cluster.summary import slot_label, speed, summarise
from culm.errors import CulmError, NodeLost, RunError
from culm.job import STOP
from culm.observe.folder import RunFolder, perfetto
from culm.observe.ledger import CommittedStep, Ledger
from culm.runtime import epoch as letters
from culm.runtime.epoch import Epoch, Member

if TYPE_CHECKING:
    from culm.cluster.store import Store
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.transport.base import Transport

_DOUBT_S = 5.0
"""How long a worker's word that another one is gone waits for the store to say who."""


class Leader:
    """Leads one run from the first node to the summary. Everything it decides goes through the store or a letter.

    All it hears, from the store, from workers and from its own agent, goes through one inbox: it does one thing at a
    time, and whatever goes wrong ends in the one result of the run.
    """

    def __init__(self, job: Job, setup: Setup, transport: Transport, clock: Clock, store: Store) -> None:
        self.job, self.setup = job, setup
        self.transport, self.clock, self.store = transport, clock, store
        self.inbox: asyncio.Queue[letters.Message | Change | CulmError] = asyncio.Queue()
        self.folder = RunFolder(setup.out, resumed_at=None if setup.resume is None else setup.start)
        self.nodes: dict[int, NodeRecord] = {}
        self.epoch: Epoch | None = None
        self.ledger = Ledger(
            workers=setup.pipelines * setup.stages,
            micro_batch=job.micro_batch,
            evaluate_every=job.evaluate_every,
            evaluation_parts=setup.evaluation_parts,
            next_step=setup.start,
        )
        self.finals: dict[int, letters.Final] = {}
        self.shards: dict[int, dict[int, letters.ShardReport]] = {}
        self.checkpoints: list[int] = []
        self.began = clock.now()
        self.first_step_at: float | None = None
        self._ready: set[int] = set()
        self._finish: int | None = None
        self._permitted = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Until the result is in the store, whatever it is; one that is there already stays."""
        self._aside(self._watch("nodes/"))
        if self.setup.gate == "outside":
            self._aside(self._watch("gate/"))
        try:
            result = await self._result()
            await self.store.swap("result", None, encode(result))
        finally:
            self.folder.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _result(self) -> Result:
        """How the run ended, with all that it leaves behind in its place."""
        try:
            summary = await self._lead()
            self.folder.sync()
            return Result(summary=summary)
        except Exception as reason:
            error = reason if isinstance(reason, CulmError) else _unforeseen(reason)
        with contextlib.suppress(RunError):  # it may be the folder that failed
            self._event("failed", error=type(error).__name__, message=str(error))
        self.folder.close()
        return Result(error=type(error).__name__, message=str(error), trace=error.trace)

    async def _lead(self) -> dict[str, Any]:
        self.folder.open()
        self._event("run_started", nodes=self.setup.nodes, why=self.setup.why, steps=self.setup.steps)
        if self.setup.start >= self.setup.steps:
            self._finish = self.setup.start
        while not self._ended():
            await self._heed(await self.inbox.get())
        return self._leave()

    def _leave(self) -> dict[str, Any]:
        """All is done: write down what it came to."""
        assert self.epoch is not None
        ledger, finals, setup = self.ledger, list(self.finals.values()), self.setup
        started = self.began if self.first_step_at is None else self.first_step_at
        ended = self.clock.now() if ledger.last is None else ledger.last.at
        summary = {
            **summarise(self.job, setup, ledger, finals),
            **speed(ledger.samples, self.began, started, ended),
            "checkpoints": self.checkpoints,
        }
        self._event("finished", steps=ledger.steps, samples=ledger.samples)
        self.folder.write("summary.json", summary)
        labels = {m.node: f"node {m.node}: {slot_label(i, setup.stages)}" for i, m in enumerate(self.epoch.members)}
        self.folder.write("trace.json", perfetto({f.node: f.spans for f in finals}, labels))
        return summary

    def _ended(self) -> bool:
        done = self._finish is not None and self.ledger.next_step >= self._finish
        return done and self.epoch is not None and len(self.finals) == len(self.epoch.members) and not self.shards

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _watch(self, prefix: str) -> None:
        """Nodes come and go in the store; with the gate `outside` the launcher speaks there."""
        try:
            async for change in self.store.watch(prefix):
                self.inbox.put_nowait(change)
        except RunError as error:
            self.inbox.put_nowait(error)

    async def _heed(self, message: letters.Message | Change | CulmError) -> None:
        match message:
            case CulmError():
                raise message
            case Change(key, value):
                await self._news(key, value)
            case letters.Failed(kind="NodeLost"):
                self._suspect(message)
            case letters.Failed():
                raise _error(message)
            case letters.Ready():
                self._note_ready(message)
            case letters.StepReport() | letters.EvaluationReport():
                for done in self.ledger.note(message):
                    await self._committed(done)
            case letters.ShardReport():
                await self._note_shard(message)
            case letters.Final():
                self.finals[message.node] = message

    async def _news(self, key: str, value: bytes | None) -> None:
        """A key of the store has changed."""
        name = key.rpartition("/")[2]
        if key == "gate/finish":
            self._end_before(int(value or b"0"))
        elif key == "gate/permit":
            self._permit(int(value or b"0"))
        elif value is None:
            raise self.lost(int(name))
        else:
            await self._joined(decode_node(value))

    async def _joined(self, record: NodeRecord) -> None:
        """An agent is up, and then its worker; when all are, the epoch begins."""
        if not record.worker:
            return
        self.nodes[record.node] = record
        self._event("node_joined", node=record.node)
        if len(self.nodes) == self.setup.nodes and self.epoch is None:
            await self._publish()

    def lost(self, node: int) -> NodeLost:
        """What there is to say when a node is gone."""
        saved = self.setup.out if self.checkpoints else (self.setup.resume_from or "").removesuffix("/checkpoints")
        return NodeLost(
            f"node {node} vanished in step {self.ledger.next_step} and nobody else holds its layers (strategy "
            f"{self.setup.strategy}): " + (f"resume it with --resume {saved}" if saved else "it had no checkpoint yet")
        )

    def _suspect(self, message: letters.Failed) -> None:
        """A worker misses another one. Who is gone the store knows, in a moment; if nobody is, this ends the run."""
        self._event("suspected", node=message.node, why=message.message)

        async def believe() -> None:
            await self.clock.sleep(_DOUBT_S)
            self.inbox.put_nowait(_error(message))

        self._aside(believe())

    def _permit(self, until: int) -> None:
        """Let steps below a number begin; workers that are not there yet hear of it when all are ready."""
        self._permitted = max(self._permitted, until)
        self._tell(letters.Permit(self._permitted))

    async def _publish(self) -> None:
        """Make the epoch: the first D x P nodes by number fill the slots."""
        setup = self.setup
        chosen = sorted(self.nodes.values(), key=lambda r: r.node)[: setup.pipelines * setup.stages]
        prints = {record.fingerprint for record in chosen}
        if self.job.exact and len(prints) > 1:
            raise RunError(
                f"nodes differ in what exact results depend on ({'; '.join(sorted(prints))}): "
                "use machines of one kind, or --set exact=false"
            )
        self.epoch = Epoch(
            number=1,
            leader=self.transport.address,
            members=tuple(Member(r.node, r.worker) for r in chosen),
            segments=setup.segments,
            plan=setup.plan,
            evaluation=setup.evaluation,
            start=setup.start,
            steps=setup.steps,
            weighted=setup.weighted,
            checkpoint_every=setup.checkpoint_every,
            storage=self.folder.checkpoints,
            resume=setup.resume,
            resume_from=setup.resume_from,
            kept=setup.strategy != "none",
        )
        self._event("epoch", number=1, members=[m.node for m in self.epoch.members], segments=setup.segments)
        await self.store.put("epoch", letters.encode(self.epoch))

    def _note_ready(self, message: letters.Ready) -> None:
        self._event("ready", node=message.node, seconds=message.seconds)
        self._ready.add(message.node)
        assert self.epoch is not None
        if len(self._ready) == len(self.epoch.members):
            self.first_step_at = self.clock.now()
            if self._finish is not None:
                self._end_before(self._finish)
            self._permit({"open": self.setup.steps, "hook": self.setup.start + 1, "outside": 0}[self.setup.gate])

    async def _committed(self, done: CommittedStep) -> None:
        """A step is complete everywhere: write it down, ask the hook, let the next begin."""
        metrics = self._metrics(done)
        self.folder.step(**metrics)
        if done.skipped:
            self._event("skipped", step=done.step, why="the loss or a gradient is not finite")
        if done.evaluation is not None:
            self._event("evaluation", step=done.step, loss=done.evaluation)
        if self.epoch is not None and self.epoch.kept:
            self._tell(letters.Commit(done.step))
        await self.store.put("step", msgspec.msgpack.encode(metrics))
        stopped = self.setup.gate == "hook" and self._hook(metrics) is STOP
        if stopped:
            self._event("stopped", step=done.step, why="on_step returned STOP")
        if stopped or done.step + 1 >= self.setup.steps:
            self._end_before(done.step + 1)
        elif self.setup.gate == "hook":
            self._permit(done.step + 2)

    def _metrics(self, done: CommittedStep) -> dict[str, Any]:
        extra = {"norm": done.norm, "eval_loss": done.evaluation}
        return {
            "step": done.step,
            "loss": done.loss,
            "samples": done.samples,
            "t": round(done.at - self.began, 6),
            **{name: value for name, value in extra.items() if value is not None},
        }

    def _hook(self, metrics: dict[str, Any]) -> object:
        assert self.job.on_step is not None
        try:
            return self.job.on_step(metrics)
        except Exception as error:
            raise errors.LayerFailed(f"Job.on_step raised {type(error).__name__}: {error}") from error

    def _end_before(self, step: int) -> None:
        self._finish = step
        self._tell(letters.Finish(step))

    async def _note_shard(self, report: letters.ShardReport) -> None:
        """When all parts of a checkpoint lie on storage, one atomic write makes it one."""
        parts = self.shards.setdefault(report.step, {})
        parts[report.node] = report
        assert self.epoch is not None
        if len(parts) < len(self.epoch.members):
            return
        catalog = Catalog(Storage(self.folder.checkpoints or ""))
        receipts = [ShardReceipt(r.name, r.sha256, r.size, r.tensors) for r in parts.values()]
        scalars = {name: value for r in parts.values() for name, value in r.scalars.items()}
        await self.clock.aside(catalog.commit, report.step, receipts, scalars, self.setup.facts, time.time())
        await self.clock.aside(catalog.prune, self.setup.keep_last, verify="sizes")
        del self.shards[report.step]
        self.checkpoints.append(report.step)
        self._event("checkpoint", step=report.step, bytes=sum(r.size for r in parts.values()))
        await self.clock.aside(self.folder.sync)

    def _tell(self, message: letters.Message) -> None:
        body = letters.encode(message)
        for member in self.epoch.members if self.epoch is not None else ():
            self.transport.post(member.address, body)

    def _event(self, kind: str, node: int | None = None, **fields: Any) -> None:
        self.folder.event(t=round(self.clock.now() - self.began, 6), kind=kind, node=node, **fields)


def _error(message: letters.Failed) -> CulmError:
    """The error that a worker met, in this process; the node where it happened is in the sentence."""
    kind: type[CulmError] = getattr(errors, message.kind, RunError)
    error = kind(f"node {message.node}: {message.message}")
    error.trace = message.trace
    return error


def _unforeseen(reason: Exception) -> RunError:
    """A fault of ours, or of a file system's driver: still the one result of the run."""
    error = RunError(f"the leader failed: {type(reason).__name__}: {reason}")
    error.trace = "".join(traceback.format_exception(reason))
    return error
