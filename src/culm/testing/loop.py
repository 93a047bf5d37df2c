"""Virtual time: an asyncio event loop whose clock jumps to the next timer when nobody has anything to do.

Code that runs in the loop may belong to a node. Then it can be made to stand still, as SIGSTOP does it, and to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context, ContextVar, copy_context
from typing import Any, ParamSpec, Protocol, TypeVar, TypeVarTuple, Unpack

A = ParamSpec("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_node: ContextVar[int | None] = ContextVar("node", default=None)
_COLLECTED = 50_000
"""Objects that are made, beyond those that go, between two looks of the garbage collector."""
_MANY = 64
"""Tasks of a node that are remembered before those that are done are looked for and forgotten."""


class Deadlock(Exception):
    """Everybody waits and no timer is set: in the real world this run would hang for ever."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Deterministic: callbacks run in the order in which they were asked for, timers in the order of their time.

    Nothing of the outside is heard: threads and sockets have no place in virtual time. What is to run is put where
    asyncio's own loop keeps it.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[tuple[float, int, asyncio.Handle | asyncio.Future[None]]]
    """By time, and of one time in the order of being asked for: what is to run, or who sleeps until then."""
    _stopping: bool
    _clock_resolution: float

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._numbers = itertools.count()
        self._tasks: dict[int, list[asyncio.Task[Any]]] = {}
        """By node, in order; some of them may be done."""
        self.held: dict[int, list[asyncio.Handle]] = {}
        """What nodes that stand still would do now, in order."""
        self._explain: Callable[[], str] = lambda: ""

    def time(self) -> float:
        return self._now

    def explain_deadlocks(self, explain: Callable[[], str]) -> None:
        """Call a function in a deadlock, while everybody still waits, for more to say about it."""
        self._explain = explain

    def places(self, node: int) -> list[str]:
        """Where the coroutines of a node are."""
        return [_innermost(task.get_coro()) for task in self._tasks.get(node, ()) if not task.done()]

    def on_node(self, node: int, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as code of a node; whatever it starts belongs to the node too."""
        context = copy_context()
        context.run(_node.set, node)
        return self.create_task(work, context=context)

    def pause(self, node: int) -> None:
        """From now on no code of the node runs. What comes for it waits."""
        self.held.setdefault(node, [])

    def resume(self, node: int) -> None:
        """The node goes on where it stood, with all that has come meanwhile."""
        self._ready.extend(self.held.pop(node, ()))

    def end(self, node: int) -> None:
        """All that runs on the node is cancelled at once: none of it takes another step but to tidy up."""
        for task in self._tasks.pop(node, ()):
            task.cancel()
        self.resume(node)

    def close(self) -> None:
        """What ran here is forgotten at once, and need not be found by the garbage collector."""
        super().close()
        self._tasks.clear()
        self._explain = lambda: ""

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        context = options.get("context")
        node = _node.get() if context is None else context.get(_node)
        if node is not None:
            mine = self._tasks.setdefault(node, [])
            if len(mine) > _MANY:
                mine[:] = [task for task in mine if not task.done()]
            mine.append(task)
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
        heapq.heappush(self._scheduled, (when, next(self._numbers), timer))
        return timer

    def after(self, seconds: float) -> asyncio.Future[None]:
        """Done after so long: a shorter way than asyncio.sleep."""
        waking: asyncio.Future[None] = self.create_future()
        heapq.heappush(self._scheduled, (self._now + seconds, next(self._numbers), waking))
        return waking

    def _write_to_self(self) -> None:
        """Nobody has to be woken: the loop never sleeps."""

    def _run_once(self) -> None:
        """What asyncio calls over and over for one round: here all of them, until the loop is stopped."""
        ready, scheduled, held = self._ready, self._scheduled, self.held
        while not self._stopping:
            if not ready:
                self._pass_time()
            while scheduled and scheduled[0][0] < self._now + self._clock_resolution:
                due = heapq.heappop(scheduled)[2]
                if isinstance(due, asyncio.Handle):
                    ready.append(due)
                elif not due.done():
                    due.set_result(None)
            for _ in range(len(ready)):
                call: Any = ready.popleft()  # typeshed does not know that it has a context
                if held and (node := call._context.get(_node)) in held:
                    held[node].append(call)
                elif not call._cancelled:
                    call._run()

    def _pass_time(self) -> None:
        """Nobody has anything to do: it is the time of the first who waits for one."""
        scheduled = self._scheduled
        while scheduled and scheduled[0][2].cancelled():
            heapq.heappop(scheduled)
        if not scheduled:
            raise Deadlock(f"every coroutine waits and no timer is set{self._explain()}")
        self._now += max(0.0, scheduled[0][0] - self._now)


def _innermost(coroutine: Any) -> str:
    """The function that a coroutine waits in, and its line; those of libraries belong to who called them."""
    place = ""
    while (code := getattr(coroutine, "cr_code", None)) is not None:
        if coroutine.cr_frame is not None and "culm" in code.co_filename:
            place = f"{code.co_qualname}:{coroutine.cr_frame.f_lineno}"
        coroutine = coroutine.cr_await
    return place


def virtual_loop() -> VirtualLoop:
    """The loop that the caller runs in, which has to be a virtual one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "a simulated cluster lives in virtual time: use run_virtual"
    return loop


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Little of what is made in virtual time is a cycle: the collector would look through much, often, for nothing.

    It looks when this ends. Around all that knows of a run, it finds that gone: what it finds in use it would keep for
    later, to look through all that several runs have left, which is long out of the processor's cache.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _COLLECTED:
        gc.set_threshold(_COLLECTED, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@seldom_collected()
def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time; what is still running then is cancelled. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def _passing(seconds: float) -> Awaitable[None]:
    """As asyncio.sleep."""
    return virtual_loop().after(seconds) if seconds > 0 else asyncio.sleep(0)


class Hurt(Protocol):
    """What may befall a node while it works."""

    def reached(self, node: int, step: int, action: str) -> bool:
        """A node has done an action and nobody knows of it yet. Whether something strikes now, that node or another."""

    def disk_s(self, node: int | None) -> float:
        """How long a call of the outside takes on a node."""


class VirtualClock:
    """The clock of a simulated cluster. `cost` says how many virtual seconds an action of a node in a step takes."""

    def __init__(self, cost: Callable[[int, int, str], float] | None = None) -> None:
        self._cost = cost or (lambda *_: 0.0)
        self.hurt: Hurt | None = None

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await _passing(seconds)

    async def work(self, node: int, step: int, action: str) -> None:
        await _passing(self._cost(node, step, action))
        if self.hurt is not None and self.hurt.reached(node, step, action):
            await asyncio.sleep(0)  # where it befalls this node, this is as far as it gets

    async def aside(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        await _passing(0.0 if self.hurt is None else self.hurt.disk_s(_node.get()))
        return slow(*args, **kwargs)

    def struck_at(self, node: int) -> float | None:
        """Nobody notes it: in a simulation a blow is seen as soon as the latency allows."""
        del node
        return None
