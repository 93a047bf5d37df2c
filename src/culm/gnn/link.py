"""Connections of graph servers, parameter servers and workers: one socket, both directions, messages with tensors.

    prefix    4 bytes length of the header
    header    msgpack: (message, [(type, shape), ...])
    payload   the bytes of each tensor, in order

Whoever dials proves the run's token and demands the proof (culm.transport.wire): a worker of another run, or one
without a token, is not let in. Sending never blocks: what the kernel has no room for waits here, uncopied.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from culm.errors import RunError
from culm.gnn.messages import Message, decode, encode
from culm.transport import wire
from culm.transport.links import HANDSHAKE_S, tune

if TYPE_CHECKING:
    from torch import Tensor

Heard = Callable[["Link", Message, "list[Tensor]"], None]
Lost = Callable[["Link"], None]
_TYPES = {"f": torch.float32, "q": torch.int64, "i": torch.int32, "B": torch.uint8}
_CODES = {kind: code for code, kind in _TYPES.items()}
_STAGE = 1 << 16
_SMALL = 1 << 15
"""Tensors up to this size travel in one piece with their header: a copy is cheaper than a system call."""
_headers = msgspec.msgpack.Decoder(tuple[msgspec.Raw, list[tuple[str, tuple[int, ...]]]])


class Link:
    """One end. `heard` and `lost` are called from the event loop; after `lost`, or after `close`, nothing is heard."""

    def __init__(self, sock: socket.socket, name: str, heard: Heard, lost: Lost) -> None:
        tune(sock)
        self.name, self._sock, self._heard, self._lost = name, sock, heard, lost
        self._loop = asyncio.get_running_loop()
        self._queue: collections.deque[memoryview] = collections.deque()
        self._stage = memoryview(bytearray(_STAGE))
        self._filled = 0
        self._message: Message | None = None
        self._tensors: list[Tensor] = []
        self._rest: collections.deque[memoryview] = collections.deque()
        """Parts of the payload that are still to come."""
        self._open = True
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Queue a message. Large tensors must not change until it has arrived. On a closed link nothing happens."""
        if self._open:
            self.pass_on(frame(message, tensors))

    def pass_on(self, framed: Sequence[memoryview]) -> None:
        """As `send`, for what goes to several: it is framed once."""
        if not self._open:
            return
        idle = not self._queue
        self._queue.extend(framed)
        if idle:
            self._flush()

    def close(self) -> None:
        """End it at once, without `lost`."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    async def drained(self) -> None:
        """Wait until the kernel has everything."""
        while self._queue and self._open:
            await asyncio.sleep(0.001)

    def _flush(self) -> None:
        try:
            while self._queue:
                sent = self._sock.sendmsg(list(self._queue)[:32])
                while sent:
                    head = self._queue[0]
                    if sent < len(head):
                        self._queue[0] = head[sent:]
                        break
                    sent -= len(self._queue.popleft())
        except BlockingIOError:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        except OSError:
            self._loop.call_soon(self._fail)  # not from inside `send`: who sends may be going through all links

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        self._flush()

    def _readable(self) -> None:
        """Large payloads go straight into their tensors, all else through the stage."""
        try:
            while self._open:
                room = self._rest[0] if self._rest and not self._filled else self._stage[self._filled :]
                count = self._sock.recv_into(room)
                if count == 0:
                    raise ConnectionError
                if self._rest and not self._filled:
                    self._received(count)
                else:
                    self._filled += count
                    self._parse()
                if count < len(room):
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError, TypeError, msgspec.MsgspecError, RuntimeError):
            self._fail()

    def _received(self, count: int) -> None:
        part = self._rest[0]
        if count < len(part):
            self._rest[0] = part[count:]
            return
        self._rest.popleft()
        if not self._rest:
            self._deliver()

    def _parse(self) -> None:
        """Take all that is complete off the stage."""
        at = 0
        while self._open:
            if self._message is None:
                used = self._header(self._stage[at : self._filled])
                if used == 0:
                    break
                at += used
            at += self._payload(at)
            if self._rest:
                break
            self._deliver()
        rest = self._filled - at
        if rest and at:
            self._stage[:rest] = bytes(self._stage[at : self._filled])
        self._filled = rest

    def _header(self, data: memoryview) -> int:
        """Begin a message; returns the bytes it took, 0 while it is not complete."""
        if len(data) < wire.PREFIX.size:
            return 0
        length: int = wire.PREFIX.unpack_from(data)[0]
        whole = wire.PREFIX.size + length
        if length > wire.LONGEST_HEADER:
            raise ValueError("a header too long")
        if len(data) < whole:
            self._grow(whole)
            return 0
        body, shapes = _headers.decode(data[wire.PREFIX.size : whole])
        self._message = decode(body)
        self._tensors = [torch.empty(shape, dtype=_TYPES[code]) for code, shape in shapes]
        self._rest.extend(_memory(t) for t in self._tensors if t.numel())
        return whole

    def _grow(self, size: int) -> None:
        """A header longer than the stage: there is one at the start of a run."""
        if size > len(self._stage):
            larger = memoryview(bytearray(2 * size))
            larger[: self._filled] = self._stage[: self._filled]
            self._stage = larger

    def _payload(self, at: int) -> int:
        """Move what is on the stage into the tensors; returns the bytes that it took."""
        start = at
        while self._rest and at < self._filled:
            part = self._rest[0]
            count = min(len(part), self._filled - at)
            part[:count] = self._stage[at : at + count]
            at += count
            if count < len(part):
                self._rest[0] = part[count:]
            else:
                self._rest.popleft()
        return at - start

    def _deliver(self) -> None:
        message, tensors = self._message, self._tensors
        assert message is not None
        self._message, self._tensors = None, []
        self._heard(self, message, tensors)

    def _fail(self) -> None:
        if self._open:
            self.close()
            self._lost(self)


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor: to be read, or to be received into."""
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]


