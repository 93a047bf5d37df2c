from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.sample_states import same_bits, same_tensors, tensor_bytes

from culm.checkpoint.safetensors_codec import decode, encode, sha256
from culm.errors import CheckpointError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]


@given(st.sampled_from(FLOATS + INTS), st.binary(max_size=64))
def test_every_bit_pattern_comes_back(dtype: torch.dtype, data: bytes) -> None:
    usable = len(data) - len(data) % dtype.itemsize
    tensor = torch.tensor(list(data[:usable]), dtype=torch.uint8).view(dtype)
    assert same_tensors({"x": tensor}, decode(encode({"x": tensor})))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_every_shape_comes_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    assert same_tensors({"x": tensor}, decode(encode({"x": tensor})))


def test_the_payload_of_a_nan_comes_back() -> None:
    payload = struct.pack("<I", 0x7FC0BEEF)
    tensor = torch.frombuffer(bytearray(payload), dtype=torch.float32)
    assert tensor_bytes(decode(encode({"x": tensor}))["x"]) == payload


def test_a_shard_without_tensors_is_a_shard() -> None:
    assert decode(encode({})) == {}


def test_tensors_that_share_memory_come_back_as_tensors_of_their_own() -> None:
    base = torch.arange(6.0)
    tied = {"a": base, "b": base, "c": base[2:4], "d": base.view(2, 3).t(), "e": base.view(2, 3).expand(2, 2, 3)}
    found = decode(encode(tied))
    assert same_tensors(found, tied)
    found["a"].zero_()
    assert same_bits(found["b"], base)


def test_a_parameter_that_requires_grad_is_stored_as_its_values() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    assert same_bits(decode(encode({"x": parameter}))["x"], torch.arange(3.0))


def test_a_lazily_negated_view_is_stored_with_its_values() -> None:
    negated = torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    assert decode(encode({"x": negated}))["x"].tolist() == [-2.0]


def test_the_returned_bytes_are_immutable() -> None:
    assert encode({"x": torch.ones(1)}).readonly


def test_any_name_comes_back() -> None:
    tensors = {'0."quoted"\\': torch.ones(1), "0.größe": torch.ones(2), "": torch.ones(3)}
    assert same_tensors(decode(encode(tensors)), tensors)


@given(st.dictionaries(st.text("ab.0", min_size=1), st.tuples(st.sampled_from(FLOATS + INTS), st.integers(0, 3))))
def test_a_mixture_of_types_and_sizes_comes_back(kinds: dict[str, tuple[torch.dtype, int]]) -> None:
    tensors = {name: torch.arange(size).to(dtype) for name, (dtype, size) in kinds.items()}
    assert same_tensors(decode(encode(tensors)), tensors)


def test_the_bytes_depend_on_the_values_alone() -> None:
    one = {"b": torch.arange(4.0), "a": torch.ones(2, 2).t(), "c": torch.tensor(1)}
    other = {name: one[name].clone().contiguous() for name in ("c", "a", "b")}
    assert encode(one) == encode(other)
    assert sha256(encode(one)) != sha256(encode({**one, "c": torch.tensor(2)}))


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.zeros(2, dtype=torch.complex128), "torch.complex128"),
        (torch.zeros(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "has no data"),
    ],
    ids=["complex", "sparse", "meta"],
)
def test_a_tensor_that_cannot_be_stored_is_named(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tensor 0.weight .*{kind}"):
        encode({"0.weight": tensor})


@given(st.data())
def test_bytes_cut_anywhere_are_refused(data: st.DataObject) -> None:
    good = encode({"x": torch.arange(9.0)})
    with pytest.raises(CheckpointError, match="no whole safetensors file"):
        decode(good[: data.draw(st.integers(0, len(good) - 1))])
