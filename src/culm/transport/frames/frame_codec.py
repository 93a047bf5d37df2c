"""The wire format of frames and control messages.

    prefix   12 bytes: length of the header (4), its checksum (8)
    header   msgpack: ("f", epoch, step, name, checksum of the payload,
                       [(dtype, shape, strides, requires_grad) or nil, ...]),
                       for a frame in shared memory a SharedPlace instead of a payload, and for a
                       payload over other connections nil and a LanePlace,
             ("p", token): what follows on this connection are pieces (culm.transport.frames.lanes),
             ("l", message), ("r", epoch, step, name): send this frame again,
             ("m", ...): a chunk of shared memory (ChunkAnnouncement), ("o", chunk, process): it is mapped,
             ("a", number, ...): the receiver has dropped these frames of shared memory
    payload  the bytes of each tensor as they lie in memory, in order

Checksums are XXH3 (64 bit); that of a payload above 4 MiB is made of those of its pieces. A damaged payload is
requested again: its header says which frame it is. A damaged prefix or header breaks the connection, because the
position of the next frame is unknown.

Strides are sent because they decide in which order kernels sum: a tensor that was transposed, or in channels-last
format, must arrive as such, or the receiver would compute other bits than one process would.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import xxhash

from culm.errors import RunError
from culm.transport.interface import FrameKey, FrameMemory

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import torch
    from torch import Tensor

PREFIX = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 << 20
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


@cache
def _dtypes_by_name() -> dict[str, torch.dtype]:
    """The supported types by name. Torch is imported when the first tensor is sent: launchers only send messages."""
    import torch

    kinds = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.bool, torch.complex32, torch.complex64, torch.complex128,
    )  # fmt: skip
    return {str(kind).removeprefix("torch."): kind for kind in kinds}


@cache
def _names_by_dtype() -> dict[torch.dtype, str]:
    return {kind: name for name, kind in _dtypes_by_name().items()}


class ChunkAnnouncement(NamedTuple):
    """Where a receiver finds a chunk of a sender's memory."""

    chunk: int
    process: int
    descriptor: int
    size: int
    token: bytes
    """The first bytes of the chunk: a process of another namespace with the same number is not mistaken for it."""
    keeps_pages: bool
    """Whether its pages are never returned to the system, so that it may be page-locked."""


class SharedPlace(NamedTuple):
    """Where the tensors of a frame lie, one after the other."""

    chunk: int
    offset: int
    frame: int
    """Number of the frame, unique for the sender."""
    spots: tuple[tuple[int, int], ...] = ()
    """(chunk, offset) of each tensor that has elements, unless they lie one after the other."""


class LanePlace(NamedTuple):
    """Says over which connections the payload of a frame arrives."""

    token: bytes
    """Chosen by the sender for these connections."""
    number: int
    """Of the frame, unique for the token."""


class EncodedFrame(NamedTuple):
    """A frame before it is decided how its payload travels."""

    key: FrameKey
    checksum: int
    descriptions: list[Any]
    payload: list[memoryview]

    def buffers(self) -> list[memoryview]:
        """Header and payload."""
        return [_with_prefix(_encode(("f", *self.key, self.checksum, self.descriptions))), *self.payload]

    def header_for(self, place: SharedPlace) -> list[memoryview]:
        """The header alone, for a payload in shared memory."""
        return [_with_prefix(_encode(("f", *self.key, self.checksum, self.descriptions, place)))]

    def header_for_lanes(self, place: LanePlace) -> list[memoryview]:
        """The header alone, for a payload over other connections."""
        return [_with_prefix(_encode(("f", *self.key, self.checksum, self.descriptions, None, place)))]


def encode_frame(key: FrameKey, tensors: Sequence[Tensor | None]) -> EncodedFrame:
    """A frame. Tensors without gaps in host memory are not copied.

    Raises RunError for a tensor that has no bytes of its own (sparse, quantized, meta).
    """
    descriptions: list[Any] = []
    payload: list[memoryview] = []
    for tensor in tensors:
        if tensor is None:
            descriptions.append(None)
            continue
        gapless = to_gapless_cpu(tensor)
        descriptions.append(
            (_names_by_dtype()[gapless.dtype], tuple(gapless.shape), gapless.stride(), tensor.requires_grad)
        )
        if gapless.numel():
            payload.append(tensor_bytes(gapless))
    return EncodedFrame(key, checksum(payload), descriptions, payload)


def checksum(buffers: Iterable[memoryview]) -> int:
    """The checksum of consecutive buffers. That of many bytes is made of those of pieces, which threads can compute
    side by side: a receiver waits for it twice."""
    parts = list(buffers)
    if sum(map(len, parts)) <= PIECE_BYTES:
        digest = xxhash.xxh3_64()
        for buffer in parts:
            digest.update(buffer)
        return digest.intdigest()
    run = map if _threads is None else _threads.map
    return combine_digests(list(run(xxhash.xxh3_64_intdigest, cut_pieces(parts))))


def cut_pieces(parts: Iterable[memoryview]) -> list[memoryview]:
    """The pieces of a payload of more than PIECE_BYTES."""
    return [part[start : start + PIECE_BYTES] for part in parts for start in range(0, len(part), PIECE_BYTES)]


