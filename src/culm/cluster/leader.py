"""The leader: a coroutine on one of the nodes. It makes the epoch, keeps the ledger and ends the run."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import statistics
import time
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from culm import errors
from culm.checkpoint import Catalog, ShardReceipt, Storage
from culm.cluster.record import Record, decode_record
from culm.cluster.recovered import Recovered
from culm.cluster.regroup import Regrouped, first_shadows, homeless, protected, regroup, restart, seats, world_of
from culm.cluster.setup import NodeRecord, Result, Setup, decode_node, encode
from culm.cluster.store import Change
from culm.cluster.summary import slot_label, speed, summarise
from culm.cluster.timeouts import derive
from culm.errors import CheckpointError, CulmError, NodeLost, RunError
from culm.job import STOP
from culm.observe.folder import RunFolder, perfetto
from culm.observe.ledger import CommittedStep, Ledger
from culm.plan.ahead import Plans
from culm.plan.layout import ahead
from culm.plan.lineage import Standing
from culm.runtime import epoch as letters
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.store import Store
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.transport.base import Transport


@dataclass
class _Doubt:
    """Somebody missed somebody in an epoch, some time ago."""

    epoch: int
    message: letters.Failed


@dataclass
class _Stall:
    """Nothing has moved in an epoch for too long."""

    epoch: int


@dataclass
class _Halting:
    """An epoch that is being left."""

    number: int
    lost: set[int]
    expected: set[int]
    began: float
    detect_s: float
    """What it took to find out."""
    standings: dict[int, Standing] = field(default_factory=dict)


@dataclass
class _Recovering:
    """An epoch whose open steps are being completed."""

    halting: _Halting
    decided_at: float
    made: Regrouped
    ready_at: float | None = None


class Leader:
    """Leads one run from the first node to the summary. Everything it decides goes through the store or a letter.

    All it hears, from the store, from workers and from its own agent, goes through one inbox: it does one thing at a
    time, and whatever goes wrong ends in the one result of the run.
    """

    def __init__(
        self,
        job: Job,
        setup: Setup,
        node: int,
        transport: Transport,
        clock: Clock,
        store: Store,
        *,
        heir: bool = False,
        relieved: asyncio.Event | None = None,
    ) -> None:
        self.job, self.setup, self.node, self.heir = job, setup, node, heir
        self.relieved = relieved or asyncio.Event()
        """Set when the node that leads has nothing more to give and may go."""
        self.transport, self.clock, self.store = transport, clock, store
        self.inbox: asyncio.Queue[letters.Message | Change | CulmError | _Doubt | _Stall] = asyncio.Queue()
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
        self.gone: set[int] = set()
        """Nodes that were lost, or have gone after a notice."""
        self.leaving: set[int] = set()
        """Members that have notice and are still there."""
        self.recoveries: list[Recovered] = []
        self._pace: collections.deque[float] = collections.deque(maxlen=32)
        self._before_loss: float | None = None
        """When the last step was committed that no loss had disturbed."""
        self.timeouts = derive(setup.suspect_after)
        self._beats: dict[int, int] = {}
        self._slowest_s = max((part for costs in setup.costs for part in costs), default=0.0)
        self.at_risk_s = 0.0
        self._risk_since: float | None = None
        self.plans = Plans()
        self._first_sign: float | None = None
        """When somebody missed somebody, since the epoch began."""
        self._published: bytes | None = None
        """The epoch as it stands in the store."""
        self._halting: _Halting | None = None
        self._recovering: _Recovering | None = None
        self.finals: dict[int, letters.Final] = {}
        self.saves: dict[int, dict[int, letters.ShardReport]] = {}
        """Checkpoints of this epoch that are being written: by step, the parts that lie on storage."""
        self.checkpoints: list[int] = []
        self.began = clock.now()
        self.first_step_at: float | None = None
        self._ready: set[int] = set()
        self._crew: set[int] = set()
        """The nodes that every step waits for: all members but newcomers that are not level yet."""
        self._arrived: set[int] = set()
        """Newcomers that are level."""
        self._savers: set[int] = set()
        """The nodes that have a part of every checkpoint."""
        self._finish: int | None = None
        self._evacuated = False
        """Whether the run ends because every node has notice."""
        self._permitted = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Until the result is in the store, whatever it is; one that is there already stays."""
        self._aside(self._watch("nodes/"))
        if self.setup.gate == "outside":
            self._aside(self._watch("gate/"))
        if self.setup.strategy != "none":
            self._aside(self._watch_progress())
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
            if self._evacuated:
                raise self._all_left()
            return Result(summary=summary)
        except Exception as reason:
            error = reason if isinstance(reason, CulmError) else _unforeseen(reason)
        with contextlib.suppress(RunError):  # it may be the folder that failed
            self._event("failed", error=type(error).__name__, message=str(error))
        self.folder.close()
        return Result(error=type(error).__name__, message=str(error), trace=error.trace)

    async def _lead(self) -> dict[str, Any]:
        if not await self._take_over():
            self.folder.open()
            self._event("run_started", nodes=self.setup.nodes, why=self.setup.why, steps=self.setup.steps)
            if self.setup.start >= self.setup.steps:
                self._finish = self.setup.start
        while not self._ended():
            await self._heed(await self.inbox.get())
        return self._leave()

    async def _take_over(self) -> bool:
        """Whether somebody led before: then go on from what the store knows. Who is gone, is lost."""
        epoch, record = await self.store.get("epoch"), await self.store.get("record")
        if epoch is None and self.heir:
            raise NodeLost("the node that led vanished before the first step: start the run again")
        if epoch is None:
            return False
        found = letters.decode(epoch)
        assert isinstance(found, Epoch)
        self.epoch, self._published = found, epoch
        self._muster(found)
        if record is not None:
            self._remember(decode_record(record))
        self.folder = RunFolder(self.setup.out, resumed_at=self.ledger.next_step)
        self.folder.open()
        self._event("leader", node=None, why="the node that led is gone: this one goes on from the store")
        for member in self.epoch.alive:
            known = await self.store.get(f"nodes/{member.node}")
            if known is not None:
                self.nodes[member.node] = decode_node(known)
        self.leaving = {node for node, record in self.nodes.items() if record.leaves_in is not None}
        lost = [m.node for m in self.epoch.alive if m.node not in self.nodes and m.node not in self.gone]
        await (self._lose(lost) if lost else self._halt([]))  # everyone has to hear who leads now
        return True

    def _muster(self, epoch: Epoch) -> None:
        """Who has to report what in an epoch: who runs something, or keeps a copy that counts."""
        plan = Plan.from_text(epoch.plan)
        level = {shadow.slot for shadow in epoch.shadows if not shadow.fresh}
        members = {slot: member.node for slot, member in enumerate(epoch.members) if member is not None}
        self._savers = {node for slot, node in members.items() if plan.stages_of(slot)}
        self._crew = self._savers | {node for slot, node in members.items() if slot in level}
        self._arrived.clear()
        self.ledger.regroup(len(self._crew))

    def _remember(self, record: Record) -> None:
        ledger = self.ledger
        self.began, self.first_step_at = record.began, record.first_step_at
        ledger.next_step, ledger.steps, ledger.samples = record.next_step, record.steps, record.samples
        ledger.lost, ledger.duplicated, ledger.skipped = record.lost, record.duplicated, record.skipped
        ledger.last, ledger.evaluations = record.last, dict(record.evaluations)
        self.checkpoints, self.gone = list(record.checkpoints), set(record.gone)
        self.recoveries, self.at_risk_s = list(record.recoveries), record.at_risk_s
        self._finish = record.finish if record.next_step < self.setup.steps else record.next_step

    async def _write_record(self) -> None:
        """So that whoever leads next knows it too."""
        ledger = self.ledger
        record = Record(
            began=self.began,
            first_step_at=self.first_step_at,
            next_step=ledger.next_step,
            steps=ledger.steps,
            samples=ledger.samples,
            lost=ledger.lost,
            duplicated=ledger.duplicated,
            skipped=ledger.skipped,
            last=ledger.last,
            evaluations=ledger.evaluations,
            checkpoints=tuple(self.checkpoints),
            gone=tuple(sorted(self.gone)),
            recoveries=tuple(self.recoveries),
            at_risk_s=self.at_risk_s,
            finish=self._finish,
        )
        await self.store.put("record", encode(record))

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
            "preemptions": len(self.gone),
            "recoveries": [msgspec.to_builtins(recovered) for recovered in self.recoveries],
            "at_risk_s": self.at_risk_s,
        }
        self._event("finished", steps=ledger.steps, samples=ledger.samples)
        self.folder.write("summary.json", summary)
        labels = {
            m.node: f"node {m.node}: {slot_label(slot, setup.stages)}"
            for slot, m in enumerate(self.epoch.members)
            if m is not None
        }
        self.folder.write("trace.json", perfetto({f.node: f.spans for f in finals}, labels))
        return summary

    def _all_left(self) -> NodeLost:
        """What there is to say when every node had notice, and the run could not be completed."""
        saved = f"resume it with --resume {self.setup.out}" if self.setup.out else "nothing of it was saved (no --out)"
        return NodeLost(f"every node has notice: the run ended before step {self.ledger.next_step}; {saved}")

    def _ended(self) -> bool:
        done = self._finish is not None and self.ledger.next_step >= self._finish
        if not done or self.epoch is None or self._halting is not None or self.saves:
            return False
        return self._crew <= self.finals.keys()

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _watch(self, prefix: str) -> None:
        """Nodes come and go in the store; with the gate `outside` the launcher speaks there."""
        try:
            async for change in self.store.watch(prefix):
                self.inbox.put_nowait(change)
        except RunError as error:
            self.inbox.put_nowait(error)

    async def _heed(self, message: letters.Message | Change | CulmError | _Doubt | _Stall) -> None:
        match message:
            case CulmError():
                raise message
            case Change(key, value):
                await self._news(key, value)
            case _Doubt():
                await self._resolve(message)
            case _Stall():
                await self._wake(message)
            case letters.Failed(kind="NodeLost"):
                self._suspect(message)
            case letters.Failed():
                raise _error(message)
            case _:
                await self._hear(message)

    async def _hear(self, message: letters.Message) -> None:
        """What a worker says of its work."""
        match message:
            case letters.Ready():
                self._note_ready(message)
            case letters.Report():
                await self._note_standing(message)
            case letters.Beat():
                self._note_beat(message)
            case letters.Level():
                await self._note_level(message)
            case letters.StepReport() | letters.EvaluationReport():
                for done in self.ledger.note(message) if self._current(message) else ():
                    await self._committed(done)
            case letters.ShardReport():
                await self._note_shard(message)
            case letters.Final():
                if self._halting is None:
                    self.finals[message.node] = message

    def _current(self, report: letters.StepReport | letters.EvaluationReport) -> bool:
        """What is said of an epoch that is being left is void: it will be said again in the next."""
        number = self.epoch.number if self.epoch is not None else 0
        if self._halting is not None or report.node not in self._crew:
            return False
        return isinstance(report, letters.EvaluationReport) or report.epoch == number

    async def _news(self, key: str, value: bytes | None) -> None:
        """A key of the store has changed."""
        name = key.rpartition("/")[2]
        if key == "gate/finish":
            self._end_before(int(value or b"0"))
        elif key == "gate/permit":
            self._permit(int(value or b"0"))
        elif value is None:
            await self._lose([int(name)])
        else:
            await self._joined(decode_node(value))

    async def _lose(self, nodes: list[int]) -> None:
        """Nodes are gone for good. What they ran and held, others run and hold from now on."""
        members = [member.node for member in self.epoch.alive] if self.epoch is not None else []
        mourned = [node for node in nodes if node in members and node not in self.gone]
        for node in nodes:
            self.nodes.pop(node, None)
        self.leaving.difference_update(nodes)
        if self.setup.strategy == "none" or self.epoch is None:
            missed = mourned if self.epoch is not None else [node for node in nodes if node not in self.gone]
            if missed:
                raise self.lost(missed[0])
            return
        for node in mourned:
            self._event("lost", node=node, step=self.ledger.next_step)
        self.gone |= set(mourned)
        if mourned:
            await self._write_record()
            await self._halt(mourned)

    async def _watch_progress(self) -> None:
        """Nothing moves any more, and nobody is gone: something got lost on the way. Then all is sent again."""
        seen: object = None
        while True:
            await self.clock.sleep(self.timeouts.progress + 5 * self._slowest_s)
            number = self.epoch.number if self.epoch is not None else 0
            counts = (self.ledger.next_step, len(self._ready), len(self.finals), len(self.saves))
            mark = (number, self._halting, dict(self._beats), counts)
            if mark == seen:
                self.inbox.put_nowait(_Stall(number))
            seen = mark

    async def _wake(self, stall: _Stall) -> None:
        if self.epoch is None or stall.epoch != self.epoch.number:
            return
        if self._halting is not None:
            self._tell_halt(self._halting)
        elif not self._waits_for_permission():
            self._event(
                "stalled", step=self.ledger.next_step, why="nothing moves and nobody is gone: all is sent again"
            )
            await self._halt([])

    def _waits_for_permission(self) -> bool:
        """Whether it is the user's turn: a hook or a launcher has to let the next step begin."""
        ready = self.epoch is not None and self._crew <= self._ready
        return ready and self._finish is None and self._permitted <= self.ledger.next_step

    def _tell_halt(self, halting: _Halting) -> None:
        assert self.epoch is not None
        body = letters.encode(letters.Halt(halting.number, self.transport.address))
        for member in self.epoch.alive:
            if member.node in halting.expected and member.node not in halting.standings:
                self.transport.post(member.address, body)

    async def _halt(self, lost: list[int]) -> None:
        """Let everyone who is left leave the epoch and report. A further loss meanwhile starts this over."""
        assert self.epoch is not None
        before = self._halting
        number = 1 + (before.number if before is not None else self.epoch.number)
        gone = {*lost, *(before.lost if before is not None else ())}
        left = [member for member in self.epoch.alive if member.node not in gone and member.node not in self.gone]
        began = before.began if before is not None else self.clock.now()
        detect_s = max(before.detect_s if before is not None else 0.0, self._took_to_detect(lost))
        self._halting = _Halting(number, gone, {member.node for member in left}, began, detect_s)
        self._tell_halt(self._halting)
        if not left:
            raise self.lost(min({*gone, *self.gone}))

    def _took_to_detect(self, lost: list[int]) -> float:
        """Since the blow, where one was struck on purpose; else since the first sign that somebody was missed."""
        now = self.clock.now()
        blows = [at for at in map(self.clock.struck_at, lost) if at is not None]
        since = min(blows, default=now if self._first_sign is None else self._first_sign)
        return now - since

    async def _note_standing(self, report: letters.Report) -> None:
        halting = self._halting
        if halting is None or report.epoch < halting.number:
            return
        if report.epoch > halting.number:  # somebody who led before was further: begin above that
            halting.number = report.epoch
            await self._halt([])
            return
        halting.standings[report.node] = report.standing
        if halting.standings.keys() == halting.expected:
            await self._regroup(halting)

    async def _regroup(self, halting: _Halting) -> None:
        """All have reported: decide how the open steps are completed, and who does what from now on."""
        assert self.epoch is not None
        old = self.epoch
        slots = {member.node: slot for slot, member in enumerate(old.members) if member is not None}
        standings = {slots[node]: standing for node, standing in halting.standings.items()}
        committed = self.ledger.next_step
        ready_made = self.plans.hits
        number, address = halting.number, self.transport.address
        come = seats(self.setup, old, standings, committed, self._waiting())
        leaving = [slots[node] for node in self.leaving if node in halting.standings]
        stay = standings.keys() - set(leaving) or standings.keys()
        if self._nothing_learned(standings):
            setup = self.setup
            made = restart(setup, old, number, address, stay, setup.start, setup.resume_from, come)
        elif homeless(self.setup, standings, committed):
            step, saved = await self._newest(halting)
            made = restart(self.setup, old, number, address, stay, step, saved, come)
            self.ledger.rewind(step)
            self.folder.rewind(step)
        else:
            made = regroup(
                self.setup,
                old,
                number,
                address,
                standings,
                committed,
                plans=self.plans,
                moving=self._moving(standings),
                arrivals=come,
                leaving=leaving,
            )
        self._halting = None
        self._recovering = _Recovering(halting, self.clock.now(), made)
        self._first_sign = None
        self.epoch = made.epoch
        self._muster(made.epoch)
        self.checkpoints = [step for step in self.checkpoints if step <= made.epoch.start]
        self.finals.clear()
        self.saves.clear()
        self._ready.clear()
        self._beats.clear()
        self._note_risk()
        self._event(
            "epoch",
            number=made.epoch.number,
            members=[member.node for member in made.epoch.alive],
            step=made.epoch.start,
            open_steps=made.epoch.recovery.steps,
            planned_ahead=self.plans.hits > ready_made,
            why=made.why,
        )
        await self._put_epoch(made.epoch)
        self._aside(self._plan_ahead(standings, committed, old))

    async def _plan_ahead(self, standings: Mapping[int, Standing], committed: int, old: Epoch | None) -> None:
        """Plans for whoever may be lost next, one at a time and aside: when it happens they are there."""
        made = ahead(world_of(self.setup, standings, committed, old, self.plans))
        while await self.clock.aside(next, made, None) is not None:
            pass

    def _nothing_learned(self, standings: Mapping[int, Standing]) -> bool:
        """Whether no weight has moved since the run began: then anybody can build any layer, as it was."""
        versions = [version for standing in standings.values() for version in standing.versions.values()]
        return max(versions, default=self.setup.start) == self.setup.start

    async def _newest(self, halting: _Halting) -> tuple[int, str]:
        """The newest good checkpoint, of this run or the one that it went on from. Raises NodeLost if there is none."""
        for folder in (self.folder.checkpoints, self.setup.resume_from):
            if folder is not None:
                with contextlib.suppress(CheckpointError):
                    found = await self.clock.aside(Catalog(Storage(folder)).newest)
                    return found.manifest.step, folder
        raise self.lost(min(halting.lost))

    async def _put_epoch(self, epoch: Epoch) -> None:
        """Publish, unless somebody else has meanwhile: then this leader has been taken for dead, and is."""
        body = letters.encode(epoch)
        if not await self.store.swap("epoch", self._published, body):
            raise RunError("another node leads this run: this one was taken for dead")
        self._published = body

    def _note_risk(self) -> None:
        """Time at risk: while a layer has one holder alone, its loss would cost more than a pause."""
        at_risk = self.epoch is not None and not protected(self.epoch)
        now = self.clock.now()
        if self._risk_since is not None:
            self.at_risk_s += now - self._risk_since
        self._risk_since = now if at_risk else None

    async def _note_level(self, message: letters.Level) -> None:
        """A new copy is complete: the layer has two holders again."""
        if self.epoch is None or message.epoch != self.epoch.number:
            return
        shadows = tuple(
            msgspec.structs.replace(shadow, fresh=False)
            if shadow.stage == message.stage and self.epoch.slot_of(message.node) == shadow.slot
            else shadow
            for shadow in self.epoch.shadows
        )
        self.epoch = msgspec.structs.replace(self.epoch, shadows=shadows)
        self._note_risk()
        self._event("protected", node=message.node, stage=message.stage)
        if message.node not in self._crew:  # it takes its place at the next commit, which waits for it already
            self._crew.add(message.node)
            self._arrived.add(message.node)
            self.ledger.workers = len(self._crew)
        elif self._halting is None and (self.leaving or any(shadow.moves and not shadow.fresh for shadow in shadows)):
            await self._halt([])  # its copy is complete: it can move, and whoever had to wait for it can go

    def _waiting(self) -> list[Member]:
        """The nodes that could come in and have no slot, in the order of their numbers."""
        assert self.epoch is not None
        known = [record for record in self.nodes.values() if record.leaves_in is None and record.node not in self.gone]
        idle = [record for record in known if self.epoch.slot_of(record.node) is None]
        return [Member(record.node, record.worker) for record in sorted(idle, key=lambda record: record.node)]

    async def _grow(self) -> None:
        """At a commit: whoever waits comes in, and whoever has caught up takes its place, all in one new epoch."""
        assert self.epoch is not None
        if self._finish is not None or self._halting is not None or self._recovering is not None:
            return
        empty = [member for member in self.epoch.members if member is None or member.node in self.gone]
        room = bool(empty and self._waiting())
        if room or self._arrived:
            await self._halt([])

    def _moving(self, standings: Mapping[int, Standing]) -> list[int]:
        """The slots whose workers have a complete copy of the stage that they are to move to."""
        assert self.epoch is not None
        ready = [shadow for shadow in self.epoch.shadows if shadow.moves and not shadow.fresh]
        return [shadow.slot for shadow in ready if shadow.stage in standings.get(shadow.slot, Standing()).versions]

    def _note_beat(self, beat: letters.Beat) -> None:
        if self.epoch is not None and beat.epoch == self.epoch.number:
            self._beats[beat.node] = beat.done
            self._slowest_s = max(self._slowest_s, beat.slowest_s)

    def _late(self, steps: int) -> float:
        """How many seconds later than usual the last steps were committed."""
        if not self._pace or self._before_loss is None:
            return 0.0
        return self.clock.now() - self._before_loss - steps * statistics.median(self._pace)

    def _note_pace(self) -> None:
        """How long a step takes, while nothing goes wrong."""
        now = self.clock.now()
        if self._halting is None and self._recovering is None:
            if self._before_loss is not None:
                self._pace.append(now - self._before_loss)
            self._before_loss = now

    def _note_recovered(self, step: int) -> None:
        """The last of the steps that were open is committed: the loss is made good."""
        recovering = self._recovering
        if recovering is None or step < recovering.made.epoch.start - 1:
            return
        self._recovering = None
        halting, epoch = recovering.halting, recovering.made.epoch
        relieved = self._relieve()
        if not halting.lost and not relieved:
            return
        decide = recovering.decided_at - halting.began
        move = (recovering.ready_at or self.clock.now()) - recovering.decided_at
        recovered = Recovered(
            step=max(epoch.committed, epoch.start - 1),
            lost=tuple(sorted({*halting.lost, *relieved})),
            detect_ms=1e3 * halting.detect_s,
            decide_ms=1e3 * decide,
            move_ms=1e3 * move,
            redo_ms=1e3 * max(0.0, self._late(len(epoch.recovery.steps)) - halting.detect_s - decide - move),
            redone_actions=epoch.recovery.redone,
            source=recovering.made.source if halting.lost else "notice",
        )
        self.recoveries.append(recovered)
        self._event("recovered", **msgspec.to_builtins(recovered))

    async def _joined(self, record: NodeRecord) -> None:
        """An agent is up, and then its worker; when all are, the epoch begins."""
        if not record.worker:
            return
        if record.leaves_in is not None:
            await self._drain(record, record.leaves_in)
            return
        if self.epoch is not None and self._differs(record):
            return
        self.nodes[record.node] = record
        self._event("node_joined", node=record.node)
        if len(self.nodes) == self.setup.nodes and self.epoch is None:
            await self._publish()

    async def _drain(self, record: NodeRecord, seconds: float) -> None:
        """A node has notice: the others go on without it before it goes. Who leaves when the run ends anyway, stays."""
        node, epoch = record.node, self.epoch
        self._event("notice", node=node, seconds=seconds)
        if epoch is None or epoch.slot_of(node) is None:  # the run begins, or goes on, without it
            self.nodes.pop(node, None)
            self._let_go(record)
            return
        self.nodes[node] = record
        if epoch.kept and self._finish is None:
            self.leaving.add(node)
            if self.leaving >= {member.node for member in epoch.alive if member.node not in self.gone}:
                self._evacuate()
            elif self._halting is None:
                await self._halt([])

    def _evacuate(self) -> None:
        """Everybody has notice: end after the steps that are open, with a checkpoint if there is a place for it."""
        self._evacuated = True
        self.leaving.clear()
        self._end_before(min(self.ledger.next_step + 2, self.setup.steps))

    def _relieve(self) -> list[int]:
        """The steps that were open are complete: whoever has notice has nothing more to give, and may go."""
        assert self.epoch is not None
        members = [self.epoch.members[slot] for slot in self.epoch.leaving]
        nodes = [member.node for member in members if member is not None and member.node in self.leaving]
        for node in nodes:
            self._let_go(self.nodes[node])
        return nodes

    def _let_go(self, record: NodeRecord) -> None:
        self.leaving.discard(record.node)
        self.gone.add(record.node)
        self._event("left", node=record.node, step=self.ledger.next_step)
        if record.node == self.node:
            self._aside(self._step_down())
        else:
            self.transport.post(record.agent, letters.encode(letters.Stop("it has notice and may go")))

    async def _step_down(self) -> None:
        """This node goes: whoever leads next finds all that there is to know in the store."""
        await self._write_record()
        self.relieved.set()

    def _differs(self, record: NodeRecord) -> bool:
        """Whether a node computes otherwise than those that train: then it is left out, and they are not disturbed."""
        assert self.epoch is not None
        others = {other.fingerprint for other in self.nodes.values()}
        if not self.job.exact or self.epoch.slot_of(record.node) is not None or others <= {record.fingerprint}:
            return False
        why = f"it is {record.fingerprint}, the others {'; '.join(sorted(others))}: exact results need one kind"
        self._event("refused", node=record.node, why=why)
        return True

    def lost(self, node: int) -> NodeLost:
        """What there is to say when a node is gone."""
        saved = self.setup.out if self.checkpoints else (self.setup.resume_from or "").removesuffix("/checkpoints")
        return NodeLost(
            f"node {node} vanished in step {self.ledger.next_step} and nobody else holds its layers (strategy "
            f"{self.setup.strategy}): " + (f"resume it with --resume {saved}" if saved else "it had no checkpoint yet")
        )

    def _suspect(self, message: letters.Failed) -> None:
        """A worker misses another one. Who is gone the store knows, in a moment. If nobody is, a connection broke:
        what was lost with it is sent again in a new epoch or, where nothing is kept, the run ends."""
        self._event("suspected", node=message.node, why=message.message)
        self._first_sign = self._first_sign or self.clock.now()
        number = self.epoch.number if self.epoch is not None else 0

        async def believe() -> None:
            await self.clock.sleep(self.timeouts.doubt)
            self.inbox.put_nowait(_Doubt(number, message))

        self._aside(believe())

    async def _resolve(self, doubt: _Doubt) -> None:
        if self.setup.strategy == "none":
            raise _error(doubt.message)
        if self.epoch is not None and self.epoch.number == doubt.epoch and self._halting is None:
            await self._halt([])

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
            shadows=first_shadows(setup),
            eager=setup.eager,
            beat_s=self.timeouts.beat if setup.strategy != "none" else 0.0,
            committed=setup.start,
        )
        self._muster(self.epoch)
        self._event("epoch", number=1, members=[m.node for m in self.epoch.alive], segments=setup.segments)
        await self._put_epoch(self.epoch)
        if setup.strategy != "none":
            stages = range(setup.pipelines * setup.stages)
            full = {slot: Standing(versions={slot % setup.stages: setup.start}) for slot in stages}
            self._aside(self._plan_ahead(full, setup.start, None))

    def _note_ready(self, message: letters.Ready) -> None:
        if self.epoch is None or message.epoch != self.epoch.number or self._halting is not None:
            return
        self._event("ready", node=message.node, seconds=message.seconds)
        self._ready.add(message.node)
        if not self._crew <= self._ready:
            return
        self.first_step_at = self.first_step_at or self.clock.now()
        if self._recovering is not None:
            self._recovering.ready_at = self.clock.now()
            if not self.epoch.recovery.steps:
                self._note_recovered(self.epoch.start)
        if self._finish is not None:
            self._end_before(self._finish)
        self._permit({"open": self.setup.steps, "hook": self.ledger.next_step + 1, "outside": 0}[self.setup.gate])

    async def _committed(self, done: CommittedStep) -> None:
        """A step is complete everywhere: write it down, ask the hook, let the next begin."""
        metrics = self._metrics(done)
        self.folder.step(**metrics)
        if done.skipped:
            self._event("skipped", step=done.step, why="the loss or a gradient is not finite")
        if done.evaluation is not None:
            self._event("evaluation", step=done.step, loss=done.evaluation)
        stopped = self.setup.gate == "hook" and self._hook(metrics) is STOP
        ends = stopped or done.step + 1 >= self.setup.steps
        if stopped:
            self._event("stopped", step=done.step, why="on_step returned STOP")
        self._finish = done.step + 1 if ends else self._finish
        if self.epoch is not None and self.epoch.kept:
            self._note_pace()
            self._note_recovered(done.step)
            await self._write_record()
            await self.clock.work(self.node, done.step, "commit")
            self._tell(letters.Commit(done.step))
        await self.store.put("step", msgspec.msgpack.encode(metrics))
        if ends:
            self._end_before(done.step + 1)
        elif self.setup.gate == "hook":
            self._permit(done.step + 2)
        if self.epoch is not None and self.epoch.kept:
            await self._grow()

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
        if self.epoch is None or report.epoch != self.epoch.number:
            return  # it was begun in an epoch that has ended: what is missing of it will never come
        parts = self.saves.setdefault(report.step, {})
        parts[report.node] = report
        if not self._savers <= parts.keys():
            return
        catalog = Catalog(Storage(self.folder.checkpoints or ""))
        receipts = [ShardReceipt(r.name, r.sha256, r.size, r.tensors) for r in parts.values()]
        scalars = {name: value for r in parts.values() for name, value in r.scalars.items()}
        await self.clock.aside(catalog.commit, report.step, receipts, scalars, self.setup.facts, time.time())
        await self.clock.aside(catalog.prune, self.setup.keep_last, verify="sizes")
        del self.saves[report.step]
        self.checkpoints.append(report.step)
        self._event("checkpoint", step=report.step, bytes=sum(r.size for r in parts.values()))
        await self.clock.aside(self.folder.sync)

    def _tell(self, message: letters.Message) -> None:
        body = letters.encode(message)
        for member in self.epoch.alive if self.epoch is not None else ():
            if member.node not in self.gone:
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
