"""The wire format: every frame is decoded to the same frame, and everything else is refused."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.transport.transport_variants import frame_key, same_tensor
from torch import Tensor

from culm.errors import RunError
from culm.transport.frames import frame_codec


def over(*tensors: Tensor | None) -> list[Tensor | None]:
    """Encode and decode a frame, as a socket would transport it."""
    data = b"".join(bytes(buffer) for buffer in frame_codec.encode_frame(frame_key(), tensors).buffers())
    length, digest = frame_codec.decode_prefix(data[: frame_codec.PREFIX.size])
    header = data[frame_codec.PREFIX.size : frame_codec.PREFIX.size + length]
    frame_codec.check_header(header, digest)
    parsed = frame_codec.decode_header(header)
    assert isinstance(parsed, frame_codec.FrameHeader)
    name, made, wants, *_ = parsed
    assert name == frame_key()
    at = frame_codec.PREFIX.size + length
    for tensor, wanted in zip(made, wants, strict=True):
        if tensor is not None:
            if tensor.numel():
                frame_codec.tensor_bytes(tensor)[:] = data[at : at + tensor.nbytes]
            at += tensor.nbytes
            tensor.requires_grad_(wanted)
    assert at == len(data)
    return made


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any shape, in any order of axes, with or without gaps."""
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
def test_any_frame_survives_encoding_and_decoding(sent: list[Tensor | None]) -> None:
    found = over(*sent)
    assert len(found) == len(sent)
    for one, other in zip(found, sent, strict=True):
        assert same_tensor(
            one, None if other is None else frame_codec.to_gapless_cpu(other).requires_grad_(other.requires_grad)
        )


@given(tensors())
def test_a_tensor_without_gaps_is_neither_copied_nor_transposed(tensor: Tensor) -> None:
    once = frame_codec.to_gapless_cpu(tensor)
    assert frame_codec.to_gapless_cpu(once).data_ptr() == once.data_ptr()
    assert torch.equal(once, tensor.detach())


def test_a_tensor_is_sent_from_its_own_memory() -> None:
    mine = torch.zeros(3, 4).t()
    (payload,) = frame_codec.encode_frame(frame_key(), [mine]).payload
    mine[0, 0] = 1.0
    assert bytes(payload[:4]) == bytes(torch.ones(1).view(torch.uint8).tolist())


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_bytes_of_its_own_is_refused_in_one_sentence(tensor: Tensor) -> None:
    with pytest.raises(RunError, match=r"^a tensor of .* cannot be sent: layers must pass dense tensors"):
        frame_codec.encode_frame(frame_key(), [tensor])


def test_a_message_too_long_for_a_receiver_is_refused_by_the_sender() -> None:
    with pytest.raises(RunError, match="is longer than"):
        frame_codec.encode_message(bytes(frame_codec.MAX_HEADER_BYTES))


class Bomb:
    """A pickle with a side effect when it is loaded."""

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
        "a frame without tensors": encode(["f", 1, 0, "0F0", 0]),
        "an unknown type": encode(["f", 1, 0, "0F0", 0, [["float7", [1], [1], False]]]),
        "a negative shape": encode(["f", 1, 0, "0F0", 0, [["float32", [-1], [1], False]]]),
        "a negative stride": encode(["f", 1, 0, "0F0", 0, [["float32", [2], [-1], False]]]),
        "more than any memory": encode(["f", 1, 0, "0F0", 0, [["float32", [2**62], [1], False]]]),
        "more than 64 bits": encode(["f", 1, 0, "0F0", 0, [["float32", [2**62, 2**62], [1, 1], False]]]),
        "more than its memory": encode(["f", 1, 0, "0F0", 0, [["float32", [2**40], [0], False]]]),
        "gaps": encode(["f", 1, 0, "0F0", 0, [["float32", [2], [9], False]]]),
        "too few strides": encode(["f", 1, 0, "0F0", 0, [["float32", [2, 2], [1], False]]]),
        "no place for a gradient": encode(["f", 1, 0, "0F0", 0, [["float32", [2], [1]]]]),
        "an epoch of letters": encode(["f", "one", 0, "0F0", 0, []]),
    }


@pytest.mark.parametrize("name", bad_headers())
def test_an_invalid_header_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"^not a frame: "):
        frame_codec.decode_header(bad_headers()[name])
    assert not Bomb.opened


@given(st.binary(max_size=64))
def test_noise_is_a_value_error_or_a_message(noise: bytes) -> None:
    try:
        found = frame_codec.decode_header(noise)
    except ValueError:
        return
    assert isinstance(found, bytes)


def test_a_pickle_in_a_message_stays_bytes() -> None:
    body = pickle.dumps(Bomb())
    (buffer,) = frame_codec.encode_message(body)
    assert frame_codec.decode_header(bytes(buffer)[frame_codec.PREFIX.size :]) == body
    assert not Bomb.opened


@pytest.mark.parametrize("in_threads", [False, True])
def test_the_checksum_of_a_large_payload_covers_every_byte(in_threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(range(256)) * (9 << 12)  # 9 MiB
    payload = [memoryview(data)[:5000], memoryview(data)[5000:]]
    serial = frame_codec.checksum(payload)
    monkeypatch.setattr(frame_codec, "_threads", None)
    if in_threads:
        frame_codec.use_threads(cores=16)
        assert frame_codec._threads is not None
    assert frame_codec.checksum(payload) == serial
    for place in (0, 4999, 5000, (4 << 20) + 5000, (9 << 20) - 1):
        data[place] ^= 1
        assert frame_codec.checksum(payload) != serial
        data[place] ^= 1
    moved = [payload[1], payload[0]]
    assert frame_codec.checksum(moved) != serial


def test_few_cores_are_left_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_codec, "_threads", None)
    frame_codec.use_threads(cores=7)
    assert frame_codec._threads is None
