"""The store: the few facts that all nodes agree on. Keys, compare-and-swap, watches, and keys that end with a session.

`MemoryStore` is the thing itself: simulated clusters use it directly, and `StoreServer` lends it to other processes
over the same transport that carries everything else. `etcd/` keeps the same promises over etcd.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec

from culm.errors import RunError

if TYPE_CHECKING:
    from culm.transport.base import Address, Letter, Transport


class Change(NamedTuple):
    """A key and its new value; None: it is gone."""

    key: str
    value: bytes | None


Listener: TypeAlias = Callable[[Change], None]


class Store(Protocol):
    """What nodes agree on."""

    async def get(self, key: str) -> bytes | None:
        """The value of a key."""

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        """Set a key; with `session` it goes when this client's connection does."""

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        """Set a key if it has the value `old` (None: if it is not there). False: somebody was faster."""

    async def delete(self, key: str) -> None:
        """Remove a key; one that is not there is no error."""

    def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """What is there, by name, then every change in order. Ends with the generator (contextlib.aclosing)."""


class MemoryStore:
    """The keys themselves, in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._sessions: dict[str, set[str]] = {}
        self._listeners: dict[Listener, str] = {}

    def client(self, session: str) -> StoreClient:
        """A client whose session keys end with `end(session)`."""
        return StoreClient(self, session)

    def read(self, key: str) -> bytes | None:
        return self._values.get(key)

    def write(self, key: str, value: bytes | None, session: str | None = None) -> None:
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value
        for keys in self._sessions.values():
            keys.discard(key)
        if session is not None:
            self._sessions.setdefault(session, set()).add(key)
        for heard, prefix in list(self._listeners.items()):
            if key.startswith(prefix):
                heard(Change(key, value))

    def swap(self, key: str, old: bytes | None, new: bytes, session: str | None = None) -> bool:
        if self._values.get(key) != old:
            return False
        self.write(key, new, session)
        return True

    def delete(self, key: str) -> None:
        """Nobody hears of what was not there."""
        if key in self._values:
            self.write(key, None)

    def end(self, session: str) -> None:
        """The client is gone, and its session keys with it."""
        for key in sorted(self._sessions.pop(session, set())):
            self.write(key, None)

    def listen(self, prefix: str, heard: Listener) -> Callable[[], None]:
        """Call a function with what is there and with every change, at once and in order; returns how to end that."""
        for key in sorted(k for k in self._values if k.startswith(prefix)):
            heard(Change(key, self._values[key]))
        self._listeners[heard] = prefix

        def end() -> None:
            self._listeners.pop(heard, None)

        return end

    def subscribe(self, prefix: str) -> asyncio.Queue[Change]:
        """The same as a queue, for as long as the store lives."""
        queue: asyncio.Queue[Change] = asyncio.Queue()
        self.listen(prefix, queue.put_nowait)
        return queue


class StoreClient:
    """A client in the process of the store."""

    def __init__(self, store: MemoryStore, session: str) -> None:
        self._store, self._session = store, session

    async def get(self, key: str) -> bytes | None:
        return self._store.read(key)

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        self._store.write(key, value, self._session if session else None)

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        return self._store.swap(key, old, new, self._session if session else None)

    async def delete(self, key: str) -> None:
        self._store.delete(key)

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        queue: asyncio.Queue[Change] = asyncio.Queue()
        end = self._store.listen(prefix, queue.put_nowait)
        try:
            while True:
                yield await queue.get()
        finally:
            end()


class Get(msgspec.Struct, frozen=True, tag="get"):
    call: int
    key: str


class Put(msgspec.Struct, frozen=True, tag="put"):
    call: int
    key: str
    value: bytes
    session: bool


class Swap(msgspec.Struct, frozen=True, tag="swap"):
    call: int
    key: str
    old: bytes | None
    new: bytes
    session: bool


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    call: int
    key: str


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    call: int
    prefix: str


class Unwatch(msgspec.Struct, frozen=True, tag="unwatch"):
    call: int
    """Of the watch."""


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    call: int
    value: bytes | None = None
    done: bool = True


class News(msgspec.Struct, frozen=True, tag="news"):
    call: int
    key: str
    value: bytes | None


Call: TypeAlias = Get | Put | Swap | Delete | Watch | Unwatch
Answer: TypeAlias = Reply | News
_encode = msgspec.msgpack.Encoder().encode
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


class StoreServer:
    """Lends a MemoryStore to other processes. A client that disconnects loses its session keys and its watches."""

    def __init__(self, store: MemoryStore, transport: Transport) -> None:
        self._store, self._transport = store, transport
        self._watches: dict[Address, dict[int, Callable[[], None]]] = {}

    async def serve(self) -> None:
        """Answer until cancelled."""
        try:
            while True:
                self._heed(await self._transport.letter())
        finally:
            for client in list(self._watches):
                self._forget(client)

    def _heed(self, letter: Letter) -> None:
        client, body = letter
        if body is None:
            self._store.end(client)
            self._forget(client)
            return
        try:
            asked = _calls.decode(body)
        except msgspec.MsgspecError:
            return  # who speaks otherwise does not wait for an answer, and must not end this for everyone else
        reply = self._answer(client, asked)
        if reply is not None:
            self._transport.post(client, _encode(reply))

    def _answer(self, client: Address, asked: Call) -> Reply | None:
        match asked:
            case Get(call, key):
                return Reply(call, self._store.read(key))
            case Put(call, key, value, session):
                self._store.write(key, value, client if session else None)
                return Reply(call)
            case Swap(call, key, old, new, session):
                return Reply(call, done=self._store.swap(key, old, new, client if session else None))
            case Delete(call, key):
                self._store.delete(key)
                return Reply(call)
            case Watch(call, prefix):
                self._watches.setdefault(client, {})[call] = self._watch(client, call, prefix)
            case Unwatch(call):
                self._watches.get(client, {}).pop(call, _nothing)()
        return None

    def _watch(self, client: Address, call: int, prefix: str) -> Callable[[], None]:
        def heard(change: Change) -> None:
            self._transport.post(client, _encode(News(call, change.key, change.value)))

        return self._store.listen(prefix, heard)

    def _forget(self, client: Address) -> None:
        for end in self._watches.pop(client, {}).values():
            end()


def _nothing() -> None:
    pass


class RemoteStore:
    """A client in another process. Whoever reads the letters of its transport hands those of the server to `heed`.

    When the connection breaks, every call and watch ends with RunError: those that wait, and those to come.
    """

    def __init__(self, server: Address, transport: Transport) -> None:
        self.server, self._transport = server, transport
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._queues: dict[int, asyncio.Queue[Change | None]] = {}
        self._broken = False

    def heed(self, body: bytes | None) -> None:
        """An answer of the server; None: the connection to it broke, and nothing will ever be answered."""
        if body is None:
            self._break()
            return
        answer = _answers.decode(body)
        if isinstance(answer, News):
            queue = self._queues.get(answer.call)
            if queue is not None:
                queue.put_nowait(Change(answer.key, answer.value))
            return
        waiting = self._replies.get(answer.call)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _break(self) -> None:
        self._broken = True
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(_broke())
        for queue in self._queues.values():
            queue.put_nowait(None)

    async def _ask(self, call: Call) -> Reply:
        if self._broken:
            raise _broke()
        self._replies[call.call] = asyncio.get_running_loop().create_future()
        self._transport.post(self.server, _encode(call))
        try:
            return await self._replies[call.call]
        finally:
            del self._replies[call.call]

    async def get(self, key: str) -> bytes | None:
        return (await self._ask(Get(next(self._numbers), key))).value

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        await self._ask(Put(next(self._numbers), key, value, session))

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        return (await self._ask(Swap(next(self._numbers), key, old, new, session))).done

    async def delete(self, key: str) -> None:
        await self._ask(Delete(next(self._numbers), key))

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        if self._broken:
            raise _broke()
        call = next(self._numbers)
        queue = self._queues[call] = asyncio.Queue()
        self._transport.post(self.server, _encode(Watch(call, prefix)))
        try:
            while (change := await queue.get()) is not None:
                yield change
            raise _broke()
        finally:
            del self._queues[call]
            self._transport.post(self.server, _encode(Unwatch(call)))


def _broke() -> RunError:
    return RunError("the connection to the store broke")
