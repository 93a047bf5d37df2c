"""The transport over TCP, with one I/O thread per process.

The I/O thread receives in advance while the worker computes, directly into the memory of the tensors, and completes
sends that did not fit into the kernel's buffer. Usually it has nothing to do: sending is one system call in the
caller's thread, and a worker that waits reads for itself, so that a frame wakes one thread and not two.

Gloo's send and receive are not used, because a wait there can be neither polled nor cancelled. ZeroMQ is not used,
because it hides a lost connection, which is the fastest sign of a lost node.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from culm.device.device_sums import NO_GPUS, find_obstacle
from culm.errors import RunError, UsageError
from culm.transport.frames import frame_codec
from culm.transport.frames.connections import (
    HANDSHAKE_S,
    InboundConnection,
    OutboundConnection,
    deliver_frame,
    set_socket_options,
)
from culm.transport.frames.encryption_policy import EncryptionPolicy, encrypts_host
from culm.transport.frames.handshake import authenticate_dialler
from culm.transport.frames.io_thread import SocketIOThread
from culm.transport.frames.lanes import LANES, InboundLanes
from culm.transport.frames.mailbox import Mailbox
from culm.transport.interface import (
    Address,
    ControlMessage,
    DamageHandler,
    FrameKey,
    FrameMemory,
    Group,
    Tensors,
    ignore_damage,
)

if TYPE_CHECKING:
    from torch import Tensor

    from culm.device.device_sums import DeviceSums
    from culm.device.shared_chunks import SharedHostMemory
    from culm.transport.collectives.frame_group import FrameGroup
    from culm.transport.frames.shared_memory import SharedFrames


MIN_SHARED_BYTES = 512 << 10
"""Smaller frames travel over the connection: there a copy takes less time than an acknowledgement."""
MAX_PENDING_HANDSHAKES = 64
"""Handshakes of callers that run at once, each in a thread."""
FORGET_AFTER_S = 60.0
"""A connection that broke and was not needed since is forgotten: most of its ends have been lost."""
ACCEPT_S = 5.0
"""A caller has this long for the whole handshake."""


class SocketTransport:
    """One endpoint: a listening socket, and connections to and from other endpoints."""

    def __init__(
        self,
        *,
        secret: bytes,
        host: str = "127.0.0.1",
        ports: range | None = None,
        spin_s: float = 0.0,
        unacknowledged_s: float = HANDSHAKE_S,
        encryption: EncryptionPolicy = "auto",
        min_shared_bytes: int | None = MIN_SHARED_BYTES,
        lanes: int = LANES,
    ) -> None:
        """`spin_s`: how long a receive polls before it sleeps. `unacknowledged_s`: a connection breaks when the other
        end acknowledges nothing for that long. `encryption`: the same at all endpoints of a run. `min_shared_bytes`:
        frames from this size on travel through shared memory to processes of this machine, unless the connection is
        encrypted; None: no frames. `lanes`: further connections to each endpoint for payloads of more than 4 MiB; 0:
        they follow their header."""
        self._secret, self._encryption = secret, encryption
        self._spin_s, self._unacknowledged_s = spin_s, unacknowledged_s
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._listener = _listen(host, ports)
        self.address: Address = f"{host}:{self._listener.getsockname()[1]}"
        self.mailbox = Mailbox()
        self._messages: asyncio.Queue[ControlMessage] = asyncio.Queue()
        self._undelivered: collections.deque[ControlMessage] = collections.deque()
        """Messages that a thread has read and the event loop has not handled yet."""
        self._outbound: dict[Address, OutboundConnection] = {}
        self._lock = threading.Lock()
        self._damage_handler: DamageHandler = ignore_damage
        self._frame_memory: FrameMemory | None = None
        self._shared_memory: SharedHostMemory | None = None
        self._min_shared_bytes = math.inf if min_shared_bytes is None else min_shared_bytes
        self._shared_frames: SharedFrames | None = None
        self._lanes = lanes
        self._inbound_lanes: dict[tuple[Address, bytes], InboundLanes] = {}
        """By sender and token."""
        self._dropped: collections.deque[tuple[Address, int]] = collections.deque()
        """Frames of shared memory, by sender, that are not used any more here and not acknowledged yet."""
        self._frame_groups: weakref.WeakSet[FrameGroup] = weakref.WeakSet()
        self._handshakes: collections.deque[socket.socket] = collections.deque()
        """Sockets whose handshake is under way, the oldest first."""
        self._io_thread = SocketIOThread(self._listener, self._accept_connection)
        self._loop.add_reader(self._io_thread.inbound_epoll.fileno(), self._io_thread.read_inbound)

    def send(self, to: Address, key: FrameKey, tensors: Sequence[Tensor | None]) -> None:
        frame, connection = frame_codec.encode_frame(key, tensors), self._connection_to(to)
        shares = connection.may_share and sum(map(len, frame.payload)) >= self._min_shared_bytes
        connection.send_frame(frame, self._open_shared_frames() if shares else None)

    def _open_shared_frames(self) -> SharedFrames:
        if self._shared_frames is None:
            from culm.transport.frames.shared_memory import SharedFrames  # imports torch, which launchers do not need

            self._shared_frames = SharedFrames(
                chunks=None if self._shared_memory is None else self._shared_memory.chunks
            )
        return self._shared_frames

    def send_message(self, to: Address, body: bytes) -> None:
        self._connection_to(to).send(frame_codec.encode_message(body))

    def set_computing(self, computing: bool) -> None:
        if self._frame_memory is None:  # a device leaves the processor time to read every frame in advance
            self._io_thread.set_computing(computing)

    def try_receive(self, key: FrameKey) -> Tensors | None:
        frame = self.mailbox.take(key)
        if frame is None:
            self._io_thread.read_inbound()
            frame = self.mailbox.take(key)
        return frame

    async def receive(self, key: FrameKey) -> Tensors:
        frame = self._spin_for_frame(key)
        return frame if frame is not None else await self._receive_without_polling(key)

    async def _receive_without_polling(self, key: FrameKey) -> Tensors:
        with self._io_thread.reading_in_caller():
            return await self.mailbox.get(key)

    def _spin_for_frame(self, key: FrameKey) -> Tensors | None:
        """Poll for a frame for up to `spin_s` seconds before the caller sleeps: waking up takes longer than most frames
        do. Each turn yields the core to other processes. A control message ends the polling: it may be urgent."""
        until = time.perf_counter() + self._spin_s
        while (frame := self.mailbox.take(key)) is None and not self._undelivered and time.perf_counter() < until:
            os.sched_yield()
            self._io_thread.read_inbound()
        return frame

    async def receive_message(self) -> ControlMessage:
        return await self._messages.get()

    def close_epochs(self, below: int) -> dict[FrameKey, Tensors]:
        for connection in list(self._outbound.values()):
            connection.drop_epochs(below)
        return self.mailbox.close_epochs(below)

    def set_frame_memory(self, allocate: FrameMemory, shared: SharedHostMemory | None = None) -> None:
        self._frame_memory, self._shared_memory = allocate, shared
        frame_codec.use_threads(len(os.sched_getaffinity(0)))
        self._spin_s = 0.0  # outputs of the device are sent by the event loop, which must not poll meanwhile

    def _allocate_frame(self, tensors: list[Tensor]) -> list[Tensor] | None:
        return None if self._frame_memory is None else self._frame_memory(tensors)

    def release_sent_frames(self) -> None:
        for connection in list(self._outbound.values()):
            connection.release_sent_frames()
        if self._shared_frames is not None:
            self._shared_frames.release_of_ended_receivers()

    def set_damage_handler(self, handler: DamageHandler) -> None:
        self._damage_handler = handler

    def group(self, key: FrameKey, members: Sequence[Address], sums: DeviceSums | None = None) -> Group:
        """Sums travel over encrypted frames if a connection between two members is encrypted, else over NCCL or Gloo,
        whose connections cannot be encrypted."""
        # A launcher uses no groups and does not import torch.
        if any(encrypts_host(self._encryption, member.rpartition(":")[0]) for member in members):
            from culm.transport.collectives.frame_group import FrameGroup

            has_gpu = sums is not None and find_obstacle([sums.support()]) != NO_GPUS
            missed = "connections are encrypted, which NCCL's cannot be" if has_gpu else ""
            group = FrameGroup(self, key, members, self._receive_without_polling, fallback_reason=missed)
            self._frame_groups.add(group)
            return group
        if sums is not None:
            from culm.transport.collectives.nccl import NcclGroup

            return NcclGroup(self, key, members, sums)
        from culm.transport.collectives.gloo import GlooGroup

        return GlooGroup(self, key, members)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(
            *(asyncio.to_thread(connection.drain, HANDSHAKE_S) for connection in list(self._outbound.values()))
        )
        self._loop.remove_reader(self._io_thread.inbound_epoll.fileno())
        self._io_thread.stop()
        for lanes in list(self._inbound_lanes.values()):
            lanes.close()
        if self._shared_frames is not None:
            self._shared_frames.close()

    def _connection_to(self, to: Address) -> OutboundConnection:
        """The connection to an endpoint. A broken one is replaced: the endpoint may still exist."""
        connection = self._outbound.get(to)
        if connection is None or connection.may_redial:
            with self._lock:
                connection = self._outbound.get(to)
                if connection is None or connection.may_redial:
                    self._forget_broken_connections()
                    connection = self._outbound[to] = OutboundConnection(
                        self._io_thread, to, self._report_lost, is_redial=connection is not None
                    )
            connection.dial(self._secret, self.address, self._encryption, self._unacknowledged_s, self._lanes)
        return connection

    def _forget_broken_connections(self) -> None:
        """Called with the lock held."""
        for address in [each for each, old in self._outbound.items() if old.broken_s > FORGET_AFTER_S]:
            del self._outbound[address]

    def _accept_connection(self, sock: socket.socket) -> None:
        """Authenticate a caller in a thread, so that a silent one blocks nothing; then start to read from it.

        Only `MAX_PENDING_HANDSHAKES` run at once. For a further one the oldest is dropped: a node that knows the secret
        answers within milliseconds, so that the oldest is most likely a stranger.
        """
        with self._lock:
            self._handshakes.append(sock)
            oldest = self._handshakes.popleft() if len(self._handshakes) > MAX_PENDING_HANDSHAKES else None
        if oldest is not None:
            with contextlib.suppress(OSError):  # it has just been closed by its thread
                oldest.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._authenticate, args=(sock,), name="culm-handshake", daemon=True).start()

    def _authenticate(self, sock: socket.socket) -> None:
        try:
            sender, stream = authenticate_dialler(sock, self._secret, self.address, self._encryption, ACCEPT_S)
            set_socket_options(stream)
        except (OSError, RunError, ValueError):
            sock.close()
            return
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._handshakes.remove(sock)
        self._io_thread.add_inbound(
            InboundConnection(
                stream,
                sender,
                self.mailbox,
                self._deliver_message,
                self._handle_damage,
                self._handle_transport_message,
                self._handle_dropped_frame,
                self._allocate_frame,
                lambda: None if self._shared_memory is None else self._shared_memory.locker,
                self._find_lanes,
            )
        )

    def _find_lanes(self, sender: Address, token: bytes) -> InboundLanes:
        """The lanes of a sender. May be called from any thread. Raises ValueError."""

        def deliver(frame: frame_codec.FrameHeader, digest: int) -> None:
            deliver_frame(frame, digest, frame.tensors, sender, self.mailbox, self._handle_damage)

        def forget() -> None:
            self._inbound_lanes.pop((sender, token), None)

        def report_damage() -> None:
            self._handle_damage(sender, None)

        with self._lock:
            if self._closed:
                raise ValueError("the endpoint is closed")
            if (sender, token) not in self._inbound_lanes:
                self._inbound_lanes[sender, token] = InboundLanes(
                    deliver, self._io_thread.read_inbound, report_damage, forget
                )
            return self._inbound_lanes[sender, token]

    def _handle_damage(self, sender: Address, key: FrameKey | None) -> None:
        """Ask for a damaged frame again, and report the damage. May be called from any thread."""
        if key is not None:
            self._connection_to(sender).send(frame_codec.encode_resend_request(key))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: self._damage_handler(sender, key))

    def _handle_transport_message(self, sender: Address, message: frame_codec.TransportMessage) -> None:
        """Handle a request of the other end. May be called from any thread."""
        shared = self._shared_frames
        match message:
            case frame_codec.ResendRequest(key):
                self._connection_to(sender).resend_frame(key)
            case frame_codec.ChunkAnnouncement(chunk):
                self._connection_to(sender).send(frame_codec.encode_confirmation(chunk, os.getpid()))
            case frame_codec.ChunkConfirmation(chunk, process):
                if shared is not None and shared.add_receiver(sender, process):
                    self._connection_to(sender).confirm_chunk(chunk)
            case frame_codec.Acknowledgement(numbers):
                if shared is not None:
                    shared.acknowledge(numbers)

    def _handle_dropped_frame(self, sender: Address, number: int) -> None:
        """Acknowledge a frame of shared memory soon. Called in any thread, and wherever a tensor may be freed."""
        self._dropped.append((sender, number))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._acknowledge_dropped)

    def _acknowledge_dropped(self) -> None:
        numbers: dict[Address, list[int]] = {}
        while self._dropped:
            sender, number = self._dropped.popleft()
            numbers.setdefault(sender, []).append(number)
        for sender, found in numbers.items():
            if not self._closed:
                self._connection_to(sender).send(frame_codec.encode_acknowledgement(found))

    def _deliver_message(self, sender: Address, body: bytes | None) -> None:
        """Queue a control message, or the loss of a connection (None). May be called from any thread."""
        self._undelivered.append(ControlMessage(sender, body))
        with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits for messages
            self._loop.call_soon_threadsafe(self._queue_message)

    def _queue_message(self) -> None:
        message = self._undelivered.popleft()
        if message.body is None:
            for group in list(self._frame_groups):
                group.handle_lost_connection(message.sender)
        self._messages.put_nowait(message)

    def _report_lost(self, peer: Address) -> None:
        if self._shared_frames is not None:
            self._shared_frames.handle_lost_connection(peer)
        self._deliver_message(peer, None)


def _listen(host: str, ports: range | None) -> socket.socket:
    for port in ports or (0,):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(128)
            sock.setblocking(False)
            return sock
        except OSError as error:
            sock.close()
            if ports is None:
                raise UsageError(f"cannot listen on {host}: {error.strerror}") from None
    assert ports is not None
    raise UsageError(
        f"all ports {ports.start} to {ports.stop - 1} on {host} are taken: give another range with --ports"
    )
