"""A stint: the work of one worker under one epoch. What was open is completed; then steps are run, reported and saved
until the run ends or another epoch begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.runtime import epoch as letters
from culm.runtime.closing import Closing
from culm.runtime.epoch import encode
from culm.runtime.evaluating import evaluate
from culm.runtime.recovering import recover
from culm.runtime.reports import final_report, step_report
from culm.runtime.shadow import Shadows, send_copies

if TYPE_CHECKING:
    from culm.runtime.executor import Executor
    from culm.runtime.saving import Saving
    from culm.runtime.terms import Terms


class Stint:
    """Over when `run` returns, raises or is cancelled: all that outlasts it is the desk, the terms and the saving."""

    def __init__(self, executor: Executor, terms: Terms, saving: Saving) -> None:
        self.executor, self.terms, self.saving = executor, terms, saving
        self.job, self.epoch, self.clock = executor.job, executor.epoch, executor.clock
        self.closing = Closing(executor)
        self.shadows = executor.shadows = Shadows(executor, self.closing, self._tell_level)

    async def run(self) -> None:
        """From meeting the others to the last report."""
        executor, epoch = self.executor, self.epoch
        began = self.clock.now()
        await executor.join()
        self._tell(letters.Ready(executor.node, epoch.number, self.clock.now() - began))
        await recover(executor, self.closing, self._tell_inherited)
        self._report_closed()
        self._tidy()
        send_copies(executor)
        await (self._work() if executor.segments else self._follow())
        self._tell(final_report(executor, self.shadows))

    def _tell(self, message: letters.Message) -> None:
        self.executor.transport.post(self.epoch.leader, encode(message))

    def _tell_level(self, shadow: letters.Shadow) -> None:
        self._tell(letters.Level(self.executor.node, self.epoch.number, shadow.stage))

    def _tell_inherited(self) -> None:
        self._tell(letters.Inherited(self.executor.node, self.epoch.number))

    def _tidy(self) -> None:
        """Copies of stages that this worker has no part in any more go."""
        executor = self.executor
        mine = {*executor.plan.stages_of(executor.slot)}
        mine |= {shadow.stage for shadow in self.epoch.shadows if shadow.slot == executor.slot}
        if executor.slot in self.epoch.leaving:
            return  # it is about to go, and until then all that it has may be asked for
        for stage in [stage for stage in executor.desk.holdings if stage not in mine]:
            del executor.desk.holdings[stage]
        self.shadows.drop_stale()

    async def _work(self) -> None:
        """Run steps until the run ends."""
        step = self.epoch.start
        if self.epoch.recovery.steps:
            await self._after(step)
        while await self._may_run(step):
            await self._step(step)
            step += 1
            await self._after(step)
        await self._catch_up(step)
        await self.saving.save(self.executor, step)
        await self.saving.saved()

    async def _follow(self) -> None:
        """A worker that runs nothing yet makes the steps of its copies, until it is level and another epoch begins."""
        step = self.epoch.start
        while await self._may_run(step):
            await self.shadows.follow(step)
            self.shadows.arrive(self.terms.committed)
            self._report_closed()
            step += 1

    async def _may_run(self, step: int) -> bool:
        """Wait until the leader permits the step, or says that the run ends before it.

        Where a loss can be recovered from, no more than two steps are open: what is kept for them is bounded. Who waits
        for a commit alone brings copies as far as that commit needs them: with the sums of the step before they may
        wait for others, who need longer, and the commit would find this worker waiting there.
        """
        terms = self.terms
        while True:
            terms.news.clear()  # before looking: what comes while shadows catch up is looked at, too
            if terms.ended(step):
                return False
            permitted = terms.permits(self.epoch, step)
            if permitted and (not self.epoch.kept or step <= terms.committed + 1):
                return True
            await self._catch_up(step - 1 if permitted else step)
            await terms.news.wait()

    async def _catch_up(self, step: int) -> None:
        await self.shadows.catch_up(step)
        self._report_closed()

    async def _step(self, step: int) -> None:
        executor = self.executor
        await executor.step(step)
        start = self.clock.now()
        await self._catch_up(step)
        held = [executor.desk.holdings[stage] for stage in executor.plan.stages_of(executor.slot)]
        await self.closing.close(step, held)
        now = self.clock.now()
        for g in executor.segments:
            executor.desk.spans.append((step, f"{g}S", start, now))
        self._report_closed()
        if not self.epoch.kept:
            self.terms.commit(step + 1, executor.desk)

    def _report_closed(self) -> None:
        """Tell the leader of every step that all copies here have made: it needs nothing more from this worker."""
        executor, desk = self.executor, self.executor.desk
        stages = [*executor.plan.stages_of(executor.slot), *self.shadows.level]
        made = min((desk.holdings[stage].version for stage in stages), default=0)
        for step in sorted(desk.steps):
            if self.terms.reported(self.epoch) <= step < made:
                self._tell(step_report(executor, step, self.clock.now()))
                self.terms.tell(self.epoch, step)

    async def _after(self, done: int) -> None:
        """What happens between two steps: evaluation and checkpoints, at the same places for everyone."""
        every = self.job.evaluate_every
        known = self.epoch.kept and done <= self.terms.committed  # it was complete before the last epoch ended
        if every and done % every == 0 and not known:
            await self._evaluate(done)
        if self._saves(done):
            await self.saving.save(self.executor, done)

    def _saves(self, done: int) -> bool:
        epoch = self.epoch
        if epoch.checkpoint_every and done % epoch.checkpoint_every == 0:
            return True
        return epoch.owes and done == epoch.start + 1 and self.saving.idle(epoch.number)

    async def _evaluate(self, done: int) -> None:
        await self._catch_up(done)
        parts = await evaluate(self.executor, done - 1)
        if parts:
            self._tell(letters.EvaluationReport(self.executor.node, done - 1, tuple(parts)))
        while self.epoch.kept and self.terms.committed < done:  # a loss meanwhile is made good with these weights
            self.terms.news.clear()
            await self.terms.news.wait()
