"""The worker: a coroutine that computes. It takes epochs from its agent, runs their steps and reports to the leader."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import traceback
from typing import TYPE_CHECKING

import torch

from culm.checkpoint import Catalog, Storage
from culm.errors import CulmError, EpochClosed, LayerFailed, NodeLost
from culm.runtime import epoch as letters
from culm.runtime.closing import Closed, Closing
from culm.runtime.epoch import Epoch, decode, encode
from culm.runtime.executor import Executor
from culm.runtime.state import Snapshot, State
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.transport.base import Address, Transport


class Worker:
    """One worker of a node. `run` returns when the run has finished, or the agent is gone."""

    def __init__(self, job: Job, node: int, agent: Address, transport: Transport, clock: Clock) -> None:
        self.job, self.node, self.agent = job, node, agent
        self.transport, self.clock = transport, clock
        self.state: State | None = None
        self.permit = 0
        self.finish: int | None = None
        self._news = asyncio.Event()
        self._training: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._executor: Executor | None = None
        self._saved_step: int | None = None

    async def run(self) -> None:
        """Say hello, then follow the letters until the end."""
        self.transport.post(self.agent, encode(letters.Hello(self.node, self.transport.address)))
        try:
            while await self._heed(await self.transport.letter()):
                pass
        finally:
            for task in (self._training, self._saving):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await task

    async def _heed(self, letter: tuple[Address, bytes | None]) -> bool:
        """Act on a letter; False ends the worker."""
        sender, body = letter
        if body is None:
            self._missed(sender)
            return sender != self.agent  # without its agent a worker has no reason to be
        match decode(body):
            case Epoch() as epoch:
                self._training = asyncio.create_task(self._train(epoch))
            case letters.Permit(until):
                self.permit = max(self.permit, until)
            case letters.Finish(step):
                self.finish = step
            case letters.Commit(step):
                if self._executor is not None:
                    self._executor.committed(step)
            case letters.Stop():
                return False
        self._news.set()
        return True

    def _missed(self, sender: Address) -> None:
        """A connection broke: a suspicion, which the leader judges."""
        epoch = self._executor.epoch if self._executor is not None else None
        if epoch is not None and any(member.address == sender for member in epoch.members):
            missing = letters.Failed(self.node, NodeLost.__name__, f"the connection to {sender} broke")
            self.transport.post(epoch.leader, encode(missing))

    async def _train(self, epoch: Epoch) -> None:
        """The life of an epoch here. An error becomes one letter to the leader."""
        try:
            await self._run_epoch(epoch)
        except (asyncio.CancelledError, EpochClosed):
            raise
        except Exception as error:
            self.transport.post(epoch.leader, encode(failure(self.node, error)))
        finally:
            if self._executor is not None:
                self._executor.leave()

    async def _run_epoch(self, epoch: Epoch) -> None:
        slot = next(i for i, member in enumerate(epoch.members) if member.node == self.node)
        began = self.clock.now()
        executor = await self._prepare(epoch, slot)
        closing = Closing(executor)
        self.transport.post(epoch.leader, encode(letters.Ready(self.node, epoch.number, self.clock.now() - began)))
        step = epoch.start
        while await self._may_run(step):
            await self._step(executor, closing, step)
            step += 1
            await self._after(executor, step)
        await self._save(executor, step)
        await self._saved()
        self.transport.post(epoch.leader, encode(self._final(executor)))

    async def _prepare(self, epoch: Epoch, slot: int) -> Executor:
        """Build the layers of this slot, load what a checkpoint has of them, and meet the peers."""
        held = [i for g in Plan.from_text(epoch.plan).segments_of(slot) for i in range(*epoch.segments[g])]
        self.state = State(self.job, held, device_of(self.job))
        if epoch.resume is not None:
            assert epoch.resume_from is not None
            await self.clock.aside(load_checkpoint, self.state, epoch.resume_from, epoch.resume)
        executor = self._executor = Executor(self.job, epoch, slot, self.state, self.transport, self.clock)
        await executor.join()
        return executor

    async def _may_run(self, step: int) -> bool:
        """Wait until the leader permits the step, or says that the run ends before it."""
        while True:
            if self.finish is not None and step >= self.finish:
                return False
            if step < self.permit:
                return True
            self._news.clear()
            await self._news.wait()

    async def _step(self, executor: Executor, closing: Closing, step: int) -> None:
        await executor.step(step)
        start = self.clock.now()
        closed = await closing.close(step)
        now = self.clock.now()
        for g in executor.segments:
            executor.spans.append((step, f"{g}S", start, now))
        self.transport.post(executor.epoch.leader, encode(self._report(executor, step, closed, now)))

    def _report(self, executor: Executor, step: int, closed: Closed, now: float) -> letters.StepReport:
        counts = [settled.counts for settled in executor.settled.values()]
        return letters.StepReport(
            node=self.node,
            epoch=executor.epoch.number,
            step=step,
            at=now,
            counted=tuple(map(min, *counts)) if len(counts) > 1 else tuple(counts[0]),
            counted_most=tuple(map(max, *counts)) if len(counts) > 1 else tuple(counts[0]),
            loss_sum=closed.loss_sum,
            weight_sum=closed.weight_sum,
            norm=closed.norm,
            skipped=closed.skipped,
        )

    async def _after(self, executor: Executor, done: int) -> None:
        """What happens between two steps: evaluation and checkpoints, at the same places for everyone."""
        job, epoch = self.job, executor.epoch
        if job.evaluate_every and done % job.evaluate_every == 0:
            parts = await executor.evaluate(done - 1)
            if parts:
                report = letters.EvaluationReport(self.node, done - 1, tuple(parts))
                self.transport.post(epoch.leader, encode(report))
        if epoch.checkpoint_every and done % epoch.checkpoint_every == 0:
            await self._save(executor, done)

    async def _save(self, executor: Executor, done: int) -> None:
        """Copy this worker's share of the state and write it aside; training goes on at once.

        One write is under way at a time: a disk that is slower than the interval holds training up rather than memory.
        """
        epoch = executor.epoch
        if epoch.storage is None or self._saved_step == done:
            return
        await self._saved()
        self._saved_step = done
        assert self.state is not None
        snapshot = self.state.snapshot(_share(executor)).copy()
        self._saving = asyncio.create_task(self._write(epoch, done, snapshot, executor.slot))

    async def _saved(self) -> None:
        if self._saving is not None:
            await self._saving
            self._saving = None

    async def _write(self, epoch: Epoch, done: int, snapshot: Snapshot, slot: int) -> None:
        assert epoch.storage is not None
        catalog = Catalog(Storage(epoch.storage))
        name = catalog.shard_name(done, slot)
        try:
            receipt = await self.clock.aside(catalog.write_shard, done, name, snapshot.tensors)
        except CulmError as error:
            self.transport.post(epoch.leader, encode(failure(self.node, error)))
            return
        report = letters.ShardReport(
            self.node, done, receipt.name, receipt.sha256, receipt.bytes, receipt.tensors, snapshot.scalars
        )
        self.transport.post(epoch.leader, encode(report))

    def _final(self, executor: Executor) -> letters.Final:
        assert self.state is not None
        return letters.Final(
            node=self.node,
            digests=self.state.digests(self.state.layers),
            spans=tuple(executor.spans),
            kept_bytes=executor.kept_peak,
            peak_tapes=executor.tapes_peak,
            peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            waited_s=executor.waited_s,
        )


def _share(executor: Executor) -> list[int]:
    """The layers that this worker saves: each layer is saved by one of its holders, in turn over the pipelines."""
    pipeline = executor.slot // executor.plan.stages
    return [index for index in executor.state.layers if index % executor.plan.pipelines == pipeline]


def load_checkpoint(state: State, root: str, step: int) -> None:
    """Take the layers held here out of a checkpoint, each byte checked where it is read."""
    catalog = Catalog(Storage(root))
    manifest = catalog.check(step, verify="sizes")
    reader = catalog.open(manifest, verify=True)
    wanted = state.names()
    tensors = {name: reader.tensor(name) for name in reader.names() if _belongs(name, wanted)}
    state.restore_named(tensors, {n: v for n, v in manifest.scalars.items() if _belongs(n, wanted)})


def _belongs(name: str, wanted: set[str]) -> bool:
    """'0.weight' and 'optimizer.0.weight.exp_avg' belong to a holder of '0.weight'."""
    if name in wanted:
        return True
    return name.startswith("optimizer.") and name.removeprefix("optimizer.").rpartition(".")[0] in wanted


def device_of(job: Job) -> torch.device:
    """Where this process computes."""
    if job.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(job.device)


def failure(node: int, error: Exception) -> letters.Failed:
    """An error as a letter: its class, its sentence, and the trace for --debug."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, CulmError):
        return letters.Failed(node, type(error).__name__, str(error), trace)
    return letters.Failed(node, LayerFailed.__name__, f"{type(error).__name__}: {error}", trace)
