"""Virtual time: an asyncio event loop whose clock jumps to the next timer when nobody has anything to do.

Code that runs in the loop may belong to a node. Then it can be made to stand still, as SIGSTOP does it, and to end.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, TypeVarTuple, Unpack
from weakref import WeakKeyDictionary

A = ParamSpec("A")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_node: ContextVar[int | None] = ContextVar("node", default=None)


class Deadlock(Exception):
    """Everybody waits and no timer is set: in the real world this run would hang for ever."""


class _NoWaiting(selectors.SelectSelector):
    """A selector that never sleeps: it moves the virtual clock instead."""

    def __init__(self, loop_time: list[float]) -> None:
        super().__init__()
        self._time = loop_time
        self.explain: Callable[[], str] = lambda: ""

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"every coroutine waits and no timer is set{self.explain()}")
        self._time[0] += max(0.0, timeout)
        return []


@dataclass(slots=True, eq=False)
class _Call:
    """A callback of a node: run when its turn comes, unless the node stands still then."""

    loop: VirtualLoop
    node: int
    callback: Callable[..., object]
    arguments: tuple[Any, ...]
    context: Context
    handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        held = self.loop.held.get(self.node)
        if held is not None:
            held.append(self)
        elif self.handle is None or not self.handle.cancelled():  # it may have been called off while it was held
            self.callback(*self.arguments)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic: callbacks run in the order in which they were asked for, timers in the order of their time.

    Nothing of the outside is heard: threads and sockets have no place in virtual time.
    """

    def __init__(self) -> None:
        self._virtual = [0.0]
        self._tasks: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self.held: dict[int, list[_Call]] = {}
        """What nodes that stand still would do now, in order."""
        self._selector_of_time = _NoWaiting(self._virtual)
        super().__init__(self._selector_of_time)

    def time(self) -> float:
        return self._virtual[0]

    def explain_deadlocks(self, explain: Callable[[], str]) -> None:
        """Call a function in a deadlock, while everybody still waits, for more to say about it."""
        self._selector_of_time.explain = explain

    def places(self, node: int) -> list[str]:
        """Where the coroutines of a node are."""
        tasks = [task for task, owner in self._tasks.items() if owner == node and not task.done()]
        return [_innermost(task.get_coro()) for task in tasks]

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
        for call in self.held.pop(node, ()):
            super().call_soon(call, context=call.context)

    def end(self, node: int) -> None:
        """All that runs on the node is cancelled at once: none of it takes another step but to tidy up."""
        for task in [task for task, owner in self._tasks.items() if owner == node]:
            task.cancel()
        self.resume(node)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(coro, **options)
        context = options.get("context")
        node = _node.get() if context is None else context.get(_node)
        if node is not None:
            self._tasks[task] = node
        return task

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        call = self._owned(callback, args, context)
        if call is None:
            return super().call_soon(callback, *args, context=context)
        call.handle = super().call_soon(call, context=call.context)
        return call.handle

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        call = self._owned(callback, args, context)
        if call is None:
            return super().call_at(when, callback, *args, context=context)
        call.handle = timer = super().call_at(when, call, context=call.context)
        return timer

    def _owned(self, callback: Any, args: tuple[Any, ...], context: Context | None) -> _Call | None:
        context = copy_context() if context is None else context
        node = context.get(_node)
        return None if node is None else _Call(self, node, callback, args, context)


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


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time; what is still running then is cancelled. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Hurt(Protocol):
    """What may befall a node while it works."""

    def reached(self, node: int, step: int, action: str) -> Awaitable[None]:
        """A node has done an action and nobody knows of it yet. May not return: the node is gone, or stands still."""

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
        await asyncio.sleep(seconds)

    async def work(self, node: int, step: int, action: str) -> None:
        await asyncio.sleep(self._cost(node, step, action))
        if self.hurt is not None:
            await self.hurt.reached(node, step, action)

    async def aside(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        await asyncio.sleep(0.0 if self.hurt is None else self.hurt.disk_s(_node.get()))
        return slow(*args, **kwargs)

    def struck_at(self, node: int) -> float | None:
        """Nobody notes it: in a simulation a blow is seen as soon as the latency allows."""
        del node
        return None
