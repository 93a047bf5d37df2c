"""The scheduler of a graph server: the position of every interval, and the tasks that may run now.

Pure: events go in, tasks come out, time is a parameter. An interval runs through the steps of a pass in order; the
oldest work goes first. The modes differ only in what a step waits for:

    sync    all intervals of this server have finished the previous step, and gathered rows are of this pass
    pipe    gathered rows are of this pass
    async   gathered rows are at most S + 1 passes old, and no interval runs more than S passes ahead of the slowest

A pass is one training epoch or one evaluation. Weights have versions: version n includes the gradients of n training
epochs. The version that an interval reads first in a pass is used for the whole pass (weight stashing).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from culm.gnn.model.gnn_model import GnnModel
from culm.gnn.model.pass_steps import PassStep, Place, layers_read, steps_of_pass
from culm.gnn.scheduler.in_flight_tasks import InFlightTasks
from culm.gnn.scheduler.passes import IntervalTask, Pass
from culm.gnn.scheduler.pending_tasks import Blocker, PendingTasks
from culm.gnn.scheduler.scatter_log import IntervalId, ScatterLog
from culm.gnn.scheduler.version_pins import VersionPins

Mode = Literal["sync", "pipe", "async"]
MODES: tuple[Mode, ...] = ("sync", "pipe", "async")
_PERMIT, _STEP, _SLOWEST = Blocker("permit"), Blocker("step"), Blocker("slowest")


@dataclass
class _IntervalPosition:
    pass_number: int
    step_index: int = 0


class IntervalScheduler:
    """Schedules the tasks of one server's intervals. An event that no longer fits the state changes nothing; methods
    return False for it and never raise."""

    def __init__(
        self,
        model: GnnModel,
        *,
        server: int,
        gather_sources: Sequence[Sequence[IntervalId]],
        passes: Sequence[Pass],
        mode: Mode = "sync",
        staleness: int = 0,
        start_pass: int = 0,
        servers: int = 1,
        edge_place: Place = "worker",
    ) -> None:
        self._mode, self._staleness = mode, staleness
        self.passes, self.start_pass = passes, start_pass
        self._steps_by_training = {
            train: steps_of_pass(model, train=train, edge_place=edge_place) for train in (True, False)
        }
        self._layers_read = {
            step: layers_read(model, step) for step in self._steps_by_training[True] + self._steps_by_training[False]
        }
        self._server = server
        self._intervals = [_IntervalPosition(start_pass) for _ in gather_sources]
        self._cached_slowest_position: tuple[int, int] | None = None
        self._scatter_log = ScatterLog(gather_sources, server)
        self._peer_slowest_pass: dict[int, int] = {other: start_pass for other in range(servers) if other != server}
        self._version_pins = VersionPins(staleness if mode == "async" else 0)
        trained = next((p.number for p in passes[start_pass:] if p.train), start_pass)
        self._first_scattering_pass = {False: start_pass, True: trained}
        """The first pass that scatters rows forward (False) and backward (True). Rows of earlier passes never exist."""
        self._permitted_passes = len(passes)
        self._in_flight, self._pending = InFlightTasks(), PendingTasks()
        for interval in range(len(self._intervals)):
            self._enqueue_next_task(interval)

    # Queries.

    def step_of(self, task: IntervalTask) -> PassStep:
        return self._steps_by_training[self.passes[task.pass_number].train][task.step_index]

    def next_task(self, place: Place) -> IntervalTask | None:
        """Return the oldest task that may start at that place now; None if there is none."""
        return next(self.ready_tasks(place), None)

    def ready_tasks(self, place: Place) -> Iterator[IntervalTask]:
        """Yield all tasks that may start at that place now, oldest first; tasks to relaunch come before all others.

        The caller may start tasks while it iterates, but must not call any other method.
        """
        yield from sorted(t for t in self._in_flight.to_relaunch if self.step_of(t).place == place)
        for priority, task in self._pending.queued_tasks(place):
            if not self.is_current(task) or task in self._in_flight or task in self._in_flight.to_relaunch:
                self._pending.remove(place, priority, task)  # already assigned, or done
            elif (blocker := self._find_blocker(task)) is not None:
                self._pending.block(place, priority, task, blocker)
            else:
                yield task

    def _find_blocker(self, task: IntervalTask) -> Blocker | None:
        """Return the first condition that the task waits for; None if it may run."""
        step, graph_pass = self.step_of(task), self.passes[task.pass_number]
        if graph_pass.number >= self._permitted_passes:
            return _PERMIT
        if self._mode == "sync" and self._slowest_position < (task.pass_number, task.step_index):
            return _STEP
        if (
            self._mode == "async" and (task.step_index == 0 or step.reads_scattered_rows)
        ) and graph_pass.number - self.slowest_pass > self._staleness:
            return _SLOWEST
        if step.reads_scattered_rows:
            lagging = self._scatter_log.find_lagging(
                task.interval, step.layer, step.backward, self._oldest_usable_pass(task, step.backward)
            )
            if lagging is not None:
                return Blocker("rows", step.layer, step.backward, lagging)
        missing = self._version_pins.first_missing_layer(task, graph_pass, self._layers_read[step])
        return None if missing is None else Blocker("weights", missing)

    def _oldest_usable_pass(self, task: IntervalTask, backward: bool) -> int:
        """Return the oldest pass whose rows the task may gather."""
        graph_pass = self.passes[task.pass_number]
        if self._mode != "async" or not graph_pass.train:
            return graph_pass.number
        first, oldest = self._first_scattering_pass[backward], task.pass_number - 1 - self._staleness
        while backward and oldest > first and not self.passes[oldest].train:
            oldest -= 1  # evaluations scatter nothing backward
        return max(first, oldest)

    def pin_versions(self, task: IntervalTask) -> dict[int, int]:
        """Return the version of each layer that a task reads, and pin it for the interval until the pass ends."""
        return self._version_pins.pin(task, self.passes[task.pass_number], self._layers_read[self.step_of(task)])

    def follow_up_task(self, task: IntervalTask) -> IntervalTask | None:
        """Return the first task of the interval's next pass, if the worker of the last task of this pass may
        continue with it.

        It is sent together with its predecessor and waits at the worker for its weights. None in sync mode, which has
        no pipelining.
        """
        number = task.pass_number + 1
        last = task.step_index + 1 == len(self._steps_by_training[self.passes[task.pass_number].train])
        if self._mode == "sync" or not last or number >= min(self._permitted_passes, len(self.passes)):
            return None
        follow_up = IntervalTask(number, 0, task.interval)
        return follow_up if self.step_of(follow_up).place == self.step_of(task).place == "worker" else None

    def is_waiting_for_weights(self, task: IntervalTask) -> bool:
        """Whether a task that was assigned ahead of time still waits for its weights."""
        return self._in_flight.is_waiting_for_weights(task)

    def oldest_needed_version(self, layer: int) -> int:
        """Return the oldest version that an interval of this server may still request."""
        return self._version_pins.oldest_needed(layer)

    @property
    def slowest_pass(self) -> int:
        """The pass of the slowest interval of all servers."""
        return (
            min(self.own_slowest_pass, *self._peer_slowest_pass.values())
            if self._peer_slowest_pass
            else self.own_slowest_pass
        )

    @property
    def own_slowest_pass(self) -> int:
        return self._slowest_position[0]

    @property
    def _slowest_position(self) -> tuple[int, int]:
        """Position of the slowest interval, cached until that interval advances."""
        if self._cached_slowest_position is None:
            self._cached_slowest_position = min(
                (position.pass_number, position.step_index) for position in self._intervals
            )
        return self._cached_slowest_position

    @property
    def is_finished(self) -> bool:
        return self.own_slowest_pass >= len(self.passes)

    @property
    def pass_spread(self) -> int:
        """Number of passes between the fastest and the slowest interval of this server."""
        return max(i.pass_number for i in self._intervals) - self.own_slowest_pass

    def count_ready(self, place: Place) -> int:
        """Return the number of tasks that could start at that place now."""
        return sum(1 for _ in self.ready_tasks(place))

    def workers_on(self, task: IntervalTask) -> tuple[str, ...]:
        """Return the workers that run a task."""
        return self._in_flight.workers_on(task)

    @property
    def busy_count(self) -> int:
        """Number of tasks that are being computed. Tasks that wait for weights at a worker are not included."""
        return self._in_flight.busy_count

    @property
    def relaunches(self) -> int:
        return self._in_flight.relaunches

    # Events.

    def is_current(self, task: IntervalTask) -> bool:
        """Whether a task is the current one of its interval. The result of any other task comes too late."""
        position = self._intervals[task.interval]
        return (position.pass_number, position.step_index) == task[:2] and task.pass_number < len(self.passes)

    def start_task(self, task: IntervalTask, worker: str, now: float) -> None:
        """Record that a worker starts a task."""
        self._in_flight.start(task, worker, now, waits_for_weights=self._version_pins.awaits_version(task))

    def complete_task(self, task: IntervalTask, now: float) -> bool:
        """Record that a task is complete. Returns True the first time; only then its result counts."""
        if not self.is_current(task):
            return False
        step = self.step_of(task)
        self._in_flight.complete(task, str(step), now)
        if step.kind == "SC":
            self.record_rows((self._server, task.interval), step.layer, step.backward, task.pass_number)
        self._advance_interval(task)
        return True

    def _advance_interval(self, task: IntervalTask) -> None:
        position, before = self._intervals[task.interval], self._slowest_position
        position.step_index += 1
        if position.step_index == len(self._steps_by_training[self.passes[task.pass_number].train]):
            position.pass_number, position.step_index = position.pass_number + 1, 0
            self._version_pins.unpin(task.interval, task.pass_number)
        if before == task[:2]:
            self._cached_slowest_position = None
            self._unblock_after_advance(before)
        self._enqueue_next_task(task.interval)

    def _unblock_after_advance(self, before: tuple[int, int]) -> None:
        """Unblock the tasks that waited for the slowest interval, if it has advanced."""
        if self._slowest_position > before:
            self._pending.unblock(_STEP)
        if self.own_slowest_pass > before[0]:
            self._pending.unblock(_SLOWEST)

    def _enqueue_next_task(self, interval: int) -> None:
        """Queue the next task of an interval; the oldest pass goes first.

        Within a pass, the interval that is furthest behind goes first, so that rows are fresh when they are gathered.
        With staleness, the interval that is furthest ahead goes first: intervals that are all at the same step would
        all wait for distant workers at the same time.
        """
        position = self._intervals[interval]
        if position.pass_number < len(self.passes):
            task = IntervalTask(position.pass_number, position.step_index, interval)
            self._pending.add(
                self.step_of(task).place,
                (position.pass_number, -position.step_index if self._staleness else position.step_index),
                task,
            )

    def record_rows(self, interval_id: IntervalId, layer: int, backward: bool, pass_number: int) -> None:
        """Record that the rows of an interval, of this or another server, have arrived."""
        self._scatter_log.record_scatter(interval_id, layer, backward, pass_number)
        self._pending.unblock(Blocker("rows", layer, backward, interval_id))

    def record_version(self, layer: int, version: int, now: float = 0.0) -> None:
        """Record a new version of a parameter server, and start the clock of tasks that waited for it."""
        self._version_pins.record_version(layer, version)
        self._in_flight.start_waiting_tasks(self._version_pins.awaits_version, now)
        self._pending.unblock(Blocker("weights", layer))

    def record_peer_progress(self, server: int, slowest_pass: int) -> None:
        """Record the pass of another server's slowest interval."""
        self._peer_slowest_pass[server] = max(slowest_pass, self._peer_slowest_pass.get(server, 0))
        self._pending.unblock(_SLOWEST)

    def permit_passes(self, until: int) -> None:
        """Permit all passes below this number."""
        self._permitted_passes = until
        self._pending.unblock(_PERMIT)

    def stop_before(self, pass_number: int) -> None:
        """Drop all passes from this number on."""
        self.passes = self.passes[:pass_number]

    def handle_worker_lost(self, worker: str) -> list[IntervalTask]:
        """Remove a lost worker. Returns the tasks that only it was running; they are marked for relaunch."""
        return self._in_flight.handle_worker_lost(worker)

    def relaunch_overdue(self, now: float) -> list[IntervalTask]:
        """Mark tasks that exceed their relaunch timeout and return them. They run a second time; the first result
        counts."""
        return self._in_flight.relaunch_overdue(now, lambda task: str(self.step_of(task)))

    def handle_refusal(self, task: IntervalTask, worker: str) -> None:
        """Mark a task for reassignment after its worker refused it, because its forward cache is gone. It is sent
        again with all inputs."""
        self._in_flight.handle_refusal(task, worker)

    def relaunch_timeout(self, step: PassStep) -> float:
        """Return the seconds after which a task of this step is relaunched."""
        return self._in_flight.relaunch_timeout(str(step))
