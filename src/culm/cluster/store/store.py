"""Store: the small set of keys that all nodes agree on. Compare-and-swap, watches, and keys bound to a client's
session.

`MemoryStore` holds the keys in this process: simulated clusters use it directly, and `StoreServer` serves it to other
processes over the transport. `etcd/` gives the same guarantees over etcd.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import msgspec

from culm.errors import RunError

if TYPE_CHECKING:
    from culm.transport.interface import Address, ControlMessage, Transport


class SessionLost(RunError):
    """The session of a client in the store has ended although the client runs: it was silent for too long, or another
    client has ended it. The client cannot write any more."""


class StoreChange(NamedTuple):
    """A key and its new value; None: the key was deleted."""

    key: str
    value: bytes | None


class KeyVersion(NamedTuple):
    """Which write of a key a value is from, by counters that only the store itself can advance. No client can write a
    key twice at the same version, not even by deleting it in between."""

    created: int
    """Revision of the store at which the key was created."""
    writes: int
    """Number of writes since then, that one included."""

    def next(self) -> KeyVersion:
        """The version of the next write, unless the key is deleted before."""
        return KeyVersion(self.created, self.writes + 1)


class VersionedValue(NamedTuple):
    """A value and the write that it is from."""

    value: bytes
    version: KeyVersion


class VersionedChange(NamedTuple):
    """A change of a key, and the write that it is."""

    change: StoreChange
    version: KeyVersion


StoreListener: TypeAlias = Callable[[StoreChange], None]


class Store(Protocol):
    """A client of the store."""

    async def get(self, key: str) -> bytes | None:
        """The value of a key; None: there is no such key."""

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        """Set a key. With `session`, it is deleted when this client's session ends."""

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        """Set a key if its value is `old` (None: if it does not exist). Returns whether it was set."""

    async def delete(self, key: str) -> None:
        """Delete a key; a missing key is not an error."""

    def watch(self, prefix: str) -> AsyncGenerator[StoreChange, None]:
        """Yield the existing keys by name, then every change in order. Close it with contextlib.aclosing."""


class VersionedStore(Protocol):
    """A client of a store that counts the writes of each key."""

    async def read_version(self, key: str) -> VersionedValue | None:
        """The value of a key and its version; None: there is no such key."""

    async def write_version(
        self, key: str, value: bytes, current: KeyVersion | None, *, session: bool = False, replaced: bytes = b""
    ) -> bool:
        """Set a key if its version is `current` (None: if it does not exist). Returns whether it was set. `replaced`:
        the value that it had, if it is known."""

    async def delete(self, key: str) -> None:
        """Delete a key; a missing key is not an error."""

    async def evict(self, key: str) -> bool:
        """End the session that a key belongs to. Returns False if there is none."""

    def watch_versions(self, prefix: str) -> AsyncGenerator[VersionedChange, None]:
        """As `Store.watch`, with versions."""


class MemoryStore:
    """The keys of a store, in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._sessions: dict[str, set[str]] = {}
        self._listeners: dict[StoreListener, str] = {}

    def client(self, session: str) -> StoreClient:
        """A client whose session keys are deleted by `end_session(session)`."""
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
        for listener, prefix in list(self._listeners.items()):
            if key.startswith(prefix):
                listener(StoreChange(key, value))

    def swap(self, key: str, old: bytes | None, new: bytes, session: str | None = None) -> bool:
        if self._values.get(key) != old:
            return False
        self.write(key, new, session)
        return True

    def delete(self, key: str) -> None:
        """Delete a key. Listeners are not called if it did not exist."""
        if key in self._values:
            self.write(key, None)

    def end_session(self, session: str) -> None:
        """Delete the session keys of a client that is gone."""
        for key in sorted(self._sessions.pop(session, set())):
            self.write(key, None)

    def listen(self, prefix: str, listener: StoreListener) -> Callable[[], None]:
        """Call `listener` for each existing key and for every change, synchronously and in order. Returns a function
        that ends this."""
        for key in sorted(k for k in self._values if k.startswith(prefix)):
            listener(StoreChange(key, self._values[key]))
        self._listeners[listener] = prefix

        def end() -> None:
            self._listeners.pop(listener, None)

        return end

    def subscribe(self, prefix: str) -> asyncio.Queue[StoreChange]:
        """Like `listen`, with a queue, for the lifetime of the store."""
        queue: asyncio.Queue[StoreChange] = asyncio.Queue()
        self.listen(prefix, queue.put_nowait)
        return queue


class StoreClient:
    """A client in the store's own process."""

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

    async def watch(self, prefix: str) -> AsyncGenerator[StoreChange, None]:
        queue: asyncio.Queue[StoreChange] = asyncio.Queue()
        end = self._store.listen(prefix, queue.put_nowait)
        try:
            while True:
                yield await queue.get()
        finally:
            end()


class GetCall(msgspec.Struct, frozen=True, tag="get"):
    call_id: int
    key: str


class PutCall(msgspec.Struct, frozen=True, tag="put"):
    call_id: int
    key: str
    value: bytes
    session: bool


class SwapCall(msgspec.Struct, frozen=True, tag="swap"):
    call_id: int
    key: str
    old: bytes | None
    new: bytes
    session: bool


class DeleteCall(msgspec.Struct, frozen=True, tag="delete"):
    call_id: int
    key: str


class WatchCall(msgspec.Struct, frozen=True, tag="watch"):
    call_id: int
    prefix: str


