"""The workers of a graph server, as it deals with them: what each is given, and what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from culm.gnn import messages as say
from culm.gnn.compute import Outcome
from culm.gnn.passes import Task
from culm.gnn.seats import Seat, Seats
from culm.gnn.shard import Slice

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.board import Board
    from culm.gnn.link import Link
    from culm.gnn.notes import Notes
    from culm.gnn.program import Step
    from culm.gnn.shard import Shard

Count = Callable[[Task, "Step", Outcome], None]


class Crew:
    """All workers of one server. `count` gets what a task came to, the first time it is done, and finishes it."""

    def __init__(self, board: Board, shard: Shard, notes: Notes, in_flight: int, count: Count) -> None:
        self._board, self._shard, self._notes, self._count = board, shard, notes, count
        self._seats = Seats(in_flight)
        self._full = False
        """Nobody had room when it was last tried, and nothing has changed since."""

    def __len__(self) -> int:
        return len(self._seats)

    def links(self) -> list[Link]:
        return [seat.link for seat in self._seats.all()]

    def join(self, name: str, link: Link) -> None:
        self._seats.join(name, link)

    def leave(self, name: str) -> None:
        self._seats.leave(name)
        self._board.lost(name)
        self.changed()

    def changed(self) -> None:
        """Somebody may have room now."""
        self._full = False

    # What they are given.

    def dispatch(self) -> None:
        """Give out what workers can do, oldest first, while somebody has room."""
        if self._full:
            return
        for task in self._board.ready("worker"):
            busy = self._board.workers(task)
            seat = self._seats.choose(task, busy, self._board.waits)
            if seat is not None:
                self._give(task, seat)
            elif not busy:
                self._full = True
                return

    def _give(self, task: Task, seat: Seat) -> None:
        step, then = self._board.step(task), self._board.following(task)
        kept = step.back and seat.kept.get((task.interval, step.layer)) == task.number
        if not self._board.workers(task):
            self._shard.prepare(step, task.interval)
        message = self._described(task, kept=kept)
        if then is not None:
            seat.then[task] = then
            message = msgspec.structs.replace(message, then=self._described(then, kept=False))
        now = time.monotonic()
        seat.tasks[task] = now
        self._board.begin(task, seat.name, now)
        named = [*message.pieces, *(message.then.pieces if message.then is not None else ())]
        seat.link.send(message, [] if seat.mapped else self._shard.rows([Slice(*piece) for piece in named]))

    def _described(self, task: Task, *, kept: bool) -> say.Work:
        step, now = self._board.step(task), self._board.plan[task.number]
        return say.Work(
            task=(task.number, task.at, task.interval),
            now=(now.number, now.epoch, now.train),
            step=step[:3],
            versions=self._board.versions(task),
            pieces=tuple((p.table, p.start, p.stop) for p in self._shard.inputs(step, task.interval, kept=kept)),
            kept=kept,
        )

    # What comes back.

    def heard(self, link: Link, message: say.Message, tensors: list[Tensor]) -> None:
        seat = self._seats.get(link.name)
        if seat is None:
            return
        match message:
            case say.Ready(mapped):
                seat.ready, seat.mapped = True, mapped
            case say.Leaving():
                seat.ready = False
            case say.Refuse(task):
                self._refused(seat, Task(*task))
            case say.Done():
                self._returned(seat, message, tensors)
            case _:
                link.close()
        self.changed()

    def _refused(self, seat: Seat, task: Task) -> None:
        seat.tasks.pop(task, None)
        seat.then.pop(task, None)
        seat.kept.clear()
        self._board.refused(task, seat.name)

    def _returned(self, seat: Seat, message: say.Done, tensors: list[Tensor]) -> None:
        task, now = Task(*message.task), time.monotonic()
        self._seats.returned(seat, task, now, waited=message.waited, seconds=message.seconds)
        self._notes.worked(message.seconds)
        then = seat.then.pop(task, None)
        if not self._board.current(task):
            self._notes.refused += 1
            return
        step = self._board.step(task)
        if message.kept:
            seat.kept[task.interval, step.layer] = task.number
        self._count(task, step, _outcome(message, tensors))
        if then is not None and self._board.current(then):
            self._seats.went_on(seat, then)
            self._board.begin(then, seat.name, now)


def _outcome(message: say.Done, tensors: list[Tensor]) -> Outcome:
    gradients: dict[int, dict[str, Tensor]] = {}
    for (layer, name), tensor in zip(message.named, tensors[int(message.rows) :], strict=True):
        gradients.setdefault(layer, {})[name] = tensor
    return Outcome(tensors[0] if message.rows else None, gradients, message.loss, message.counts)
