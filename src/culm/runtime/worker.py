"""The worker: a coroutine that computes. It heeds letters, of its agent and of the leader: it takes up epochs, trains
under them (stint), and leaves them when told to, with a report of what it has in hand."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from typing import TYPE_CHECKING

from culm.errors import EpochClosed, NodeLost
from culm.plan.lineage import Standing
from culm.runtime import epoch as letters
from culm.runtime.building import furnish
from culm.runtime.desk import Desk
from culm.runtime.device import device_of
from culm.runtime.epoch import Epoch, decode, encode
from culm.runtime.estate import keep_frame
from culm.runtime.executor import Executor
from culm.runtime.moving import give_layers, take_layers
from culm.runtime.pulse import Pulse
from culm.runtime.reports import failure
from culm.runtime.saving import Saving
from culm.runtime.stint import Stint
from culm.runtime.terms import Terms
from culm.transport.base import Key

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.desk import Holding
    from culm.transport.base import Address, Tensors, Transport

_MADE = re.compile(r"[0-9]+[FI][0-9]+")
"""Names of what actions made."""


class Worker:
    """One worker of a node. `run` returns when the run has finished, or the agent is gone."""

    def __init__(self, job: Job, node: int, agent: Address, transport: Transport, clock: Clock) -> None:
        self.job, self.node, self.agent = job, node, agent
        self.transport, self.clock = transport, clock
        self.desk: Desk | None = None
        self.terms = Terms()
        self._pulse = Pulse(node, transport, clock)
        self._saving = Saving(node, transport, clock, self._pulse)
        self._training: asyncio.Task[None] | None = None
        self._executor: Executor | None = None
        """Of the epoch or, until that has one, of the one before."""
        self._floor = 0
        """No epoch below this number is listened to."""
        self._record = b""
        """What the last leader would have put into the store that was out of reach."""

    async def run(self) -> None:
        """Say hello, then follow the letters until the end."""
        self.transport.post(self.agent, encode(letters.Hello(self.node, self.transport.address)))
        try:
            while await self._heed(await self.transport.letter()):
                pass
        finally:
            await self._stop_training()
            await self._saving.close()

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
                self.terms.permit = max(self.terms.permit, until)
            case letters.Drain(number, before):
                self.terms.drain = number, before
            case letters.Finish(step):
                self.terms.finish = step
            case letters.Commit(step, number, record):
                if number >= self._floor:
                    self._record = record or self._record
                    self.terms.commit(step + 1, self.desk)
            case letters.Stop():
                return False
        self.terms.news.set()
        return True

    def _missed(self, sender: Address) -> None:
        """A connection broke: a suspicion, which the leader judges."""
        epoch = self._executor.epoch if self._executor is not None else None
        if epoch is not None and any(epoch.address(slot) == sender for slot in epoch.staying):
            missing = letters.Failed(self.node, NodeLost.__name__, f"the connection to {sender} broke")
            self.transport.post(epoch.leader, encode(missing))

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
        await self.clock.work(self.node, self.terms.committed, "standing")
        standing = self.desk.standing() if self.desk is not None else Standing()
        self.transport.post(leader, encode(letters.Report(self.node, number, standing, self._record)))

    def _salvage(self, executor: Executor, left: dict[Key, Tensors]) -> None:
        """What had come and was not used yet may be all that is left of it."""
        for (number, step, name), tensors in left.items():
            kind, _, segment = name.partition(" ")
            if step < self.terms.committed:
                continue
            if kind == "sum" and int(segment) % executor.plan.stages in executor.desk.holdings:
                executor.summing.taken(step, int(segment), tensors)
            elif kind == "part" and int(segment.split()[0]) % executor.plan.stages in executor.desk.holdings:
                keep_frame(executor.summing, Key(number, step, name), tensors)
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
        beating = asyncio.create_task(self._pulse.beat(epoch, lambda: self._executor)) if epoch.beat_s else None
        try:
            await self.clock.work(self.node, epoch.start, "adopt")
            executor = await self._prepare(epoch)
            await Stint(executor, self.terms, self._saving).run()
        except (asyncio.CancelledError, EpochClosed):
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not _of_the_user(error):
                raise
            self.transport.post(epoch.leader, encode(failure(self.node, error)))
        finally:
            if beating is not None:
                beating.cancel()
            if executor is not None:
                executor.leave()

    async def _prepare(self, epoch: Epoch) -> Executor:
        """Build what this worker is to hold and has not, or load it from a checkpoint; what is in hand stays."""
        slot = epoch.slot_of(self.node)
        assert slot is not None
        if self.desk is None or epoch.reset:
            self.desk = Desk(self.job, device_of(self.job))
            self.terms.committed = epoch.committed
        if self.desk.shaped != epoch.shaped:
            taken = await self._take_layers(epoch, slot) if epoch.reshapes and not epoch.reset else {}
            self.desk.reshape(epoch.shaped, taken, epoch.committed)
        self.terms.commit(epoch.committed, self.desk)
        self.desk.drop(epoch.recovery.dropped)
        with self._pulse.slowly():
            await furnish(self.desk, epoch, slot, self.clock)
        executor = self._executor = Executor(self.job, epoch, slot, self.desk, self.transport, self.clock)
        return executor

    async def _take_layers(self, epoch: Epoch, slot: int) -> dict[int, Holding]:
        """The layers that this worker has in the new shape; others may need some that are here."""
        assert self.desk is not None
        began = self.clock.now()

        def told(layers: int) -> None:
            self._pulse.tell(epoch, layers, self.clock.now() - began)

        give_layers(epoch, slot, self.desk, self.transport)
        await self.clock.work(self.node, epoch.start, "given")
        taken = await take_layers(epoch, slot, self.desk, self.transport, self.clock, told)
        await self.clock.work(self.node, epoch.start, "moved")
        return taken


def _of_the_user(error: BaseException) -> bool:
    """Where Ctrl-C is not heard, as in all processes of a node, it is code of the user that raised as if it were."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