class UnwatchCall(msgspec.Struct, frozen=True, tag="unwatch"):
    call_id: int
    """Id of the watch call that ends."""


class StoreReply(msgspec.Struct, frozen=True, tag="reply"):
    call_id: int
    value: bytes | None = None
    succeeded: bool = True


class WatchUpdate(msgspec.Struct, frozen=True, tag="watch_update"):
    call_id: int
    key: str
    value: bytes | None


StoreCall: TypeAlias = GetCall | PutCall | SwapCall | DeleteCall | WatchCall | UnwatchCall
StoreAnswer: TypeAlias = StoreReply | WatchUpdate
_encode = msgspec.msgpack.Encoder().encode
_call_decoder = msgspec.msgpack.Decoder(StoreCall)
_answer_decoder = msgspec.msgpack.Decoder(StoreAnswer)


class StoreServer:
    """Serves a MemoryStore to other processes. A client that disconnects loses its session keys and its watches."""

    def __init__(self, store: MemoryStore, transport: Transport) -> None:
        self._store, self._transport = store, transport
        self._watches: dict[Address, dict[int, Callable[[], None]]] = {}

    async def serve(self) -> None:
        """Serve calls until cancelled."""
        try:
            while True:
                self._handle_message(await self._transport.receive_message())
        finally:
            for client in list(self._watches):
                self._end_watches(client)

    def _handle_message(self, message: ControlMessage) -> None:
        client, body = message
        if body is None:
            self._store.end_session(client)
            self._end_watches(client)
            return
        try:
            call = _call_decoder.decode(body)
        except msgspec.MsgspecError:
            return  # not a store client: it expects no answer and must not end the service for the others
        reply = self._answer_call(client, call)
        if reply is not None:
            self._transport.send_message(client, _encode(reply))

    def _answer_call(self, client: Address, store_call: StoreCall) -> StoreReply | None:
        match store_call:
            case GetCall(call, key):
                return StoreReply(call, self._store.read(key))
            case PutCall(call, key, value, session):
                self._store.write(key, value, client if session else None)
                return StoreReply(call)
            case SwapCall(call, key, old, new, session):
                return StoreReply(call, succeeded=self._store.swap(key, old, new, client if session else None))
            case DeleteCall(call, key):
                self._store.delete(key)
                return StoreReply(call)
            case WatchCall(call, prefix):
                self._watches.setdefault(client, {})[call] = self._watch(client, call, prefix)
            case UnwatchCall(call):
                self._watches.get(client, {}).pop(call, _do_nothing)()
        return None

    def _watch(self, client: Address, call: int, prefix: str) -> Callable[[], None]:
        def on_change(change: StoreChange) -> None:
            self._transport.send_message(client, _encode(WatchUpdate(call, change.key, change.value)))

        return self._store.listen(prefix, on_change)

    def _end_watches(self, client: Address) -> None:
        for end in self._watches.pop(client, {}).values():
            end()


def _do_nothing() -> None:
    pass


class RemoteStore:
    """A client in another process. The reader of its transport passes messages from the server to `handle_answer`.

    When the connection breaks, all current and later calls and watches raise RunError.
    """

    def __init__(self, server: Address, transport: Transport) -> None:
        self.server, self._transport = server, transport
        self._call_ids = itertools.count()
        self._replies: dict[int, asyncio.Future[StoreReply]] = {}
        self._queues: dict[int, asyncio.Queue[StoreChange | None]] = {}
        self._broken = False

    def handle_answer(self, body: bytes | None) -> None:
        """Handle an answer of the server; None: the connection broke, so that no call will be answered."""
        if body is None:
            self._fail_all()
            return
        answer = _answer_decoder.decode(body)
        if isinstance(answer, WatchUpdate):
            queue = self._queues.get(answer.call_id)
            if queue is not None:
                queue.put_nowait(StoreChange(answer.key, answer.value))
            return
        waiting = self._replies.get(answer.call_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _fail_all(self) -> None:
        self._broken = True
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(_connection_error())
        for queue in self._queues.values():
            queue.put_nowait(None)

    async def _call_server(self, call: StoreCall) -> StoreReply:
        if self._broken:
            raise _connection_error()
        self._replies[call.call_id] = asyncio.get_running_loop().create_future()
        self._transport.send_message(self.server, _encode(call))
        try:
            return await self._replies[call.call_id]
        finally:
            del self._replies[call.call_id]

    async def get(self, key: str) -> bytes | None:
        return (await self._call_server(GetCall(next(self._call_ids), key))).value

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        await self._call_server(PutCall(next(self._call_ids), key, value, session))

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        return (await self._call_server(SwapCall(next(self._call_ids), key, old, new, session))).succeeded

    async def delete(self, key: str) -> None:
        await self._call_server(DeleteCall(next(self._call_ids), key))

    async def watch(self, prefix: str) -> AsyncGenerator[StoreChange, None]:
        if self._broken:
            raise _connection_error()
        call = next(self._call_ids)
        queue = self._queues[call] = asyncio.Queue()
        self._transport.send_message(self.server, _encode(WatchCall(call, prefix)))
        try:
            while (change := await queue.get()) is not None:
                yield change
            raise _connection_error()
        finally:
            del self._queues[call]
            self._transport.send_message(self.server, _encode(UnwatchCall(call)))


def _connection_error() -> RunError:
    return RunError("the connection to the store broke")