def combine_digests(digests: Sequence[int]) -> int:
    """The checksum of a payload from those of its pieces."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(digests)}Q", *digests))


PIECE_BYTES = 4 << 20
"""Payloads of up to this size are one piece."""
_MOST_THREADS = 4
_threads: Executor | None = None


def use_threads(cores: int) -> None:
    """Compute the checksums of large frames in threads, unless there are few cores. For workers that leave the
    processor to do so: those with a device."""
    global _threads  # noqa: PLW0603 - of the process, as its cores are
    if _threads is None and cores >= 2 * _MOST_THREADS:
        from concurrent.futures import ThreadPoolExecutor

        _threads = ThreadPoolExecutor(_MOST_THREADS, "culm-checksum")


def is_unchanged(buffers: Sequence[memoryview]) -> bool:
    """Whether the tensors of an encoded frame still have the values that they had when it was encoded."""
    fields = _decode(buffers[0][PREFIX.size :])
    return checksum(buffers[1:]) == int(fields[4])


def encode_resend_request(key: FrameKey) -> list[memoryview]:
    """The buffers of a request to send a frame again."""
    return [_with_prefix(_encode(("r", *key)))]


def encode_announcement(announced: ChunkAnnouncement) -> list[memoryview]:
    """The buffers of the announcement of a chunk."""
    return [_with_prefix(_encode(("m", *announced)))]


def encode_lane_opening(token: bytes) -> list[memoryview]:
    """The buffers of the first message of a connection for pieces."""
    return [_with_prefix(_encode(("p", token)))]


def encode_confirmation(chunk: int, process: int) -> list[memoryview]:
    """The buffers of the message that this process has mapped a chunk."""
    return [_with_prefix(_encode(("o", chunk, process)))]


def encode_acknowledgement(numbers: Sequence[int]) -> list[memoryview]:
    """The buffers of the acknowledgement of frames in shared memory."""
    return [_with_prefix(_encode(("a", *numbers)))]


class ChunkConfirmation(NamedTuple):
    """A receiver has mapped a chunk."""

    chunk: int
    process: int


class LaneOpening(NamedTuple):
    """What follows on this connection are pieces of frames."""

    token: bytes


class Acknowledgement(NamedTuple):
    """A receiver has dropped frames in shared memory."""

    numbers: tuple[int, ...]


class ResendRequest(NamedTuple):
    """A receiver got a frame damaged and asks for it again."""

    key: FrameKey


class FrameHeader(NamedTuple):
    """A frame whose payload follows, is in shared memory, or arrives over other connections."""

    key: FrameKey
    tensors: list[Tensor | None]
    """Uninitialised, unless they are in shared memory."""
    requires_grad: list[bool]
    checksum: int
    shared_chunks: tuple[int, ...] = ()
    """The chunk of each tensor that has elements, if they are in shared memory; empty: the payload follows."""
    lanes: LanePlace | None = None
    """Set if the payload arrives over other connections."""


TransportMessage: TypeAlias = ResendRequest | ChunkAnnouncement | ChunkConfirmation | Acknowledgement | LaneOpening
"""What one transport tells another."""
Header: TypeAlias = FrameHeader | TransportMessage | bytes
"""What follows a prefix; bytes: a control message."""
FindShared: TypeAlias = "Callable[[SharedPlace, list[Tensor]], list[Tensor]]"
"""Returns the tensors like these ones (on the device "meta") at a place in shared memory. Raises ValueError."""


def encode_message(body: bytes) -> list[memoryview]:
    """The buffers of a control message. Raises RunError for one that is too long for a receiver."""
    return [_with_prefix(_encode(("l", body)))]


def decode_prefix(prefix: bytes | bytearray) -> tuple[int, int]:
    """(length, checksum) of the header. Raises ValueError for a header that is too long."""
    length, digest = PREFIX.unpack(prefix)
    if length > MAX_HEADER_BYTES:
        raise ValueError("the header is too long")
    return length, digest


def _with_prefix(header: bytes) -> memoryview:
    if len(header) > MAX_HEADER_BYTES:
        raise RunError(f"a message of {len(header)} bytes is longer than {MAX_HEADER_BYTES}: send tensors as tensors")
    return memoryview(PREFIX.pack(len(header), xxhash.xxh3_64_intdigest(header)) + header)


def to_gapless_cpu(tensor: Tensor) -> Tensor:
    """The tensor in host memory without gaps, with the order of its axes kept. Returns the tensor itself if possible.

    Raises RunError for a tensor that has no bytes of its own (sparse, quantized, meta).
    """
    import torch

    if tensor.dtype not in _names_by_dtype() or tensor.layout is not torch.strided or tensor.is_meta:
        raise RunError(
            f"a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device} cannot be sent: "
            "layers must pass dense tensors to each other"
        )
    local = tensor.detach() if tensor.is_cpu else tensor.detach().cpu()
    if local.is_complex() or local.is_neg():
        local = local.resolve_conj().resolve_neg()  # lazy conjugation and negation are not in the bytes
    return local if _is_gapless(local) else local.contiguous()


def _is_gapless(tensor: Tensor) -> bool:
    """Whether every byte between the first and the last belongs to the tensor."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor without gaps, for reading and writing."""
    import torch

    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def check_header(header: bytes | bytearray, digest: int) -> None:
    """Raises DamagedHeader for a header without this checksum."""
    if xxhash.xxh3_64_intdigest(header) != digest:
        raise DamagedHeader("the checksum of a header does not match")