def frame(message: Message, tensors: Sequence[Tensor] = ()) -> list[memoryview]:
    """A message as it travels. Large tensors are not copied."""
    pieces = [tensor.detach().contiguous() for tensor in tensors]
    described = [(_CODES[p.dtype], tuple(p.shape)) for p in pieces]
    header = msgspec.msgpack.encode((msgspec.Raw(encode(message)), described))
    bodies = [_memory(p) for p in pieces if p.numel()]
    if sum(map(len, bodies)) <= _SMALL:
        return [memoryview(b"".join([wire.PREFIX.pack(len(header)), header, *bodies]))]
    return [memoryview(wire.PREFIX.pack(len(header)) + header), *bodies]


async def dial(address: str, token: str, name: str, heard: Heard, lost: Lost) -> Link:
    """Call somebody of this run. Raises RunError if nobody answers, or if he does not know the token."""
    host, _, port = address.rpartition(":")

    def connect() -> socket.socket:
        sock = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
        try:
            wire.introduce(sock, token.encode(), name)
        except BaseException:
            sock.close()
            raise
        return sock

    try:
        return Link(await asyncio.to_thread(connect), address, heard, lost)
    except (OSError, ValueError) as error:
        raise RunError(f"{address} does not answer: {error}") from None


class Listener:
    """Takes calls. `accepted` gets the caller's name and socket once the token is proved; strangers are hung up on."""

    def __init__(self, token: str, accepted: Callable[[str, socket.socket], None], host: str = "127.0.0.1") -> None:
        self._token, self._accepted = token, accepted
        # A machine may be reached under an address that it does not have itself.
        bound = host if host.startswith("127.") else ""
        self._sock = socket.create_server((bound, 0), backlog=256)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self.address = f"{host}:{self.port}"
        self.refused = 0
        """Callers that could not prove the token."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keep(self._accept())

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._sock)
            self._keep(self._meet(sock))

    async def _meet(self, sock: socket.socket) -> None:
        def welcome() -> str:
            sock.settimeout(HANDSHAKE_S)
            return wire.welcome(sock, self._token.encode())

        try:
            name = await asyncio.to_thread(welcome)
        except (OSError, RunError, ValueError):
            self.refused += 1
            sock.close()
            return
        self._accepted(name, sock)

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(OSError):
            self._sock.close()
