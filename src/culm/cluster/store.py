"""The store: the few facts that all nodes agree on. Keys, compare-and-swap, watches, and keys that end with a session.

`MemoryStore` is the thing itself: simulated clusters use it directly, and `StoreServer` lends it to other processes
over the same transport that carries everything else.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec

from culm.errors import RunError

if TYPE_CHECKING:
    from culm.transport.base import Address, Letter, Transport


class Change(NamedTuple):
    """A key and its new value; None: it is gone."""

    key: str
    value: bytes | None


class Store(Protocol):
    """What nodes agree on."""

    async def get(self, key: str) -> bytes | None:
        """The value of a key."""

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        """Set a key; with `session` it goes when this client's connection does."""

    async def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        """Set a key if it has the value `old` (None: if it is not there). False: somebody was faster."""

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        """What is there, then every change in order."""


class MemoryStore:
    """The keys themselves, in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._sessions: dict[str, set[str]] = {}
        self._watchers: dict[asyncio.Queue[Change], str] = {}

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
        for queue, prefix in self._watchers.items():
            if key.startswith(prefix):
                queue.put_nowait(Change(key, value))

    def swap(self, key: str, old: bytes | None, new: bytes, session: str | None = None) -> bool:
        if self._values.get(key) != old:
            return False
        self.write(key, new, session)
        return True

    def end(self, session: str) -> None:
        """The client is gone, and its session keys with it."""
        for key in sorted(self._sessions.pop(session, set())):
            self.write(key, None)

    def subscribe(self, prefix: str) -> asyncio.Queue[Change]:
        queue: asyncio.Queue[Change] = asyncio.Queue()
        for key in sorted(k for k in self._values if k.startswith(prefix)):
            queue.put_nowait(Change(key, self._values[key]))
        self._watchers[queue] = prefix
        return queue

    def unsubscribe(self, queue: asyncio.Queue[Change]) -> None:
        self._watchers.pop(queue, None)


class StoreClient:
    """A client in the process of the store."""

    def __init__(self, store: MemoryStore, session: str) -> None:
        self._store, self._session = store, session

    async def get(self, key: str) -> bytes | None:
        return self._store.read(key)

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        self._store.write(key, value, self._session if session else None)

    async def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        return self._store.swap(key, old, new)

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        queue = self._store.subscribe(prefix)
        try:
            while True:
                yield await queue.get()
        finally:
            self._store.unsubscribe(queue)


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


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    call: int
    prefix: str


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    call: int
    value: bytes | None = None
    done: bool = True


class News(msgspec.Struct, frozen=True, tag="news"):
    call: int
    key: str
    value: bytes | None


Call: TypeAlias = Get | Put | Swap | Watch
Answer: TypeAlias = Reply | News
_encode = msgspec.msgpack.Encoder().encode
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


class StoreServer:
    """Lends a MemoryStore to other processes. A client that disconnects loses its session keys."""

    def __init__(self, store: MemoryStore, transport: Transport) -> None:
        self._store, self._transport = store, transport
        self._watches: dict[Address, list[asyncio.Task[None]]] = {}

    async def serve(self) -> None:
        """Answer until cancelled."""
        try:
            while True:
                self._answer(await self._transport.letter())
        finally:
            for tasks in self._watches.values():
                for task in tasks:
                    task.cancel()

    def _answer(self, letter: Letter) -> None:
        client, body = letter
        if body is None:
            self._store.end(client)
            for task in self._watches.pop(client, []):
                task.cancel()
            return
        reply: Answer | None = None
        match _calls.decode(body):
            case Get(call, key):
                reply = Reply(call, self._store.read(key))
            case Put(call, key, value, session):
                self._store.write(key, value, client if session else None)
                reply = Reply(call)
            case Swap(call, key, old, new):
                reply = Reply(call, done=self._store.swap(key, old, new))
            case Watch(call, prefix):
                task = asyncio.create_task(self._watch(client, call, prefix))
                self._watches.setdefault(client, []).append(task)
        if reply is not None:
            self._transport.post(client, _encode(reply))

    async def _watch(self, client: Address, call: int, prefix: str) -> None:
        queue = self._store.subscribe(prefix)
        try:
            while True:
                change = await queue.get()
                self._transport.post(client, _encode(News(call, change.key, change.value)))
        finally:
            self._store.unsubscribe(queue)


class RemoteStore:
    """A client in another process. Whoever reads the letters of its transport hands those of the server to `heed`."""

    def __init__(self, server: Address, transport: Transport) -> None:
        self.server, self._transport = server, transport
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._queues: dict[int, asyncio.Queue[Change | None]] = {}

    def heed(self, body: bytes | None) -> None:
        """An answer of the server; None: the connection to it broke, and nothing will ever be answered."""
        if body is None:
            for waiting in self._replies.values():
                if not waiting.done():
                    waiting.set_exception(RunError("the connection to the store broke"))
            for queue in self._queues.values():
                queue.put_nowait(None)
            return
        answer = _answers.decode(body)
        if isinstance(answer, News):
            self._queues[answer.call].put_nowait(Change(answer.key, answer.value))
        elif not (waiting := self._replies[answer.call]).done():
            waiting.set_result(answer)

    async def _ask(self, call: Call) -> Reply:
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

    async def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        return (await self._ask(Swap(next(self._numbers), key, old, new))).done

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        call = next(self._numbers)
        queue = self._queues[call] = asyncio.Queue()
        self._transport.post(self.server, _encode(Watch(call, prefix)))
        while (change := await queue.get()) is not None:
            yield change
        raise RunError("the connection to the store broke")
