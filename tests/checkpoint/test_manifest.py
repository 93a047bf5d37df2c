from __future__ import annotations

import hashlib
import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.checkpoint import FileEntry, Manifest, Scalar
from culm.checkpoint.manifest import to_plain_facts, to_plain_scalars
from culm.errors import CheckpointError

GOOD = Manifest(
    step=100,
    files={"shard-0.safetensors": FileEntry(sha256="ab" * 32, bytes=8)},
    weight_map={"0.weight": "shard-0.safetensors"},
    scalars={"optimizer.0.weight.step": 3},
    facts={"seed": 1, "tied": [["0.weight", "3.weight"]]},
    culm="0.1.0",
    torch="2.13.0",
    created=12.5,
)


def sealed(body: dict[str, object]) -> bytes:
    """Any object with a valid checksum."""
    text = json.dumps(body, indent=2).encode().removesuffix(b"\n}")
    return text + b',\n  "sha256": "' + hashlib.sha256(text).hexdigest().encode() + b'"\n}\n'


def changed(**fields: object) -> bytes:
    return sealed({**msgspec.to_builtins(GOOD), **fields})


def test_it_comes_back_as_it_was() -> None:
    assert Manifest.from_json(GOOD.to_json()) == GOOD


def test_it_is_json_that_says_what_it_is() -> None:
    found = json.loads(GOOD.to_json())
    assert (found["format"], found["version"], found["step"]) == ("culm-checkpoint", 1, 100)
    assert found["files"] == {"shard-0.safetensors": {"sha256": "ab" * 32, "bytes": 8}}


def test_its_checksum_can_be_computed_by_anyone() -> None:
    data = GOOD.to_json()
    body = data[: data.rindex(b",")]
    assert json.loads(data)["sha256"] == hashlib.sha256(body).hexdigest()


WORDS = st.text('a0."\\/\n\0é€\u2028😀')
"""Values that JSON writes in several ways."""


@given(st.dictionaries(WORDS, st.integers() | st.floats() | st.booleans() | WORDS | st.none(), max_size=4))
def test_scalars_come_back_with_value_and_type(scalars: dict[str, Scalar]) -> None:
    manifest = msgspec.structs.replace(GOOD, scalars=to_plain_scalars(scalars))
    found = Manifest.from_json(manifest.to_json()).scalars
    assert {name: (type(value), repr(value)) for name, value in found.items()} == {
        name: (type(value), repr(value)) for name, value in scalars.items()
    }


def test_the_json_uses_only_standard_values() -> None:
    manifest = msgspec.structs.replace(GOOD, scalars={"a": math.inf, "b": math.nan, "c": 1.0})

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(manifest.to_json(), parse_constant=refuse)
    assert found["scalars"] == {"c": 1.0}
    assert found["nonfinite"] == {"a": "inf", "b": "nan"}


@given(st.data())
def test_a_change_of_any_byte_is_found(data: st.DataObject) -> None:
    damaged = bytearray(GOOD.to_json())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CheckpointError, match="the manifest"):
        Manifest.from_json(bytes(damaged))


@given(st.data())
def test_a_cut_anywhere_is_found(data: st.DataObject) -> None:
    good = GOOD.to_json()
    with pytest.raises(CheckpointError, match="the manifest"):
        Manifest.from_json(good[: data.draw(st.integers(0, len(good) - 1))])


def test_bytes_after_the_end_are_found() -> None:
    with pytest.raises(CheckpointError, match="the manifest"):
        Manifest.from_json(GOOD.to_json() + b"\n")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (changed(format="zip"), "format 'zip', not 'culm-checkpoint'"),
        (changed(version=2), "version 2, this culm reads 1"),
        (changed(step="many"), "not as culm writes it"),
        (changed(weight_map={"0.weight": "other.safetensors"}), "puts 0.weight into 'other.safetensors'"),
        (
            changed(files={"../x.safetensors": {"sha256": "", "bytes": 0}}, weight_map={}),
            "names a file '../x.safetensors'",
        ),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "cannot be read"),
    ],
    ids=["format", "version", "type", "unknown file", "path", "no text", "no object"],
)
def test_the_error_names_the_problem(data: bytes, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        Manifest.from_json(data)


def test_facts_are_normalised_to_what_a_reader_gets() -> None:
    assert to_plain_facts({"tied": (("0.weight", "3.weight"),)}) == {"tied": [["0.weight", "3.weight"]]}


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, object()], ids=["nan", "inf", "set", "object"])
def test_a_fact_that_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="not plain JSON"):
        to_plain_facts({"x": value})


def test_a_numpy_number_is_stored_as_a_number() -> None:
    found = to_plain_scalars({"a": np.float64(0.5), "b": np.float64("nan")})
    assert [type(value) for value in found.values()] == [float, float]
    assert Manifest.from_json(msgspec.structs.replace(GOOD, scalars=found).to_json()).scalars["a"] == 0.5


def test_a_value_that_is_no_scalar_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"optimizer.0.weight.betas is a tuple"):
        to_plain_scalars({"optimizer.0.weight.betas": (0.9, 0.99)})
