"""StepMetrics: one value with the keys of a line, and what hooks may add to it."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import culm
from culm.errors import JobError
from culm.metric import RESERVED_NAMES
from culm.observe.step_metrics import StepMetrics, read_hook_result
from culm.observe.writers.run_folder import to_plain_json

NUMBERS = st.one_of(st.none(), st.floats())
STEPS = st.builds(
    StepMetrics,
    step=st.integers(0, 99),
    t=st.floats(0, 99),
    loss=NUMBERS,
    samples=st.integers(0, 99),
    norm=NUMBERS,
    eval_loss=NUMBERS,
    skipped=st.booleans(),
    samples_lost=st.integers(0, 9),
    values=st.dictionaries(st.sampled_from(["z_loss", "train/accuracy"]), st.floats()),
)


def test_the_keys_of_a_line_without_named_values_are_those_that_readers_know() -> None:
    plain = StepMetrics(3, 1.5, 0.25, 8)
    assert plain.to_fields() == {"step": 3, "loss": 0.25, "samples": 8, "t": 1.5}
    full = msgspec.structs.replace(plain, norm=0.0, eval_loss=2.0, values={"z_loss": 0.5})
    assert full.to_fields() == {**plain.to_fields(), "norm": 0.0, "eval_loss": 2.0, "z_loss": 0.5}


def test_no_named_value_can_have_the_name_of_a_field() -> None:
    assert frozenset(StepMetrics.__struct_fields__) <= RESERVED_NAMES


@given(STEPS)
def test_a_step_comes_back_from_its_line_as_it_was(metrics: StepMetrics) -> None:
    line = json.dumps(to_plain_json(metrics.to_fields()), allow_nan=False)
    assert repr(StepMetrics.from_fields(json.loads(line))) == repr(metrics)
    sent = msgspec.msgpack.encode(metrics.to_fields())
    assert repr(StepMetrics.from_fields(msgspec.msgpack.decode(sent))) == repr(metrics)


def test_a_step_reads_like_a_mapping() -> None:
    metrics = StepMetrics(3, 1.5, 0.25, 8, values={"z_loss": 0.5})
    assert (metrics["loss"], metrics["z_loss"], metrics.get("norm"), metrics.get("norm", 1)) == (0.25, 0.5, None, 1)
    assert dict(metrics) == metrics.to_fields()
    assert "z_loss" in metrics
    assert "norm" not in metrics
    with pytest.raises(KeyError):
        metrics["norm"]


def test_what_is_no_number_in_a_line_is_no_named_value() -> None:
    found = StepMetrics.from_fields({"step": 1, "loss": "nan", "note": "x", "own": 2, "flag": True, "wide": "inf"})
    assert found.values == {"own": 2, "wide": math.inf}
    assert found.loss is not None
    assert math.isnan(found.loss)
    with pytest.raises(msgspec.ValidationError):
        StepMetrics.from_fields({"step": "one"})


@pytest.mark.parametrize(
    ("result", "values", "stopped"),
    [
        (None, {}, False),
        (culm.STOP, {}, True),
        ({"lr": 0.5, "n": torch.tensor(2)}, {"lr": 0.5, "n": 2.0}, False),
        (({"lr": 0.5}, culm.STOP), {"lr": 0.5}, True),
        ([1, 2], {}, False),
        (True, {}, False),
    ],
)
def test_a_hook_may_stop_the_run_add_values_or_both(result: Any, values: dict[str, float], stopped: bool) -> None:
    assert read_hook_result(result, StepMetrics(0)) == (values, stopped)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ({"loss": 1.0}, "Job.on_step names a value 'loss', which every step has already: use another, as 'my_loss'"),
        ({"a b": 1.0}, "Job.on_step names a value 'a b': use a string of letters"),
        ({"own": 1.0}, "Job.on_step returned 'own', which Job.metrics declares: use another name for one of them"),
        ({"x": "1"}, "Job.on_step returned a str for 'x': return one number for each name"),
        ({"x": torch.zeros(2)}, "Job.on_step returned a Tensor for 'x': return one number for each name"),
    ],
)
def test_a_value_of_a_hook_that_cannot_be_written_is_refused(result: object, sentence: str) -> None:
    with pytest.raises(JobError) as error:
        read_hook_result(result, StepMetrics(0, values={"own": 1.0}))
    assert str(error.value).startswith(sentence)
