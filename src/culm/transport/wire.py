"""How a frame looks on the wire, and how two ends of a connection know each other.

    prefix   4 bytes length of the header
    header   msgpack: ("f", epoch, step, name, [(type, shape, wants gradient) or nil, ...]) or ("l", letter)
    payload  the bytes of each tensor, in order

A connection opens with a challenge in both directions (HMAC-SHA256 over the run's secret): who does not know the
secret can neither send nor listen. Nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from culm.errors import RunError
from culm.transport.base import Address, Key

PREFIX = struct.Struct("<I")
LONGEST_HEADER = 64 << 20
_NONCE = 16
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

_TYPES: dict[str, torch.dtype] = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
        torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    )
}  # fmt: skip
_NAMES = {t: name for name, t in _TYPES.items()}


def frame(key: Key, tensors: Sequence[Tensor | None]) -> list[memoryview]:
    """The buffers of a frame, without copying tensors that lie in host memory in one piece."""
    described: list[Any] = []
    payload: list[memoryview] = []
    for tensor in tensors:
        if tensor is None:
            described.append(None)
            continue
        described.append((_NAMES[tensor.dtype], tuple(tensor.shape), tensor.requires_grad))
        if tensor.numel():
            payload.append(tensor_bytes(tensor))
    return [_headed(_encode(("f", *key, described))), *payload]


def letter(body: bytes) -> list[memoryview]:
    """The buffers of a letter."""
    return [_headed(_encode(("l", body)))]


def _headed(header: bytes) -> memoryview:
    return memoryview(PREFIX.pack(len(header)) + header)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's memory as bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def parse(header: bytes | bytearray) -> tuple[Key, list[Tensor | None], list[bool]] | bytes:
    """An empty frame to be filled (and which of its tensors want a gradient), or the body of a letter."""
    fields = _decode(header)
    if fields[0] == "l":
        return bytes(fields[1])
    _, epoch, step, name, described = fields
    tensors = [None if d is None else torch.empty(d[1], dtype=_TYPES[d[0]]) for d in described]
    return Key(epoch, step, name), tensors, [d is not None and d[2] for d in described]


def introduce(sock: socket.socket, secret: bytes, me: Address) -> None:
    """The dialling end: prove the secret, demand the proof, say who is calling. Raises RunError if the other can not."""
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
