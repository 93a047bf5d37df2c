"""A leader's tenure: all that it knows of its run, and its ways to speak. Who leads next finds it in the store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from culm.cluster.minutes import Minutes
from culm.cluster.record import Record, decode_record
from culm.cluster.relayout import reshaped
from culm.cluster.roll import Roll
from culm.cluster.saves import Saves
from culm.cluster.setup import decode_node, encode
from culm.cluster.timeouts import derive
from culm.cluster.toll import Toll
from culm.errors import NodeLost, RunError
from culm.observe.folder import RunFolder
from culm.observe.ledger import Ledger
from culm.plan.ahead import Plans
from culm.runtime import epoch as letters
from culm.runtime.epoch import Epoch
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.setup import NodeRecord, Setup
    from culm.cluster.store import Store
    from culm.cluster.vigil import Vigil
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.transport.base import Transport


class Tenure:
    """What the parts of a leader share: the run's facts so far, the epoch, and letters, events, record and tasks."""

    def __init__(
        self, job: Job, setup: Setup, node: int, transport: Transport, clock: Clock, store: Store, vigil: Vigil
    ) -> None:
        self.job, self.setup, self.node = job, setup, node
        self.asked = setup
        """The setup that the run began with; `setup` is of the shape that it has now."""
        self.transport, self.clock, self.store, self.vigil = transport, clock, store, vigil
        self.timeouts = derive(setup.suspect_after)
        self.folder = RunFolder(setup.out, resumed_at=None if setup.resume is None else setup.start)
        self.ledger = Ledger(
            workers=setup.pipelines * setup.stages,
            micro_batch=job.micro_batch,
            evaluate_every=job.evaluate_every,
            evaluation_parts=setup.evaluation_parts,
            next_step=setup.start,
        )
        self.roll, self.toll, self.saves, self.plans = Roll(), Toll(clock), Saves(setup, clock), Plans()
        self.epoch: Epoch | None = None
        self.finals: dict[int, letters.Final] = {}
        """The last letters of the epoch's workers, by node."""
        self.finish: int | None = None
        """The step before which the run ends, once that is decided."""
        self.evacuated = False
        """Whether it ends there because every node has notice."""
        self.permitted = 0
        self.began = clock.now()
        self.relieved = asyncio.Event()
        """Set when this node has notice and nothing more to give."""
        self.first_step_at: float | None = None
        self.minutes = Minutes(store, self.timeouts.store_call)
        self._away = False
        """Whether the store was out of reach at the last commit."""
        self._unsettled = False
        """Whether somebody led before, and what was committed then is not known from all yet."""
        self._published: bytes | None = None
        """The epoch as it stands in the store."""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def number(self) -> int:
        """Of the epoch; 0 before the first."""
        return 0 if self.epoch is None else self.epoch.number

    def adopt(self, epoch: Epoch) -> None:
        """From now on this epoch holds: nothing that was reported in the one before counts in it, but for parts of a
        checkpoint."""
        self.epoch = epoch
        self.setup = reshaped(self.asked, epoch.shape)
        self.roll.muster(epoch, Plan.from_text(self.setup.plan))
        self.ledger.regroup(len(self.roll.crew))
        self.saves.begin(epoch, self.roll.savers, self.roll.gone)
        self.finals.clear()
        self.toll.begin()

    async def publish(self) -> None:
        """Put the epoch into the store, unless somebody else has meanwhile: then this leader was taken for dead, and
        is."""
        assert self.epoch is not None
        await self.minutes.written()  # so that what workers keep in its place is of this epoch alone
        body = letters.encode(self.epoch)
        if not await self.store.swap("epoch", self._published, body):
            raise RunError("another node leads this run: this one was taken for dead")
        self._published = body
        self._expect_signs(self.epoch)

    def _expect_signs(self, epoch: Epoch) -> None:
        self.vigil.expect(epoch.number, [member.node for member in epoch.alive], self.clock.now())

    async def inherit(self) -> bool:
        """Whether somebody led before: then go on from what the store knows."""
        epoch, record = await self.store.get("epoch"), await self.store.get("record")
        if epoch is None:
            if record is not None:
                self._remember(decode_record(record))
            return False
        found = letters.decode(epoch)
        assert isinstance(found, Epoch)
        self._published = epoch
        self.adopt(found)
        self._expect_signs(found)
        if record is not None:
            self._remember(decode_record(record))
        self.folder = RunFolder(self.setup.out, resumed_at=self.setup.steps)
        self._unsettled = True
        for member in found.alive:
            known = await self.store.get(f"nodes/{member.node}")
            if known is not None:
                self.roll.nodes[member.node] = decode_node(known)
        notices = {node: there.leaves_in for node, there in self.roll.nodes.items()}
        now = self.clock.now()
        self.roll.leaving = {node: now + seconds for node, seconds in notices.items() if seconds is not None}
        return True

    def learn(self, record: bytes) -> None:
        """A worker may know of steps that were committed while the store was out of reach. It forgets them in the next
        epoch, which is published when they are in the store."""
        found = decode_record(record)
        if found.next_step > self.ledger.next_step:
            self._remember(found)
            self.minutes.give("record", self.record())

    def settle(self) -> None:
        """All have said what they know of what was committed before this node led: lines of other steps go."""
        if self._unsettled:
            self.folder.rewind(self.ledger.next_step)
            self._unsettled = False

    def _remember(self, record: Record) -> None:
        ledger = self.ledger
        self.began, self.first_step_at = record.began, record.first_step_at
        ledger.next_step, ledger.steps, ledger.samples = record.next_step, record.steps, record.samples
        ledger.lost, ledger.duplicated, ledger.skipped = record.lost, record.duplicated, record.skipped
        ledger.redone, ledger.runs = record.redone, list(record.runs)
        ledger.last, ledger.evaluations = record.last, dict(record.evaluations)
        self.saves.complete = list(record.checkpoints)
        self.roll.gone |= set(record.gone)
        self.toll.inherit(record.recoveries, record.owed)
        self.toll.at_risk_s = record.at_risk_s
        self.vigil.slowest_s = max(self.vigil.slowest_s, record.slowest_s)
        self.finish = record.finish if record.next_step < self.setup.steps else record.next_step
        self.evacuated = record.evacuated

    async def write_record(self) -> None:
        """So that whoever leads next knows it too, however long it takes."""
        self.minutes.give("record", self.record())
        await self.minutes.written()

    async def minute(self, metrics: dict[str, Any]) -> bytes:
        """Write down a commit. Where a store is waited for in vain: what everyone has to keep in its place, so that
        whoever leads next hears of it from them."""
        record, lags = self.record(), self._away and self.minutes.behind
        if self.setup.survives:
            self.minutes.give("record", record)
        self.minutes.give("step", msgspec.msgpack.encode(metrics), each=True)
        if not self.setup.keeps:
            await self.minutes.written()
            return b""
        there = not lags and await self.minutes.patiently()
        if self._away is there:
            self._away = not there
            why = "commits are kept by the workers until it is back, and nodes neither come nor go"
            self.event("store_back") if there else self.event("store_away", why=why)
        return b"" if there else record

    def record(self) -> bytes:
        """What the run has come to, for whoever leads next."""
        ledger = self.ledger
        found = Record(
            began=self.began,
            first_step_at=self.first_step_at,
            next_step=ledger.next_step,
            steps=ledger.steps,
            samples=ledger.samples,
            lost=ledger.lost,
            duplicated=ledger.duplicated,
            skipped=ledger.skipped,
            redone=ledger.redone,
            runs=tuple(ledger.runs),
            last=ledger.last,
            evaluations=ledger.evaluations,
            checkpoints=tuple(self.saves.complete),
            gone=tuple(sorted(self.roll.gone)),
            recoveries=tuple(self.toll.recoveries),
            at_risk_s=self.toll.at_risk_s,
            owed=tuple(sorted(self.toll.owed)),
            finish=self.finish,
            evacuated=self.evacuated,
            slowest_s=self.vigil.slowest_s,
        )
        return encode(found)

    def tell(self, message: letters.Message) -> None:
        """A letter to every worker of the epoch."""
        body = letters.encode(message)
        for member in self.epoch.alive if self.epoch is not None else ():
            self.transport.post(member.address, body)

    def end_before(self, step: int) -> None:
        self.finish = step
        self.tell(letters.Finish(step))

    def permit(self, until: int) -> None:
        """Let steps below a number begin; workers that are not there yet hear of it when all are ready."""
        self.permitted = max(self.permitted, until)
        self.tell(letters.Permit(self.permitted))

    def event(self, kind: str, node: int | None = None, **fields: Any) -> None:
        self.folder.event(t=round(self.clock.now() - self.began, 6), kind=kind, node=node, **fields)

    def aside(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def let_go(self, record: NodeRecord) -> None:
        """A node with notice has nothing more to give."""
        self.roll.leaving.pop(record.node, None)
        self.roll.gone.add(record.node)
        self.event("left", node=record.node, step=self.ledger.next_step)
        if record.node == self.node:
            self.aside(self._step_down())
        else:
            self.transport.post(record.agent, letters.encode(letters.Stop("it has notice and may go")))

    async def _step_down(self) -> None:
        """This node goes: whoever leads next finds all that there is to know in the store."""
        await self.write_record()
        with contextlib.suppress(RunError):
            await self.sync()
        self.relieved.set()

    async def sync(self) -> None:
        """Put what has happened into the run's folder, if that is a URL, while this node leads: one that was taken for
        dead would write over what the next knows. Raises RunError if that fails."""
        if self.folder.behind and await self._heard():
            await self.clock.aside(self.folder.sync)

    async def _heard(self) -> bool:
        """Whether the store takes something from this node. Of one that was taken for dead it takes nothing."""
        with contextlib.suppress(RunError, TimeoutError):
            async with asyncio.timeout(self.timeouts.store_call):
                await self.store.put("lines", str(self.node).encode())
            return True
        return False

    async def close(self) -> None:
        """End what runs aside. A run that failed has nobody to complain to."""
        with contextlib.suppress(RunError):
            await self.sync()
        self.folder.close(sync=False)
        await self.minutes.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lost(self, node: int) -> NodeLost:
        """What there is to say when a node is gone."""
        saved = self._saved()
        return NodeLost(
            f"node {node} vanished in step {self.ledger.next_step} and nobody else holds its layers (strategy "
            f"{self.setup.strategy}): " + (f"resume it with --resume {saved}" if saved else "it had no checkpoint yet")
        )

    def all_left(self) -> NodeLost:
        """What there is to say when every node had notice, and the run could not be completed."""
        saved = f"resume it with --resume {self._saved()}" if self._saved() else "nothing of it was saved"
        return NodeLost(f"every node has notice: the run ended before step {self.ledger.next_step}; {saved}")

    def _saved(self) -> str | None:
        """Where the newest checkpoint lies, of this run or of the one that it went on from."""
        return self.setup.out if self.saves.complete else (self.setup.resume_from or "").removesuffix("/checkpoints")
