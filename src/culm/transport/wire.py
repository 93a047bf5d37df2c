"""How a frame looks on the wire, and how two ends of a connection know each other.

    prefix   4 bytes length of the header
    header   msgpack: ("f", epoch, step, name, [(type, shape, strides, wants gradient) or nil, ...]) or ("l", letter)
    payload  the bytes of each tensor as they lie in memory, in order

Strides travel because they decide in which order sums are made: a tensor that arrived transposed, or with its channels
last, must go on being so, or the receiver would learn something else than one process would.

A connection opens with a challenge in both directions (HMAC-SHA256 over the run's secret): who does not know the
secret can neither send nor listen. Nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from culm.errors import RunError
from culm.transport.base import Address, Key

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PREFIX = struct.Struct("<I")
LONGEST_HEADER = 64 << 20
_NONCE = 16
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


@cache
def _types() -> dict[str, torch.dtype]:
    """By name. Torch is imported where the first tensor travels: launchers only send letters."""
    import torch

    kinds = (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
        torch.bool, torch.complex32, torch.complex64, torch.complex128,
    )  # fmt: skip
    return {str(kind).removeprefix("torch."): kind for kind in kinds}


@cache
def _names() -> dict[torch.dtype, str]:
    return {kind: name for name, kind in _types().items()}


def frame(key: Key, tensors: Sequence[Tensor | None]) -> list[memoryview]:
    """The buffers of a frame, without copying tensors that lie in host memory in one piece.

    Raises RunError for a tensor that has no bytes of its own (sparse, quantized, meta).
    """
    described: list[Any] = []
    payload: list[memoryview] = []
    for tensor in tensors:
        if tensor is None:
            described.append(None)
            continue
        piece = in_one_piece(tensor)
        described.append((_names()[piece.dtype], tuple(piece.shape), piece.stride(), tensor.requires_grad))
        if piece.numel():
            payload.append(tensor_bytes(piece))
    return [_headed(_encode(("f", *key, described))), *payload]


def letter(body: bytes) -> list[memoryview]:
    """The buffers of a letter. Raises RunError for one that no receiver would take."""
    return [_headed(_encode(("l", body)))]


def _headed(header: bytes) -> memoryview:
    if len(header) > LONGEST_HEADER:
        raise RunError(f"a message of {len(header)} bytes is longer than {LONGEST_HEADER}: send tensors as tensors")
    return memoryview(PREFIX.pack(len(header)) + header)


def in_one_piece(tensor: Tensor) -> Tensor:
    """The tensor in host memory without gaps, its axes in the order that they have: itself where it is so already."""
    import torch

    if tensor.dtype not in _names() or tensor.layout is not torch.strided or tensor.is_meta:
        raise RunError(
            f"a tensor of {tensor.dtype}, {tensor.layout} on {tensor.device} can not be sent: "
            "hand dense tensors with values from layer to layer"
        )
    here = tensor.detach().cpu()
    if here.is_complex() or here.is_neg():
        here = here.resolve_conj().resolve_neg()  # signs that are only noted are not in the bytes
    return here if _gapless(here) else here.contiguous()


def _gapless(tensor: Tensor) -> bool:
    """Whether every byte between its first and its last is its own."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a tensor that lies in one piece: reading it gives its bytes, writing it sets them."""
    import torch

    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def parse(header: bytes | bytearray) -> tuple[Key, list[Tensor | None], list[bool]] | bytes:
    """An empty frame to be filled (and which of its tensors want a gradient), or the body of a letter.

    Raises ValueError for anything else, and for tensors that this machine has no room for.
    """
    try:
        kind, *fields = _decode(header)
        if kind == "l" and isinstance(fields[0], bytes):
            return fields[0]
        epoch, step, name, described = fields
        tensors = [None if d is None else _room(*d[:3]) for d in described]
        return Key(int(epoch), int(step), str(name)), tensors, [d is not None and bool(d[3]) for d in described]
    except (msgspec.MsgspecError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"not a frame: {error}") from None


def _room(kind: str, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Memory for a tensor that will be read into it."""
    import torch

    made = torch.empty_strided(shape, strides, dtype=_types()[kind])
    if made.untyped_storage().nbytes() != made.nbytes:
        raise ValueError(f"a tensor of shape {shape} with gaps: strides {strides}")
    return made


def introduce(sock: socket.socket, secret: bytes, me: Address) -> None:
    """The dialling end: prove the secret, demand the proof, say who calls. Raises RunError if the other can not."""
    mine, name = os.urandom(_NONCE), me.encode()
    sock.sendall(mine + bytes([len(name)]) + name)
    answer = _exactly(sock, _NONCE + 32)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"listener", mine, theirs, name)):
        raise RunError("the node that was dialled does not know the run's secret")
    sock.sendall(_proof(secret, b"dialler", mine, theirs, name))


def welcome(sock: socket.socket, secret: bytes) -> Address:
    """The listening end: the caller's address, once it has proved the secret. Raises RunError if it can not."""
    theirs = _exactly(sock, _NONCE)
    name = _exactly(sock, _exactly(sock, 1)[0])
    mine = os.urandom(_NONCE)
    sock.sendall(mine + _proof(secret, b"listener", theirs, mine, name))
    if not hmac.compare_digest(_exactly(sock, 32), _proof(secret, b"dialler", theirs, mine, name)):
        raise RunError("a caller does not know the run's secret")
    return name.decode()


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"|".join(parts), "sha256")


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("closed while shaking hands")
        data += more
    return data
