"""Tensors to bytes and back, in the safetensors format: names, shapes and raw values, nothing executable.

Reading uses the library. Writing does not: the library holds the interpreter lock while it copies (a second per GB,
during which no other thread trains), and writes metadata in random order. The format: the length of the header in 8
bytes, the header in JSON padded to a multiple of 8, then the values of all tensors without gaps.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from culm.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
DTYPE_OF_NAME = {name: dtype for dtype, name in _DTYPES.items()}
"""The type of each name in the header of a file."""

_METADATA = {"format": "pt"}
"""Other tools require this entry."""


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = _METADATA) -> memoryview:
    """The tensors as one safetensors file. Equal tensors give equal bytes, whatever their order or memory layout.

    They may be on any device, be views of each other, or share memory. They must not change until this returns. Raises
    CheckpointError, which names the tensor, for a dtype that safetensors cannot hold.
    """
    for name, tensor in tensors.items():
        _check_storable(name, tensor)
    # The widest dtype first, so that every tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header({name: tensors[name] for name in order}, metadata)
    data = torch.empty(len(header) + sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    data[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
    at = len(header)
    for name in order:
        source = tensors[name].detach()
        data[at : at + source.nbytes].view(source.dtype).view(source.shape).copy_(source)
        at += source.nbytes
    return data.numpy().data.toreadonly()


class TensorFile:
    """Writes a safetensors file one tensor at a time, in any order, so that no more than one is in memory."""

    def __init__(
        self,
        file: BinaryIO,
        described: Mapping[str, tuple[torch.Size, torch.dtype]],
        metadata: Mapping[str, str] = _METADATA,
    ) -> None:
        """`described`: shape and type of every tensor that will be written. The widest types are first in the file."""
        order = sorted(described, key=lambda name: (-described[name][1].itemsize, name))
        empty = {n: torch.empty(described[n][0], dtype=described[n][1], device="meta") for n in order}
        for name, tensor in empty.items():
            _check_storable(name, torch.empty(0, dtype=tensor.dtype))
        header = _header(empty, metadata)
        file.write(header)
        self._file, self._offsets, at = file, dict[str, int](), len(header)
        for name, tensor in empty.items():
            self._offsets[name] = at
            at += tensor.nbytes
        self.size = at
        """Bytes of the whole file."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to its place."""
        self._file.seek(self._offsets[name])
        plain = tensor.detach().contiguous().reshape(-1)
        self._file.write(plain.view(torch.uint8).numpy().data)


def decode(data: bytes | memoryview) -> dict[str, Tensor]:
    """The tensors of one safetensors file, in their own memory. Raises CheckpointError for other bytes."""
    try:
        return load(bytes(data))
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"these {len(data)} bytes are no whole safetensors file ({error})") from error


def sha256(data: bytes | memoryview) -> str:
    """The SHA-256 checksum of receipts and manifests, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _check_storable(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES:
        kind = "has no data (meta)" if tensor.is_meta else f"is {tensor.layout} {tensor.dtype}"
        raise CheckpointError(
            f"tensor {name} {kind}: a checkpoint holds dense tensors of floats, integers, bool or complex64"
        )


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytearray:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return bytearray(len(text).to_bytes(8, "little") + text)
