"""Virtual time: an asyncio event loop whose clock jumps to the next timer when no callback is ready.

Code in the loop may belong to a node. Such code can be paused, as with SIGSTOP, and cancelled, per node.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
import types
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, ParamSpec, Protocol, TypeVar, TypeVarTuple, Unpack

A = ParamSpec("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_node: ContextVar[int | None] = ContextVar("node", default=None)
_GC_THRESHOLD = 50_000
"""Net allocations between two runs of the garbage collector."""
_MAX_TRACKED_TASKS = 64
"""Tasks tracked per node before finished ones are removed."""


class Deadlock(Exception):
    """Every coroutine waits and no timer is set: with a real clock this run would hang forever."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Deterministic: callbacks run in the order in which they were scheduled, timers in the order of their time.

    Threads and sockets are not supported. Callbacks are kept in asyncio's own attributes of the base class.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[tuple[float, int, asyncio.Handle | asyncio.Future[None]]]
    """Timers and sleepers, by time and then by order of creation."""
    _stopping: bool
    _clock_resolution: float

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        """The time, for clocks that read it several times in each action: it costs no call."""
        self.is_over = False
        self._timer_numbers = itertools.count()
        self._tasks: dict[int, list[asyncio.Task[Any]]] = {}
        """Tasks by node, in order of creation; some may be done."""
        self.paused: dict[int, list[asyncio.Handle]] = {}
        """By paused node: the callbacks that wait until it resumes, in order."""
        self._explain: Callable[[], str] = lambda: ""

    def time(self) -> float:
        return self.now_s

    def explain_deadlocks(self, explain: Callable[[], str]) -> None:
        """Set a function that describes a deadlock. It is called while all coroutines still wait."""
        self._explain = explain

    def coroutine_positions(self, node: int) -> list[str]:
        """Where the coroutines of a node are suspended."""
        return [_innermost_position(task.get_coro()) for task in self._tasks.get(node, ()) if not task.done()]

    def create_node_task(self, node: int, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as code of a node; everything it starts belongs to the node too."""
        context = copy_context()
        context.run(_node.set, node)
        return self.create_task(work, context=context)

    def pause(self, node: int) -> None:
        """Stop running code of the node; its callbacks wait."""
        self.paused.setdefault(node, [])

    def resume(self, node: int) -> None:
        """Continue to run the node's code, starting with the callbacks that waited."""
        self._ready.extend(self.paused.pop(node, ()))

    def cancel_node(self, node: int) -> None:
        """Cancel all tasks of the node at once; they only run their cleanup."""
        for task in self._tasks.pop(node, ()):
            task.cancel()
        self.resume(node)

    def close(self) -> None:
        """Close the loop and drop references at once, so that the garbage collector need not find them."""
        super().close()
        self.is_over = True
        self._tasks.clear()
        self._explain = lambda: ""

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        context = options.get("context")
        node = _node.get() if context is None else context.get(_node)
        if node is not None:
            node_tasks = self._tasks.setdefault(node, [])
            if len(node_tasks) > _MAX_TRACKED_TASKS:
                node_tasks[:] = [task for task in node_tasks if not task.done()]
            node_tasks.append(task)
        return task

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        call = asyncio.Handle(callback, args, self, context)
        self._ready.append(call)
        return call

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, (when, next(self._timer_numbers), timer))
        return timer

    def sleep_future(self, seconds: float) -> asyncio.Future[None]:
        """A future that is done after `seconds`; cheaper than asyncio.sleep."""
        sleeper: asyncio.Future[None] = self.create_future()
        heapq.heappush(self._scheduled, (self.now_s + seconds, next(self._timer_numbers), sleeper))
        return sleeper

    def _write_to_self(self) -> None:
        """Nothing to do: the loop never blocks, so it need not be woken."""

    def _run_once(self) -> None:
        """asyncio calls this for one iteration; here it runs all iterations until the loop is stopped."""
        ready, scheduled, paused = self._ready, self._scheduled, self.paused
        while not self._stopping:
            if not ready:
                self._advance_time()
            while scheduled and scheduled[0][0] < self.now_s + self._clock_resolution:
                due = heapq.heappop(scheduled)[2]
                if isinstance(due, asyncio.Handle):
                    ready.append(due)
                elif not due.done():
                    due.set_result(None)
            for _ in range(len(ready)):
                call: Any = ready.popleft()  # typeshed does not declare its context
                if paused and (node := call._context.get(_node)) in paused:
                    paused[node].append(call)
                elif not call._cancelled:
                    call._run()

    def _advance_time(self) -> None:
        """No callback is ready: set the clock to the first timer. Raises Deadlock if there is none."""
        scheduled = self._scheduled
        while scheduled and scheduled[0][2].cancelled():
            heapq.heappop(scheduled)
        if not scheduled:
            raise Deadlock(f"every coroutine waits and no timer is set{self._explain()}")
        self.now_s += max(0.0, scheduled[0][0] - self.now_s)


