"""Whoever leads a run: seats, generations, permits, and the end.

A lost server ends the generation. The next one starts from the newest version of the weights that every parameter
server has saved; graph servers keep nothing that can not be made again. So no gradient is missed or counted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.gnn import messages as say
from culm.gnn.fetch import fetch
from culm.gnn.findings import Findings
from culm.gnn.ledger import Epoch, Evaluation, Ledger, exhausted
from culm.gnn.meeting import ended
from culm.gnn.parameters import INITIAL
from culm.gnn.passes import passes
from culm.gnn.setup import Generation, Member, Permit, Report, Setup, pack, unpack

if TYPE_CHECKING:
    from culm.gnn.desk import Desk
    from culm.gnn.launch.base import Launcher
    from culm.gnn.meeting import Evict, Meeting
    from culm.runtime.state import Snapshot

_SUSPECT_S = 1.0
_LOOK_S = 0.5
_MOST_LOSSES = 50
"""In a row without a single new epoch: then it is no accident."""


class Leader:
    """One run. `told` gets every event, `epoch` and `evaluated` what became complete."""

    def __init__(
        self,
        setup: Setup,
        meeting: Meeting,
        desk: Desk,
        servers: Launcher,
        *,
        patience: int,
        latency_s: float,
        told: Callable[..., None],
        epoch: Callable[[Epoch], None],
        evaluated: Callable[[Evaluation], None],
    ) -> None:
        self._setup, self._meeting, self._desk, self._servers = setup, meeting, desk, servers
        self._store, self._ticket = meeting.store, meeting.ticket
        self._patience, self._latency_s = patience, latency_s
        self._told, self._epoch, self._evaluated = told, epoch, evaluated
        self._plan = passes(setup.epochs, setup.evaluate_every)
        self.found = Findings(Ledger(setup.servers, setup.total, self._plan))
        self._generation = Generation(0, 0, 0, ())
        self._members: dict[str, Member] = {}
        self._seated: set[str] = set()
        self._saved: dict[str, dict[int, str]] = {}
        self._losses_in_a_row = 0
        self._beside: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None
        self._looked_at = float("-inf")
        self._held: Callable[[int], bool] = lambda _: False
        self._open: Evaluation | None = None
        self._over = asyncio.Event()

    async def run(self) -> Findings:
        """To the end. Raises RunError when servers are lost faster than they get anywhere."""
        await self._store.put("setup", pack(self._setup))
        await self._servers.launch(self._ticket, len(self._setup.seats))
        heeding, over = asyncio.create_task(self._heed_all()), asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait([heeding, over], return_when=asyncio.FIRST_COMPLETED)
            if self._failed is not None:
                raise self._failed
            if heeding.done():
                heeding.result()  # raises what went wrong
        finally:
            tasks = [heeding, over, *self._beside]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.found

    async def _heed_all(self) -> None:
        async with contextlib.aclosing(self._store.watch("")) as changes:
            async for key, value in changes:
                await self._heed(key, value)

    def pids(self) -> dict[str, int]:
        """Process ids of the servers, by seat."""
        return {seat: member.pid for seat, member in self._members.items()}

    def forget(self, pid: int) -> None:
        """A server was killed on purpose: it is not there any more, before its end is noticed."""
        self._members = {seat: m for seat, m in self._members.items() if m.pid != pid}

    async def _heed(self, key: str, value: bytes | None) -> None:
        kind, _, rest = key.partition("/")
        if kind == "seats":
            await self._seat(rest, value)
        elif kind == "saved" and value is not None:
            self._save(rest, unpack(value, dict[int, str]))
        elif kind == "members" and value is not None:
            await self._member(rest, unpack(value, Member))
        elif kind == "broken" and rest == str(self._generation.number) and value is not None:
            self.found.recoveries.sign(time.monotonic())
            self._suspect(f"a connection of graph-{value.decode()} broke")
        elif kind == "report" and value is not None:
            await self._report(unpack(value, Report))

    # Who is there.

    async def _seat(self, seat: str, value: bytes | None) -> None:
        if value is not None:
            self._seated.add(seat)
            self._mind(seat, value)
            if self._generation.number == 0 and self._seated == set(self._setup.seats):
                await self._next("all seats are taken")
            return
        self._seated.discard(seat)
        self.found.recoveries.lost(seat, time.monotonic())
        self._told(kind="server-lost", node=seat)
        await self._servers.launch(self._ticket, 1)
        if self._generation.number:
            await self._next(f"{seat} was lost")

    def _mind(self, seat: str, value: bytes) -> None:
        """The end of a process is seen here long before its lease runs out; then the lease has no purpose any more."""

        async def wait(evict: Evict) -> None:
            await ended(int(value))
            self.found.recoveries.sign(time.monotonic())
            with contextlib.suppress(RunError):  # the store is lost: that is known elsewhere
                if await self._store.get(f"seats/{seat}") == value:
                    await evict(f"seats/{seat}")

        if self._meeting.evict is not None:
            self._keep(wait(self._meeting.evict))

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._ended_beside)

    def _ended_beside(self, task: asyncio.Task[None]) -> None:
        """What goes wrong beside the leader ends the run, too."""
        self._beside.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed = error
            self._over.set()

    def _suspect(self, why: str) -> None:
        """A connection broke. Mostly a server is gone, which is known in a moment; if not, start over all the same."""
        number = self._generation.number

        async def wait() -> None:
            await asyncio.sleep(_SUSPECT_S)
            if self._generation.number == number:
                await self._next(why)

        self._keep(wait())

    async def _next(self, why: str) -> None:
        """A new generation, from what everyone has saved."""
        self._losses_in_a_row += 1
        if self._losses_in_a_row > _MOST_LOSSES:
            raise RunError(f"{_MOST_LOSSES} servers were lost and not an epoch was done: look at their messages")
        saved = [self._saved.get(seat, {}) for seat in self._setup.parameter_seats]
        version = newest_common(saved)
        number = self._generation.number + 1
        sources = tuple(known.get(version, INITIAL) for known in saved)
        self._generation = Generation(number, version, self._start(version), sources)
        self._members, self._open = {}, None
        self.found.generations = number
        self._told(kind="generation", number=number, version=version, why=why)
        await self._store.put("generation", pack(self._generation))
        self.found.recoveries.decided(time.monotonic(), version, self.found.ledger.reached)

    def _save(self, seat: str, versions: dict[int, str]) -> None:
        self._saved[seat] = versions
        version = newest_common([self._saved.get(seat, {}) for seat in self._setup.parameter_seats])
        if version and version not in self.found.checkpoints:
            self.found.checkpoints.append(version)

    def _start(self, version: int) -> int:
        """The first pass that is not covered by a version: an evaluation of it, if that was due, is done again."""
        return next((p.number for p in self._plan if p.version == version and (p.train or version)), 0)

    async def _member(self, key: str, member: Member) -> None:
        number, _, seat = key.partition("/")
        if int(number) != self._generation.number:
            return
        self._members[seat] = member
        self._told(kind="server-up", node=seat, pid=member.pid, generation=self._generation.number)
        if set(self._members) == set(self._setup.seats):
            self.found.recoveries.moved(time.monotonic())
            self._desk.tell(self._roster())
            await self._permit(self._generation.start)

    def _roster(self) -> say.Roster:
        setup = self._setup
        return say.Roster(
            generation=self._generation.number,
            graph=tuple(self._members[s].address for s in setup.graph_seats),
            parameter=tuple(self._members[s].address for s in setup.parameter_seats),
            model=setup.model,
            seed=setup.seed,
            total=setup.total,
            latency_s=self._latency_s,
        )

    # How it goes.

    async def _permit(self, start: int) -> None:
        """Everything up to the next evaluation may run."""
        until = next(p.number for p in self._plan[start:] if not p.train) + 1
        await self._store.put("permit", pack(Permit(self._generation.number, until, len(self._plan))))

    async def _report(self, report: Report) -> None:
        if report.generation != self._generation.number:
            return
        epochs, evaluations = self.found.ledger.add(report)
        self._look()
        for done in epochs:
            self._losses_in_a_row = 0
            self.found.recoveries.done(done.epoch + 1, time.monotonic())
            self._epoch(done)
        for evaluation in evaluations:
            self._evaluated(evaluation)
            self._open = evaluation
            await self.go_on()

    def _look(self) -> None:
        """How the queues are, now and then."""
        now, ledger = time.monotonic(), self.found.ledger
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            gauges = {name: ledger.now_of(name) for name in ("queue", "running", "spread")}
            self._told(kind="queues", workers=len(self._desk), **gauges)

    def hold_while(self, held: Callable[[int], bool]) -> None:
        """Do not pass the evaluation of an epoch while this says so."""
        self._held = held

    async def go_on(self) -> None:
        """Decide on an evaluation that is open, unless it is held."""
        if self._open is not None and not self._held(self._open.epoch):
            evaluation, self._open = self._open, None
            await self._decide(evaluation)

    async def _decide(self, evaluation: Evaluation) -> None:
        """After an evaluation: keep the best weights, stop, or go on."""
        ledger = self.found.ledger
        last = evaluation.epoch + 1 == self._setup.epochs
        history = [e for n, e in sorted(ledger.evaluations.items()) if n <= evaluation.epoch]
        why = exhausted(history, self._patience)
        best = ledger.best is not None and ledger.best.epoch == evaluation.epoch
        try:
            if best or last or why is not None:
                self.found.state = await self._fetch()
                self.found.best = self.found.state if best else self.found.best
        except RunError as error:
            self._suspect(str(error))  # the next generation evaluates again
            return
        if last or why is not None:
            self.found.stopped = why or ""
            self._over.set()
            return
        number = next(p.number for p in self._plan if not p.train and p.epoch == evaluation.epoch)
        await self._permit(number + 1)

    async def _fetch(self) -> dict[int, Snapshot]:
        seats = self._setup.parameter_seats
        if any(seat not in self._members for seat in seats):
            raise RunError("a parameter server was lost")
        addresses = [self._members[seat].address for seat in seats]
        return await fetch(addresses, self._ticket.token, self._generation.number, self._setup.model.layers)


def newest_common(saved: Sequence[Collection[int]]) -> int:
    """The newest version that every parameter server has; the initial one is always there."""
    common = set(saved[0]).intersection(*saved[1:])
    return max(common, default=0)
