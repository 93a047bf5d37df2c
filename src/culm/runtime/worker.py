"""The worker: a coroutine that computes. It takes epochs from its agent, runs their steps and reports to the leader."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from culm.checkpoint import Catalog, Storage
from culm.errors import CulmError, EpochClosed, LayerFailed, NodeLost
from culm.plan.lineage import Standing
from culm.runtime import epoch as letters
from culm.runtime.building import built
from culm.runtime.closing import Closing
from culm.runtime.desk import Desk
from culm.runtime.epoch import Epoch, decode, encode
from culm.runtime.estate import Inheritance, hand_over, keep_frame
from culm.runtime.executor import Executor
from culm.runtime.moving import give_layers, take_layers
from culm.runtime.shadow import Shadows, send_copies
from culm.runtime.state import Snapshot
from culm.schedule import Plan
from culm.transport.base import Key

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.desk import Holding
    from culm.runtime.state import State
    from culm.transport.base import Address, Tensors, Transport

_MADE = re.compile(r"[0-9]+[FI][0-9]+")
"""Names of what actions made."""


class Worker:
    """One worker of a node. `run` returns when the run has finished, or the agent is gone."""

    def __init__(self, job: Job, node: int, agent: Address, transport: Transport, clock: Clock) -> None:
        self.job, self.node, self.agent = job, node, agent
        self.transport, self.clock = transport, clock
        self.desk: Desk | None = None
        self.permit = 0
        self.committed = 0
        """Steps below this number are committed."""
        self.finish: int | None = None
        self._news = asyncio.Event()
        self._training: asyncio.Task[None] | None = None
        self._saving: asyncio.Task[None] | None = None
        self._executor: Executor | None = None
        self._saved_step: int | None = None
        self._slow = 0
        """Whether layers are being built, or a disk is waited for: that takes as long as it takes."""
        self._floor = 0
        """No epoch below this number is listened to."""
        self._record = b""
        """What the last leader would have put into the store that was out of reach."""
        self._told = (0, 0)
        """(epoch, step): the first step that the leader of the epoch has not had a report of."""
        self._drain = (0, 0)
        """(epoch, step): in that epoch, begin no step from this one on."""

    async def run(self) -> None:
        """Say hello, then follow the letters until the end."""
        self.transport.post(self.agent, encode(letters.Hello(self.node, self.transport.address)))
        try:
            while await self._heed(await self.transport.letter()):
                pass
        finally:
            await self._stop_training()
            if self._saving is not None:
                self._saving.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await self._saving

    async def _heed(self, letter: tuple[Address, bytes | None]) -> bool:
        """Act on a letter; False ends the worker."""
        sender, body = letter
        if body is None:
            self._missed(sender)
            return sender != self.agent  # without its agent a worker has no reason to be
        match decode(body):
            case Epoch() as epoch:
                await self._adopt(epoch)
            case letters.Halt(number, leader):
                await self._halt(number, leader)
            case letters.Permit(until):
                self.permit = max(self.permit, until)
            case letters.Drain(number, before):
                self._drain = number, before
            case letters.Finish(step):
                self.finish = step
            case letters.Commit(step, number, record):
                if number >= self._floor:
                    self._record = record or self._record
                    self._commit(step + 1)
            case letters.Stop():
                return False
        self._news.set()
        return True

    def _missed(self, sender: Address) -> None:
        """A connection broke: a suspicion, which the leader judges."""
        epoch = self._executor.epoch if self._executor is not None else None
        if epoch is not None and any(epoch.address(slot) == sender for slot in epoch.staying):
            missing = letters.Failed(self.node, NodeLost.__name__, f"the connection to {sender} broke")
            self.transport.post(epoch.leader, encode(missing))

    def _commit(self, steps: int) -> None:
        """All steps below are committed: what was kept for them goes."""
        self.committed = max(self.committed, steps)
        if self.desk is not None:
            self.desk.committed(self.committed - 1)

    async def _halt(self, number: int, leader: Address) -> None:
        """Leave the epoch between two actions and say what is in hand. Nothing of it can finish any more."""
        training = self._training is not None and not self._training.done()
        if number < self._floor or (number == self._floor and training):
            # Another leader was further: this one has to begin above.
            self.transport.post(leader, encode(letters.Report(self.node, self._floor, Standing(), self._record)))
            return
        self._floor = number
        left = self.transport.close_epochs(number)
        await self._stop_training()
        if self._executor is not None:
            self._salvage(self._executor, left)
        await self.clock.work(self.node, self.committed, "standing")
        standing = self.desk.standing() if self.desk is not None else Standing()
        self.transport.post(leader, encode(letters.Report(self.node, number, standing, self._record)))

    def _salvage(self, executor: Executor, left: dict[Key, Tensors]) -> None:
        """What had come and was not used yet may be all that is left of it."""
        for (number, step, name), tensors in left.items():
            kind, _, segment = name.partition(" ")
            if step < self.committed:
                continue
            if kind == "sum" and int(segment) % executor.plan.stages in executor.desk.holdings:
                executor.taken(step, int(segment), tensors)
            elif kind == "part" and int(segment.split()[0]) % executor.plan.stages in executor.desk.holdings:
                keep_frame(executor, Key(number, step, name), tensors)
            elif _MADE.fullmatch(name):
                executor.desk.keep(step, name, tensors)

    async def _stop_training(self) -> None:
        if self._training is not None:
            self._training.cancel()
            with contextlib.suppress(asyncio.CancelledError, EpochClosed):
                await self._training
            self._training = None

    async def _adopt(self, epoch: Epoch) -> None:
        """Train under an epoch from now on; nobody ever accepts a lower one."""
        if epoch.number < self._floor or epoch.slot_of(self.node) is None:
            return
        await self._stop_training()
        self._floor, self._record = epoch.number, b""
        self.transport.close_epochs(epoch.number)
        self._training = asyncio.create_task(self._train(epoch))

    async def _train(self, epoch: Epoch) -> None:
        """The life of an epoch here. An error becomes one letter to the leader."""
        executor = None
        beating = asyncio.create_task(self._beat(epoch)) if epoch.beat_s else None
        try:
            await self.clock.work(self.node, epoch.start, "adopt")
            executor = await self._prepare(epoch)
            await self._run_epoch(executor)
        except (asyncio.CancelledError, EpochClosed):
            raise
        except Exception as error:
            self.transport.post(epoch.leader, encode(failure(self.node, error)))
        finally:
            if beating is not None:
                beating.cancel()
            if executor is not None:
                executor.leave()

    async def _beat(self, epoch: Epoch) -> None:
        """Tell the leader now and then how far this worker has come. A worker that stands still says so."""
        waited = done = 0
        slowest_s = 0.0
        while True:
            executor = self._executor
            if executor is not None and executor.epoch is epoch:
                done, slowest_s = executor.done, executor.slowest_s
            waited += self._slow > 0
            self.transport.post(epoch.leader, encode(letters.Beat(self.node, epoch.number, done + waited, slowest_s)))
            await self.clock.sleep(epoch.beat_s)

    @contextlib.contextmanager
    def _slowly(self) -> Iterator[None]:
        """For as long as this lasts every beat says that something moves."""
        self._slow += 1
        try:
            yield
        finally:
            self._slow -= 1

    async def _run_epoch(self, executor: Executor) -> None:
        epoch = executor.epoch
        closing = Closing(executor)
        shadows = executor.shadows = Shadows(executor, closing, lambda shadow: self._level(epoch, shadow))
        began = self.clock.now()
        await executor.join()
        self.transport.post(epoch.leader, encode(letters.Ready(self.node, epoch.number, self.clock.now() - began)))
        await self._recover(executor, closing)
        self._tidy(executor)
        send_copies(executor)
        await (self._work(executor, closing) if executor.segments else self._follow(executor, shadows))
        self.transport.post(epoch.leader, encode(self._final(executor)))

    async def _work(self, executor: Executor, closing: Closing) -> None:
        """Run steps until the run ends."""
        step = executor.epoch.start
        if executor.epoch.recovery.steps:
            await self._after(executor, step)
        while await self._may_run(executor, step):
            await self._step(executor, closing, step)
            step += 1
            await self._after(executor, step)
        await self._catch_up(executor, step)
        await self._save(executor, step)
        await self._saved()

    async def _follow(self, executor: Executor, shadows: Shadows) -> None:
        """A worker that runs nothing yet makes the steps of its copies, until it is level and another epoch begins."""
        step = executor.epoch.start
        while await self._may_run(executor, step):
            await shadows.follow(step)
            shadows.arrive(self.committed)
            self._report_closed(executor)
            step += 1

    async def _catch_up(self, executor: Executor, step: int) -> None:
        if executor.shadows is not None:
            await executor.shadows.catch_up(step)
            self._report_closed(executor)

    def _level(self, epoch: Epoch, shadow: letters.Shadow) -> None:
        self.transport.post(epoch.leader, encode(letters.Level(self.node, epoch.number, shadow.stage)))

    def _inherited(self, epoch: Epoch) -> None:
        self.transport.post(epoch.leader, encode(letters.Inherited(self.node, epoch.number)))

    async def _prepare(self, epoch: Epoch) -> Executor:
        """Build what this worker is to hold and has not, or load it from a checkpoint; what is in hand stays."""
        slot = epoch.slot_of(self.node)
        assert slot is not None
        if self.desk is None or epoch.reset:
            self.desk = Desk(self.job, device_of(self.job))
            self.committed = epoch.committed
        if self.desk.shaped != epoch.shaped:
            taken = await self._take_layers(epoch, slot) if epoch.reshapes and not epoch.reset else {}
            self.desk.reshape(epoch.shaped, taken, epoch.committed)
        self._commit(epoch.committed)
        self.desk.drop(epoch.recovery.dropped)
        self._saved_step = None
        with self._slowly():
            await self._build(epoch, slot, self.desk)
        executor = self._executor = Executor(self.job, epoch, slot, self.desk, self.transport, self.clock)
        return executor

    async def _build(self, epoch: Epoch, slot: int, desk: Desk) -> None:
        plan = Plan.from_text(epoch.plan)
        shadowed = [shadow.stage for shadow in epoch.shadows if shadow.slot == slot and not shadow.fresh]
        for stage in (*plan.stages_of(slot), *shadowed):
            if stage not in desk.holdings:
                place = (plan.stages, stage, desk.device, epoch.start)
                holding = await built(self.clock, self.job, epoch.segments, *place)
                if epoch.resume is not None:
                    assert epoch.resume_from is not None
                    await self.clock.aside(load_checkpoint, holding.state, epoch.resume_from, epoch.resume)
                desk.holdings[stage] = holding

    async def _take_layers(self, epoch: Epoch, slot: int) -> dict[int, Holding]:
        """The layers that this worker has in the new shape; others may need some that are here."""
        assert self.desk is not None
        began = self.clock.now()

        def told(layers: int) -> None:
            beat = letters.Beat(self.node, epoch.number, layers, self.clock.now() - began)
            self.transport.post(epoch.leader, encode(beat))

        give_layers(epoch, slot, self.desk, self.transport)
        taken = await take_layers(epoch, slot, self.desk, self.transport, self.clock, told)
        await self.clock.work(self.node, epoch.start, "moved")
        return taken

    async def _recover(self, executor: Executor, closing: Closing) -> None:
        """Complete the steps that were open when the last epoch ended."""
        recovery, slot, desk = executor.epoch.recovery, executor.slot, executor.desk
        for step in recovery.steps:
            executor.resend(step)
            executor.give_lacking(step)
        tasks = recovery.tasks(slot) if recovery.steps else []
        if slot in executor.epoch.leaving:
            for step in recovery.steps:
                await hand_over(executor, step, [task for task in tasks if task.step == step])
            return
        if executor.epoch.leaving:
            executor.inheritance = Inheritance(executor, lambda: self._inherited(executor.epoch))
        for step in recovery.steps:
            lacking = [h for h in desk.holdings.values() if h.version == step and h.stage in recovery.versions[slot]]
            run = {g: s for h in lacking if slot in recovery.runners[h.stage] for g, s in h.segments.items()}
            await executor.tasks(step, [task for task in tasks if task.step == step], run)
            for holding in lacking:
                for g in holding.segments:
                    if g not in desk.step(step).sums:
                        await executor.take(step, g)
            if lacking:
                await closing.close(step, lacking, recovery.needy(step))
            elif recovery.versions[slot]:
                await closing.tell(step, recovery.needy(step))
        self._report_closed(executor)

    def _tidy(self, executor: Executor) -> None:
        """Copies of stages that this worker has no part in any more go."""
        mine = {*executor.plan.stages_of(executor.slot)}
        mine |= {shadow.stage for shadow in executor.epoch.shadows if shadow.slot == executor.slot}
        if executor.slot in executor.epoch.leaving:
            return  # it is about to go, and until then all that it has may be asked for
        for stage in [stage for stage in executor.desk.holdings if stage not in mine]:
            del executor.desk.holdings[stage]
        if executor.shadows is not None:
            executor.shadows.drop_stale()

    async def _may_run(self, executor: Executor, step: int) -> bool:
        """Wait until the leader permits the step, or says that the run ends before it.

        Where a loss can be recovered from, no more than two steps are open: what is kept for them is bounded. Who waits
        for a commit alone brings copies as far as that commit needs them: with the sums of the step before they may
        wait for others, who need longer, and the commit would find this worker waiting there.
        """
        while True:
            self._news.clear()  # before looking: what comes while shadows catch up is looked at, too
            if self.finish is not None and step >= self.finish:
                return False
            permitted = step < self.permit and not self._drained(executor.epoch, step)
            if permitted and (not executor.epoch.kept or step <= self.committed + 1):
                return True
            await self._catch_up(executor, step - 1 if permitted else step)
            await self._news.wait()

    def _drained(self, epoch: Epoch, step: int) -> bool:
        """Whether a step is not to be begun in this epoch: the next one will have another shape."""
        number, before = self._drain
        return (number == epoch.number and step >= before) or (epoch.until is not None and step >= epoch.until)

    async def _step(self, executor: Executor, closing: Closing, step: int) -> None:
        await executor.step(step)
        start = self.clock.now()
        await self._catch_up(executor, step)
        held = [executor.desk.holdings[stage] for stage in executor.plan.stages_of(executor.slot)]
        await closing.close(step, held)
        now = self.clock.now()
        for g in executor.segments:
            executor.spans.append((step, f"{g}S", start, now))
        self._report_closed(executor)
        if not executor.epoch.kept:
            self._commit(step + 1)

    def _report_closed(self, executor: Executor) -> None:
        """Tell the leader of every step that all copies here have made: it needs nothing more from this worker."""
        level = executor.shadows.level if executor.shadows is not None else {}
        stages = [*executor.plan.stages_of(executor.slot), *level]
        made = min((executor.desk.holdings[stage].version for stage in stages), default=0)
        for step in sorted(executor.desk.steps):
            if self._reported(executor.epoch) <= step < made:
                self.transport.post(executor.epoch.leader, encode(self._report(executor, step)))
                self._told = executor.epoch.number, step + 1

    def _reported(self, epoch: Epoch) -> int:
        """Steps below this number have been reported in this epoch; whoever leads a new one hears of them again."""
        number, steps = self._told
        return max(steps if number == epoch.number else 0, self.committed)

    def _report(self, executor: Executor, step: int) -> letters.StepReport:
        open_step = executor.desk.steps[step]
        counts = [settled.counts for settled in open_step.settled.values()]
        last = open_step.settled.get(executor.plan.segments - 1)
        assert open_step.closed is not None
        return letters.StepReport(
            node=self.node,
            epoch=executor.epoch.number,
            step=step,
            at=self.clock.now(),
            counted=tuple(map(min, *counts)) if len(counts) > 1 else tuple(counts[0]),
            counted_most=tuple(map(max, *counts)) if len(counts) > 1 else tuple(counts[0]),
            loss_sum=last.loss_sum if last is not None else None,
            weight_sum=open_step.totals[1] if last is not None and open_step.totals is not None else None,
            norm=open_step.closed.norm,
            skipped=open_step.closed.skipped,
        )

    async def _after(self, executor: Executor, done: int) -> None:
        """What happens between two steps: evaluation and checkpoints, at the same places for everyone."""
        job, epoch = self.job, executor.epoch
        known = epoch.kept and done <= self.committed  # the evaluation was complete before the last epoch ended
        if job.evaluate_every and done % job.evaluate_every == 0 and not known:
            await self._catch_up(executor, done)
            parts = await executor.evaluate(done - 1)
            if parts:
                report = letters.EvaluationReport(self.node, done - 1, tuple(parts))
                self.transport.post(epoch.leader, encode(report))
            while epoch.kept and self.committed < done:  # a loss meanwhile is made good with these weights
                self._news.clear()
                await self._news.wait()
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
        snapshot = _share(executor).copy()
        self._saving = asyncio.create_task(self._write(epoch, done, snapshot, executor.slot))

    async def _saved(self) -> None:
        if self._saving is not None:
            with self._slowly():
                await asyncio.shield(self._saving)  # a halt ends this wait, not the write
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
            self.node,
            epoch.number,
            done,
            receipt.name,
            receipt.sha256,
            receipt.bytes,
            receipt.tensors,
            snapshot.scalars,
        )
        self.transport.post(epoch.leader, encode(report))

    def _final(self, executor: Executor) -> letters.Final:
        digests: dict[int, tuple[str, str]] = {}
        shadows = executor.shadows
        for stage in (*executor.plan.stages_of(executor.slot), *(shadows.level if shadows is not None else ())):
            state = executor.desk.holdings[stage].state
            digests |= state.digests(state.layers)
        return letters.Final(
            node=self.node,
            digests=digests,
            spans=tuple(executor.spans),
            kept_bytes=executor.desk.kept_peak,
            peak_tapes=executor.tapes_peak,
            peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            waited_s=executor.waited_s,
            eager=(shadows.eager_run, shadows.eager_due) if shadows is not None else (0, 0),
        )


def _share(executor: Executor) -> Snapshot:
    """What this worker saves: each layer is saved by one of those that run it, in turn."""
    found = Snapshot()
    for g, segment in executor.segments.items():
        runners = executor.runners(g)
        turn = runners.index(executor.slot)
        mine = [layer.index for layer in segment.layers if layer.index % len(runners) == turn]
        found.update(executor.desk.holdings[g % executor.plan.stages].state.snapshot(mine))
    return found


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
