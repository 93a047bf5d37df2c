"""Bytes on the wire: whatever was a frame is the same frame again, and whatever was not is refused."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from culm.errors import RunError
from culm.transport import wire

from .sides import key, same


def over(*tensors: Tensor | None) -> list[Tensor | None]:
    """A frame through its bytes, as a socket would carry it."""
    data = b"".join(bytes(buffer) for buffer in wire.frame(key(), tensors))
    (length,) = wire.PREFIX.unpack_from(data)
    parsed = wire.parse(data[wire.PREFIX.size : wire.PREFIX.size + length])
    assert not isinstance(parsed, bytes)
    name, made, wants = parsed
    assert name == key()
    at = wire.PREFIX.size + length
    for tensor, wanted in zip(made, wants, strict=True):
        if tensor is not None:
            if tensor.numel():
                wire.tensor_bytes(tensor)[:] = data[at : at + tensor.nbytes]
            at += tensor.nbytes
            tensor.requires_grad_(wanted)
    assert at == len(data)
    return made


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any shape, in any order of its axes, with or without gaps."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    kind = draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64]))
    made = torch.arange(max(1, 2 * int(torch.Size(shape).numel()))).to(kind)
    whole = made[: int(torch.Size(shape).numel())].reshape(shape)
    turned = whole.permute(*draw(st.permutations(range(len(shape))))) if shape else whole
    if turned.dim() and draw(st.booleans()):
        turned = turned[..., ::2]
    wants = kind in (torch.float32, torch.bfloat16, torch.complex64) and draw(st.booleans())
    return turned.requires_grad_(wants) if wants and turned.is_leaf else turned


@given(st.lists(st.none() | tensors(), max_size=3))
def test_any_frame_is_itself_again(sent: list[Tensor | None]) -> None:
    found = over(*sent)
    assert len(found) == len(sent)
    for one, other in zip(found, sent, strict=True):
        assert same(one, None if other is None else wire.in_one_piece(other).requires_grad_(other.requires_grad))


@given(tensors())
def test_a_tensor_in_one_piece_is_not_copied_and_not_turned(tensor: Tensor) -> None:
    once = wire.in_one_piece(tensor)
    assert wire.in_one_piece(once).data_ptr() == once.data_ptr()
    assert torch.equal(once, tensor.detach())


def test_a_tensor_leaves_from_its_own_memory() -> None:
    mine = torch.zeros(3, 4).t()
    (_, payload) = wire.frame(key(), [mine])
    mine[0, 0] = 1.0
    assert bytes(payload[:4]) == bytes(torch.ones(1).view(torch.uint8).tolist())


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_bytes_of_its_own_is_refused_in_one_sentence(tensor: Tensor) -> None:
    with pytest.raises(RunError, match=r"^a tensor of .* can not be sent: hand dense tensors with values"):
        wire.frame(key(), [tensor])


def test_a_letter_that_no_receiver_would_take_is_refused_where_it_is_written() -> None:
    with pytest.raises(RunError, match="is longer than"):
        wire.letter(bytes(wire.LONGEST_HEADER))


class Bomb:
    """A pickle that does something when it is opened."""

    opened = False

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return setattr, (Bomb, "opened", True)


def bad_headers() -> dict[str, bytes]:
    encode = msgspec.msgpack.encode
    return {
        "nothing": b"",
        "noise": bytes(range(256)),
        "a pickle": pickle.dumps(Bomb()),
        "a number": encode(7),
        "an empty list": encode([]),
        "an unknown kind": encode(["x", 1]),
        "a letter of a number": encode(["l", 2**62]),
        "a frame without tensors": encode(["f", 1, 0, "0F0"]),
        "an unknown type": encode(["f", 1, 0, "0F0", [["float7", [1], [1], False]]]),
        "a negative shape": encode(["f", 1, 0, "0F0", [["float32", [-1], [1], False]]]),
        "a negative stride": encode(["f", 1, 0, "0F0", [["float32", [2], [-1], False]]]),
        "more than any memory": encode(["f", 1, 0, "0F0", [["float32", [2**62], [1], False]]]),
        "more than 64 bits": encode(["f", 1, 0, "0F0", [["float32", [2**62, 2**62], [1, 1], False]]]),
        "more than its memory": encode(["f", 1, 0, "0F0", [["float32", [2**40], [0], False]]]),
        "gaps": encode(["f", 1, 0, "0F0", [["float32", [2], [9], False]]]),
        "too few strides": encode(["f", 1, 0, "0F0", [["float32", [2, 2], [1], False]]]),
        "no place for a gradient": encode(["f", 1, 0, "0F0", [["float32", [2], [1]]]]),
        "an epoch of letters": encode(["f", "one", 0, "0F0", []]),
    }


@pytest.mark.parametrize("name", bad_headers())
def test_what_is_no_header_is_a_value_error_and_nothing_else(name: str) -> None:
    with pytest.raises(ValueError, match=r"^not a frame: "):
        wire.parse(bad_headers()[name])
    assert not Bomb.opened


@given(st.binary(max_size=64))
def test_noise_is_a_value_error_or_a_letter(noise: bytes) -> None:
    try:
        found = wire.parse(noise)
    except ValueError:
        return
    assert isinstance(found, bytes)


def test_a_pickle_in_a_letter_stays_bytes() -> None:
    body = pickle.dumps(Bomb())
    (buffer,) = wire.letter(body)
    assert wire.parse(bytes(buffer)[wire.PREFIX.size :]) == body
    assert not Bomb.opened