def decode_header(
    header: bytes | bytearray, allocate: FrameMemory | None = None, find_shared: FindShared | None = None
) -> Header:
    """The header of a frame, the body of a control message, or a message between transports.

    `allocate` returns the memory of a large frame, see Transport.set_frame_memory. Raises ValueError for anything else,
    and for tensors that do not fit into memory.
    """
    try:
        kind, *fields = _decode(header)
        message = _decode_message(kind, fields)
        if message is not None:
            return message
        key = FrameKey(int(fields[0]), int(fields[1]), str(fields[2]))
        if kind == "r":
            return ResendRequest(key)
        payload_digest, descriptions, *places = fields[3:]
        requires_grad = [d is not None and bool(d[3]) for d in descriptions]
        shared_chunks: tuple[int, ...] = ()
        lanes = LanePlace(bytes(places[1][0]), int(places[1][1])) if len(places) > 1 else None
        if places and lanes is None:
            chunk, offset, number, spots = places[0]
            place = SharedPlace(int(chunk), int(offset), int(number), tuple((int(c), int(at)) for c, at in spots))
            if find_shared is None:
                raise ValueError("a frame in memory that is not shared")
            found = find_shared(place, _described(descriptions))
            filled = sum(tensor.numel() > 0 for tensor in found)
            shared_chunks = tuple(each for each, _ in place.spots) or (place.chunk,) * filled
        else:
            found = _allocate_tensors(descriptions, allocate)
        tensors = _with_gaps(found, descriptions)
        return FrameHeader(key, tensors, requires_grad, int(payload_digest), shared_chunks, lanes)
    except (msgspec.MsgspecError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"not a frame: {error}") from None


def _decode_message(kind: str, fields: list[Any]) -> bytes | TransportMessage | None:
    """A message without a frame key; None: it is of another kind."""
    if kind == "l" and isinstance(fields[0], bytes):
        return fields[0]
    if kind == "m":
        chunk, process, descriptor, size, token, keeps_pages = fields
        return ChunkAnnouncement(int(chunk), int(process), int(descriptor), int(size), bytes(token), bool(keeps_pages))
    if kind == "o":
        return ChunkConfirmation(int(fields[0]), int(fields[1]))
    if kind == "p":
        return LaneOpening(bytes(fields[0]))
    if kind == "a":
        return Acknowledgement(tuple(map(int, fields)))
    return None


class DamagedHeader(ValueError):
    """A header is not as it was sent."""


_MIN_ALLOCATED_BYTES = 64 << 10
"""Smaller frames are received in ordinary memory: copying them takes no time."""


def _allocate_tensors(descriptions: Sequence[Any], allocate: FrameMemory | None) -> list[Tensor]:
    """Uninitialised tensors, to be read into."""
    if allocate is not None:
        found = allocate_large(_described(descriptions), allocate)
        if found is not None:
            return found
    return [_allocate_tensor(*each[:3]) for each in descriptions if each is not None]


def allocate_large(like: list[Tensor], allocate: FrameMemory) -> list[Tensor] | None:
    """Memory of `allocate`, if the tensors are large enough."""
    return allocate(like) if sum(tensor.nbytes for tensor in like) >= _MIN_ALLOCATED_BYTES else None


def copy_into(
    allocate: FrameMemory | None, tensors: Sequence[Tensor | None], *, in_any_case: bool = False
) -> list[Tensor | None]:
    """Copies in memory of `allocate`. If it has none, the same tensors or, `in_any_case`, copies in ordinary memory."""
    present = [tensor for tensor in tensors if tensor is not None]
    found = None if allocate is None else allocate_large(present, allocate)
    if found is None:
        return [tensor.clone() if tensor is not None and in_any_case else tensor for tensor in tensors]
    copies = _with_gaps(found, tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        if copy is not None and tensor is not None:
            copy.copy_(tensor)
    return copies


def _described(descriptions: Sequence[Any]) -> list[Tensor]:
    return [_allocate_tensor(*each[:3], device="meta") for each in descriptions if each is not None]


def _with_gaps(tensors: Iterable[Tensor], descriptions: Sequence[Any]) -> list[Tensor | None]:
    """The tensors, and None where there is none."""
    found = iter(tensors)
    return [None if each is None else next(found) for each in descriptions]


def _allocate_tensor(kind: str, shape: Sequence[int], strides: Sequence[int], *, device: str = "cpu") -> Tensor:
    """An uninitialised tensor."""
    import torch

    tensor = torch.empty_strided(shape, strides, dtype=_dtypes_by_name()[kind], device=device)
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        raise ValueError(f"a tensor of shape {shape} with gaps: strides {strides}")
    return tensor