def _innermost_position(coroutine: Any) -> str:
    """Function and line at which a coroutine is suspended; inside a library, those of its caller in culm."""
    position = ""
    while (code := getattr(coroutine, "cr_code", None)) is not None:
        if coroutine.cr_frame is not None and "culm" in code.co_filename:
            position = f"{code.co_qualname}:{coroutine.cr_frame.f_lineno}"
        coroutine = coroutine.cr_await
    return position


def virtual_loop() -> VirtualLoop:
    """The running loop, which must be a VirtualLoop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "a simulated cluster needs virtual time: use run_virtual"
    return loop


@contextlib.contextmanager
def infrequent_gc() -> Iterator[None]:
    """Run the garbage collector rarely: little of what is created in virtual time is a cycle, so that frequent
    collections would scan much for nothing.

    The next collection comes when this ends. Wrap it around everything that refers to a run: then the collection finds
    the run unreachable. A run still in use would move to an older generation, whose later scans are slow because they
    touch the remains of several runs outside the processor's cache.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _GC_THRESHOLD:
        gc.set_threshold(_GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@infrequent_gc()
def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time; tasks still running then are cancelled. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def _virtual_sleep(seconds: float) -> Awaitable[None]:
    """Like asyncio.sleep."""
    return virtual_loop().sleep_future(seconds) if seconds > 0 else _let_others_run()


@types.coroutine
def _let_others_run() -> Generator[None, None, None]:
    """Like asyncio.sleep(0), with half the calls."""
    yield


class FaultHook(Protocol):
    """Injects faults into a node while it works."""

    def on_action_done(self, node: int, step: int, action: str) -> bool:
        """A node has done an action and its output is not sent yet. Returns whether a fault was injected, into this
        node or another."""

    def raise_due_error(self, node: int, step: int, action: str) -> None:
        """A node has computed an action and counted nothing yet. Raises the error of a fault that is due."""

    def disk_delay_s(self, node: int | None) -> float:
        """How long a call to the outside, such as a disk write, takes on a node."""

    def slowdown_of(self, node: int) -> float:
        """How many times as long as usual an action of a node takes."""


class VirtualClock:
    """The clock of a simulated cluster. `cost` returns the virtual seconds of an action, given node, step and
    action."""

    def __init__(self, cost: Callable[[int, int, str], float] | None = None) -> None:
        self._cost = cost
        self._loop: VirtualLoop | None = None
        """The running loop, after the first look at it."""
        self.fault_hook: FaultHook | None = None

    @property
    def has_action_hooks(self) -> bool:
        return True

    def now(self) -> float:
        loop = self._loop
        if loop is None or loop.is_over:
            loop = self._loop = virtual_loop()
        return loop.now_s

    async def sleep(self, seconds: float) -> None:
        await _virtual_sleep(seconds)

    async def after_action(self, node: int, step: int, action: str) -> None:
        seconds = 0.0 if self._cost is None else self._cost(node, step, action)
        if seconds > 0 and self.fault_hook is not None:
            seconds *= self.fault_hook.slowdown_of(node)
        await _virtual_sleep(seconds)
        if self.fault_hook is not None and self.fault_hook.on_action_done(node, step, action):
            await _let_others_run()  # if this node was killed, it is cancelled here

    def during_action(self, node: int, step: int, action: str) -> None:
        if self.fault_hook is not None:
            self.fault_hook.raise_due_error(node, step, action)

    async def run_in_thread(self, function: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        await _virtual_sleep(0.0 if self.fault_hook is None else self.fault_hook.disk_delay_s(_node.get()))
        return function(*args, **kwargs)

    def killed_at(self, node: int) -> float | None:
        """None: not recorded, because a simulation detects a fault as soon as the latency allows."""
        del node
        return None
