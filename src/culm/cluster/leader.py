"""The leader: a coroutine on one of the nodes. It makes the epoch, keeps the ledger and ends the run."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from culm import errors
from culm.checkpoint import Catalog, ShardReceipt, Storage
from culm.cluster.setup import NodeRecord, Result, Setup, decode_node, encode
from culm.errors import CulmError, NodeLost, RunError
from culm.job import STOP
from culm.observe.folder import RunFolder, perfetto
from culm.observe.ledger import CommittedStep, Ledger
from culm.runtime import epoch as letters
from culm.runtime.epoch import Epoch, Member
from culm.runtime.state import total_digest

if TYPE_CHECKING:
    from culm.cluster.store import Store
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.transport.base import Transport


class Leader:
    """Leads one run from the first node to the summary. Everything it decides goes through the store or a letter."""

    def __init__(self, job: Job, setup: Setup, transport: Transport, clock: Clock, store: Store) -> None:
        self.job, self.setup = job, setup
        self.transport, self.clock, self.store = transport, clock, store
        self.inbox: asyncio.Queue[letters.Message | NodeLost] = asyncio.Queue()
        self.folder = RunFolder(setup.out, append=setup.resume is not None)
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

    async def run(self) -> None:
        """Until the result is in the store, whatever it is."""
        watcher = asyncio.create_task(self._watch_nodes())
        gate = asyncio.create_task(self._watch_gate()) if self.setup.gate == "outside" else None
        try:
            result = Result(summary=await self._lead())
        except CulmError as error:
            result = Result(error=type(error).__name__, message=str(error), trace=error.trace)
            self._event("failed", error=type(error).__name__, message=str(error))
        finally:
            watcher.cancel()
            if gate is not None:
                gate.cancel()
        self.folder.close()
        self._tell(letters.Stop())
        await self.store.put("result", encode(result))

    async def _lead(self) -> dict[str, Any]:
        self._event("run_started", nodes=self.setup.nodes, why=self.setup.why, steps=self.setup.steps)
        if self.setup.start >= self.setup.steps:
            self._finish = self.setup.start
        while not self._ended():
            await self._heed(await self.inbox.get())
        return self._summary()

    def _ended(self) -> bool:
        done = self._finish is not None and self.ledger.next_step >= self._finish
        return done and self.epoch is not None and len(self.finals) == len(self.epoch.members) and not self.shards

    async def _watch_nodes(self) -> None:
        """Nodes come and go in the store."""
        async for key, value in self.store.watch("nodes/"):
            node = int(key.rpartition("/")[2])
            if value is None:
                self.inbox.put_nowait(NodeLost(self._lost_sentence(node)))
                continue
            self.nodes[node] = decode_node(value)
            self._event("node_joined", node=node)
            if len(self.nodes) == self.setup.nodes and self.epoch is None:
                await self._publish()

    def _lost_sentence(self, node: int) -> str:
        saved = f"resume it with --resume {self.setup.out}" if self.checkpoints else "it had no checkpoint yet"
        return (
            f"node {node} vanished in step {self.ledger.next_step} and nobody else holds its layers "
            f"(strategy {self.setup.strategy}): {saved}"
        )

    async def _watch_gate(self) -> None:
        """The launcher lets steps begin, or ends the run."""
        async for key, value in self.store.watch("gate/"):
            number = int(value or b"0")
            if key == "gate/finish":
                self._end_before(number)
            else:
                self._permit(number)

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
            self.inbox.put_nowait(
                NodeLost("nodes differ in what exact results depend on: " + "; ".join(sorted(prints)))
            )
            return
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

    async def _heed(self, message: letters.Message | NodeLost) -> None:
        match message:
            case NodeLost():
                raise message
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
        await self.store.put("step", msgspec.json.encode(metrics))
        if done.step + 1 >= self.setup.steps:
            self._end_before(done.step + 1)
        elif self.setup.gate == "hook":
            if self._hook(metrics) is STOP:
                self._event("stopped", step=done.step, why="on_step returned STOP")
                self._end_before(done.step + 1)
            else:
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

    def _tell(self, message: letters.Message) -> None:
        body = letters.encode(message)
        for member in self.epoch.members if self.epoch is not None else ():
            self.transport.post(member.address, body)

    def _event(self, kind: str, node: int | None = None, **fields: Any) -> None:
        self.folder.event(t=round(self.clock.now() - self.began, 6), kind=kind, node=node, **fields)

    def _summary(self) -> dict[str, Any]:
        """The ledger of the run, in the words of the run folder."""
        weights, state = self._digests()
        ledger = self.ledger
        ended = ledger.committed[-1].at if ledger.committed else self.clock.now()
        wall = max(ended - (self.first_step_at or self.began), 1e-9)
        steps = len(ledger.committed)
        summary = {
            "steps": self.setup.start + steps,
            "samples": ledger.samples,
            "samples_expected": steps * self.job.global_batch,
            "samples_lost": ledger.lost,
            "samples_duplicated": ledger.duplicated,
            "wall_s": round(wall, 6),
            "start_s": round((self.first_step_at or self.began) - self.began, 6),
            "goodput": ledger.samples / wall,
            "strategy": self.setup.strategy,
            "pipelines": self.setup.pipelines,
            "stages": self.setup.stages,
            "schedule": self.setup.schedule,
            "exact": self.job.exact,
            "final_loss": ledger.committed[-1].loss if ledger.committed else None,
            "weights_sha256": weights,
            "state_sha256": state,
            "preemptions": 0,
            "recoveries": [],
            "cost_usd": 0.0,
            "checkpoints": self.checkpoints,
            "skipped_steps": ledger.skipped,
            "evaluations": {c.step: c.evaluation for c in ledger.committed if c.evaluation is not None},
            "memory": {
                "peak_rss_bytes": max(f.peak_rss for f in self.finals.values()),
                "kept_bytes": max(f.kept_bytes for f in self.finals.values()),
                "live_activations": max(f.peak_tapes for f in self.finals.values()),
            },
        }
        self._event("finished", steps=steps, samples=ledger.samples)
        self.folder.write("summary.json", summary)
        self.folder.write("trace.json", self._trace())
        return summary

    def _digests(self) -> tuple[str, str]:
        """Of all layers in order; holders of a layer must agree."""
        found: dict[int, tuple[str, str]] = {}
        for final in self.finals.values():
            for layer, digest in final.digests.items():
                if found.setdefault(layer, digest) != digest:
                    raise RunError(f"holders of layer {layer} ended with different weights: please report this")
        ordered = [found[layer] for layer in sorted(found)]
        return total_digest(w for w, _ in ordered), total_digest(s for _, s in ordered)

    def _trace(self) -> dict[str, Any]:
        assert self.epoch is not None
        stages = self.setup.stages
        labels = {
            m.node: f"node {m.node}: pipeline {i // stages} stage {i % stages}"
            for i, m in enumerate(self.epoch.members)
        }
        return perfetto({f.node: f.spans for f in self.finals.values()}, labels)


def _error(message: letters.Failed) -> CulmError:
    """The error that a worker met, in this process; the node where it happened is in the sentence."""
    kind: type[CulmError] = getattr(errors, message.kind, RunError)
    error = kind(f"node {message.node}: {message.message}")
    error.trace = message.trace
    return error
