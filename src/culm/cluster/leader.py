"""The leader: a coroutine on one of the nodes. It counts the steps, keeps the ledger and ends the run.

What it knows is its `tenure`; how one epoch follows another is `turnover`'s business, and `comings` and `silence` say
when.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from typing import TYPE_CHECKING, Any

import msgspec

from culm import errors
from culm.cluster.comings import Comings
from culm.cluster.setup import Result, decode_node, encode
from culm.cluster.silence import Doubt, Silence, Stall
from culm.cluster.store import Change
from culm.cluster.summary import begun, slot_label, speed, summarise
from culm.cluster.tenure import Tenure
from culm.cluster.turnover import Lull, Turnover
from culm.errors import CulmError, RunError
from culm.job import STOP
from culm.observe.folder import perfetto
from culm.runtime import epoch as letters
from culm.runtime.raised import RAISED
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.setup import Setup
    from culm.cluster.store import Store
    from culm.cluster.vigil import Vigil
    from culm.job import Job
    from culm.observe.ledger import CommittedStep
    from culm.runtime.clock import Clock
    from culm.transport.base import Transport


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
        vigil: Vigil,
        *,
        before: int | None = None,
    ) -> None:
        """`before`: who led last, and is gone."""
        self.inbox: asyncio.Queue[letters.Message | Change | CulmError | Doubt | Stall | Lull] = asyncio.Queue()
        self.tenure = Tenure(job, setup, node, transport, clock, store, vigil)
        self.turnover = Turnover(self.tenure, self.inbox.put_nowait)
        self.comings = Comings(self.turnover)
        self.silence = Silence(self.turnover, self.inbox.put_nowait)
        self._before = before

    async def run(self) -> None:
        """Until the result is in the store, whatever it is; one that is there already stays."""
        tenure = self.tenure
        for prefix in ("nodes/", "missing/", "wish/"):
            tenure.aside(self._watch(prefix))
        if tenure.setup.gate == "outside":
            tenure.aside(self._watch("gate/"))
        if tenure.setup.survives:
            tenure.aside(self.silence.watch_progress())
        try:
            result = await self._result()
            await tenure.minutes.written()
            await tenure.store.swap("result", None, encode(result))
        finally:
            await tenure.close()

    async def _result(self) -> Result:
        """How the run ended, with all that it leaves behind in its place."""
        tenure = self.tenure
        try:
            summary = await self._lead()
            await tenure.saves.tidy(tenure.folder.checkpoints or "")
            # Aside: of many nodes it takes longer than a lease, and whoever leads must go on being heard of meanwhile.
            await tenure.clock.aside(self._leave_behind, summary)
            if tenure.evacuated:
                raise tenure.all_left()
            return Result(summary=summary)
        except Exception as reason:
            error = reason if isinstance(reason, CulmError) else _unforeseen(reason)
        with contextlib.suppress(RunError):  # it may be the folder that failed
            tenure.event("failed", error=type(error).__name__, message=str(error))
            await tenure.sync()
        tenure.folder.close(sync=False)
        return Result(error=type(error).__name__, message=str(error), trace=error.trace)

    async def _lead(self) -> dict[str, Any]:
        await (self._take_over() if await self.tenure.inherit() else self._begin())
        while not self._ended():
            await self._heed(await self.inbox.get())
        return self._close()

    async def _begin(self) -> None:
        """The first epoch is still to come. Who led before it and is gone was one of those that the start waits for."""
        tenure, setup = self.tenure, self.tenure.setup
        tenure.folder.open()
        tenure.event("run_started", **begun(tenure.job, setup, tenure.timeouts))
        if setup.survives:
            tenure.minutes.give("record", tenure.record())  # so that its time goes on, whoever leads next
        if self._before is not None:
            await self.comings.lose([self._before])
        if setup.start >= setup.steps:
            tenure.finish = setup.start

    async def _take_over(self) -> None:
        """Somebody led before. Who is gone, is lost; and everyone has to hear who leads now."""
        tenure = self.tenure
        assert tenure.epoch is not None
        tenure.folder.open()
        tenure.event("leader", node=None, why="the node that led is gone: this one goes on from the store")
        lost = [member.node for member in tenure.roll.staying(tenure.epoch) if member.node not in tenure.roll.nodes]
        if lost:
            await self.comings.lose(lost)
        else:
            self.turnover.halt()

    def _ended(self) -> bool:
        tenure = self.tenure
        done = tenure.finish is not None and tenure.ledger.next_step >= tenure.finish
        if not done or tenure.epoch is None or self.turnover.halting is not None or tenure.saves:
            return False
        return tenure.roll.crew <= tenure.finals.keys()

    def _close(self) -> dict[str, Any]:
        """All is done: what it came to."""
        tenure, ledger = self.tenure, self.tenure.ledger
        finals = list(tenure.finals.values())
        started = tenure.began if tenure.first_step_at is None else tenure.first_step_at
        ended = tenure.clock.now() if ledger.last is None else ledger.last.at
        summary = {
            **summarise(tenure.job, tenure.asked, ledger, finals),
            **speed(ledger.samples, tenure.began, started, ended),
            "checkpoints": tenure.saves.complete,
            "preemptions": len(tenure.roll.gone),
            "recoveries": [msgspec.to_builtins(recovered) for recovered in tenure.toll.recoveries],
            "at_risk_s": tenure.toll.at_risk_s,
            "samples_redone": ledger.redone,
        }
        tenure.event("finished", steps=ledger.steps, samples=ledger.samples)
        return summary

    def _leave_behind(self, summary: dict[str, Any]) -> None:
        """The files of the run."""
        tenure = self.tenure
        assert tenure.epoch is not None
        tenure.folder.write("summary.json", summary)
        stages = Plan.from_text(tenure.epoch.plan).stages
        labels = {
            member.node: f"node {member.node}: {slot_label(slot, stages)}"
            for slot, member in enumerate(tenure.epoch.members)
            if member is not None
        }
        spans = {final.node: final.spans for final in tenure.finals.values()}
        tenure.folder.write("trace.json", perfetto(spans, labels))
        tenure.folder.sync()

    async def _watch(self, prefix: str) -> None:
        """Nodes come and go in the store; with the gate `outside` the launcher speaks there."""
        try:
            async for change in self.tenure.store.watch(prefix):
                self.inbox.put_nowait(change)
        except RunError as error:
            self.inbox.put_nowait(error)

    async def _heed(self, message: letters.Message | Change | CulmError | Doubt | Stall | Lull) -> None:
        match message:
            case CulmError():
                raise message
            case Change(key, value):
                await self._news(key, value)
            case Doubt():
                if not self.tenure.setup.survives:
                    raise _error(message.message)
                self.silence.resolve(message)
            case Stall():
                self.silence.wake(message)
            case Lull():
                await self.turnover.waited(message)
            case letters.Failed(kind="NodeLost"):
                self.silence.suspect(message)
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
                await self.turnover.report(message)
            case letters.Beat():
                self.silence.beat(message)
            case letters.Level():
                self.comings.level(message)
            case letters.Inherited():
                self.turnover.inherited(message)
            case letters.StepReport() | letters.EvaluationReport():
                for done in self.tenure.ledger.note(message) if self._current(message) else ():
                    await self._committed(done)
            case letters.ShardReport():
                await self._note_shard(message)
            case letters.Final():
                if self.turnover.halting is None:
                    self.tenure.finals[message.node] = message

    def _current(self, report: letters.StepReport | letters.EvaluationReport) -> bool:
        """What is said of an epoch that is being left is void: it will be said again in the next."""
        if self.turnover.halting is not None or report.node not in self.tenure.roll.crew:
            return False
        return isinstance(report, letters.EvaluationReport) or report.epoch == self.tenure.number

    async def _news(self, key: str, value: bytes | None) -> None:
        """A key of the store has changed."""
        name = key.rpartition("/")[2]
        if key == "wish/layout":
            if value is not None:  # whoever leads next shall not hear of it again
                self.turnover.growth.wish(value.decode(errors="replace"))
                await self.tenure.store.delete(key)
        elif key == "gate/finish":
            self.tenure.end_before(int(value or b"0"))
        elif key == "gate/permit":
            self.tenure.permit(int(value or b"0"))
        elif value is None or key.startswith("missing/"):
            await self.comings.lose([int(name)])
        else:
            await self.comings.joined(decode_node(value))

    def _note_ready(self, message: letters.Ready) -> None:
        tenure = self.tenure
        if message.epoch != tenure.number or self.turnover.halting is not None:
            return
        tenure.event("ready", node=message.node, seconds=message.seconds)
        tenure.roll.ready.add(message.node)
        if not tenure.roll.all_ready:
            return
        tenure.first_step_at = tenure.first_step_at or tenure.clock.now()
        self.turnover.all_ready()
        if tenure.finish is not None:
            tenure.end_before(tenure.finish)
        first = {"open": tenure.setup.steps, "hook": tenure.ledger.next_step + 1, "outside": 0}
        tenure.permit(first[tenure.setup.gate])

    async def _committed(self, done: CommittedStep) -> None:
        """A step is complete everywhere: write it down, ask the hook, let the next begin."""
        tenure, metrics = self.tenure, self._metrics(done)
        tenure.folder.step(**metrics)
        if done.skipped:
            tenure.event("skipped", step=done.step, why="the loss or a gradient is not finite")
        if done.evaluation is not None:
            tenure.event("evaluation", step=done.step, loss=done.evaluation)
        stopped = tenure.setup.gate == "hook" and self._hook(metrics) is STOP
        ends = stopped or done.step + 1 >= tenure.setup.steps
        if stopped:
            tenure.event("stopped", step=done.step, why="on_step returned STOP")
        tenure.finish = done.step + 1 if ends else tenure.finish
        await self._commit(done.step, metrics)
        if ends:
            tenure.end_before(done.step + 1)
        elif tenure.setup.gate == "hook":
            tenure.permit(done.step + 2)
        if tenure.setup.keeps:
            self.comings.grow()
        await self._save(done.step + 1)

    async def _commit(self, step: int, metrics: dict[str, Any]) -> None:
        """Everyone may let go of what it kept for a step, once whoever leads next would know that it is complete."""
        tenure = self.tenure
        if not tenure.setup.survives:
            await tenure.minute(metrics)
            return
        if self.turnover.calm:
            tenure.toll.committed()
        self.turnover.recovered(step)
        record = await tenure.minute(metrics)
        if self.turnover.calm and tenure.finish is None and not record:
            await self.turnover.growth.consider(step)
        await tenure.clock.work(tenure.node, step, "commit")
        tenure.tell(letters.Commit(step, tenure.number, record))

    def _metrics(self, done: CommittedStep) -> dict[str, Any]:
        extra = {"norm": done.norm, "eval_loss": done.evaluation}
        return {
            "step": done.step,
            "loss": done.loss,
            "samples": done.samples,
            "t": round(done.at - self.tenure.began, 6),
            **{name: value for name, value in extra.items() if value is not None},
        }

    def _hook(self, metrics: dict[str, Any]) -> object:
        on_step = self.tenure.job.on_step
        assert on_step is not None
        try:
            return on_step(metrics)
        except RAISED as error:
            raise errors.LayerFailed(f"Job.on_step raised {type(error).__name__}{errors.said(error)}") from error

    async def _note_shard(self, report: letters.ShardReport) -> None:
        self.tenure.saves.note(report)
        await self._save(self.tenure.ledger.next_step)

    async def _save(self, committed: int) -> None:
        """Make the checkpoint that nothing is missing of any more, if there is one; whoever leads next knows of the
        steps before `committed`."""
        tenure = self.tenure
        made = await tenure.saves.make(committed, tenure.folder.checkpoints or "")
        if made is not None:
            step, size = made
            tenure.event("checkpoint", step=step, bytes=size)
            await tenure.sync()
            if not tenure.setup.keeps:
                self.comings.grow()


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
