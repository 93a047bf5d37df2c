"""The exact sum: integer sums do not depend on the order of additions, and a gradient out of range is refused."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.sample_data import WIDTH
from tests.runtime.sample_jobs import JOBS, job_around, job_with, plain
from tests.runtime.sample_layers import Dense
from torch import Tensor, nn

from culm.errors import ExactRangeError, JobError
from culm.runtime.compute.device import fingerprint
from culm.runtime.compute.grad_accumulator import LIMIT, SCALE, GradientAccumulator
from culm.testing import reference, simulate

gradients = st.floats(-500.0, 500.0, width=32) | st.floats(-(2.0**-24), 2.0**-24, width=32)
lists = st.lists(gradients, min_size=1, max_size=12)


def accumulator(size: int = 1, dtype: torch.dtype = torch.float32) -> GradientAccumulator:
    return GradientAccumulator([nn.Parameter(torch.zeros(size, dtype=dtype))], exact=True, label="layer 3 (Dense)")


def absorbed(values: Any, dtype: torch.dtype = torch.float32) -> GradientAccumulator:
    """The sum of gradients of one element, micro-batch by micro-batch."""
    found = accumulator(dtype=dtype)
    for value in values:
        found.parameters[0].grad = torch.tensor([value], dtype=dtype)
        found.add_micro_batch()
    return found


@given(lists, st.randoms(use_true_random=False))
def test_the_order_of_micro_batches_does_not_matter(values: list[float], draw: Any) -> None:
    shuffled = draw.sample(values, len(values))
    one, other = absorbed(values), absorbed(shuffled)
    assert torch.equal(one.total, other.total)
    assert one.bound == other.bound


@given(lists, st.data())
def test_sums_of_parts_are_the_sum_of_all(values: list[float], data: Any) -> None:
    """Any split over pipelines: the parts are summed as int64, and the bounds as float64."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
    parts = [absorbed(values[a:b]) for a, b in itertools.pairwise([0, *cuts, len(values)])]
    whole = absorbed(values)
    assert torch.equal(torch.stack([part.total for part in parts]).sum(0), whole.total)
    assert int(torch.tensor([part.bound for part in parts], dtype=torch.float64).sum()) == whole.bound


@given(lists, st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_a_term_is_off_by_half_a_unit_of_2_to_the_minus_48_at_most(values: list[float], dtype: torch.dtype) -> None:
    true = sum(Fraction(float(torch.tensor(value, dtype=dtype))) for value in values)
    found = Fraction(int(absorbed(values, dtype).total), int(SCALE))
    assert abs(found - true) <= len(values) * Fraction(1, 2**49)


@given(lists, st.floats(0.5, 100.0))
def test_the_gradient_is_the_sum_divided_once_and_rounded_once_more(values: list[float], divisor: float) -> None:
    found = absorbed(values)
    found.finalize_gradient(divisor)
    assert found.parameters[0].grad is not None
    true = sum(map(Fraction, values)) / Fraction(divisor)
    assert float(found.parameters[0].grad) == pytest.approx(float(true), rel=2**-23, abs=len(values) * 2.0**-48)


@given(lists)
def test_the_bound_is_never_below_what_the_sum_can_be(values: list[float]) -> None:
    assert absorbed(values).bound / 2.0**16 >= sum(abs(value) for value in values)


def test_a_gradient_out_of_range_leaves_the_sum_as_it_was_and_names_the_layer() -> None:
    found = absorbed([1.5])
    found.parameters[0].grad = torch.tensor([-LIMIT])
    with pytest.raises(ExactRangeError, match=r"a gradient of layer 3 \(Dense\) is 32768, outside .*±32,768: scale"):
        found.add_micro_batch()
    assert found.total.tolist() == [int(1.5 * SCALE)]


def test_gradients_in_range_whose_sum_is_not_are_refused_when_all_is_known() -> None:
    found = absorbed([20_000.0, -20_000.0])
    with pytest.raises(ExactRangeError, match=r"the gradients of layer 3 \(Dense\) may add up to 40000, outside"):
        found.finalize_gradient(2.0)


def test_the_largest_gradient_in_range_is_accepted() -> None:
    found = absorbed([math.nextafter(LIMIT, 0.0) - 1])
    found.finalize_gradient(1.0)
    assert found.parameters[0].grad is not None
    assert float(found.parameters[0].grad) == float(torch.tensor(math.nextafter(LIMIT, 0.0) - 1))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_that_is_not_finite_is_detected_in_any_parameter_and_not_added(broken: float, place: int) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    found = GradientAccumulator(parameters, exact=True)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    parameters[place].grad = torch.tensor([1.0, broken])
    found.add_micro_batch()
    assert not found.is_finite
    assert not found.total.any()
    found.clear()
    assert found.is_finite


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 200_001])
def test_blocks_cover_every_element(size: int) -> None:
    found = accumulator(size)
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    for _ in range(2):
        found.parameters[0].grad = values.clone()
        found.add_micro_batch()
    found.finalize_gradient(2.0)
    assert torch.equal(found.gradient, values.double().mul(SCALE).round().div(SCALE).float())


def test_a_parameter_without_a_gradient_adds_nothing() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    found = GradientAccumulator(parameters, exact=True)
    parameters[1].grad = torch.ones(3)
    found.add_micro_batch()
    assert found.total.tolist() == [0, 0, *[int(SCALE)] * 3]


def loud(factor: float, **changes: Any) -> Any:
    return job_around(Dense, loss=partial(loudly, factor), exact=True, **changes)


def loudly(factor: float, output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target) * factor


@pytest.mark.parametrize("shape", [{}, {"stages": 2, "schedule": "zb"}, {"pipelines": 2, "stages": 2}], ids=str)
def test_a_run_whose_gradients_do_not_fit_ends_in_one_sentence(shape: dict[str, Any]) -> None:
    """The second step: three micro-batches, the most that one of two pipelines has, fit; the reduced bound shows that
    the sum does not."""
    for factor, sentence in ((1e7, "a gradient of layer"), (3e4, "may add up to")):
        with pytest.raises(ExactRangeError, match=sentence):
            reference(loud(factor, steps=1))
        with pytest.raises(ExactRangeError, match=sentence) as found:
            simulate(loud(factor, steps=1), **shape)
        assert "\n" not in str(found.value)


def test_a_tied_sum_is_bounded_by_all_of_its_layers() -> None:
    """Each of the two layers fits alone."""
    job = job_with(
        loud(1.0), layers=[Dense, Dense, partial(Dense, WIDTH, 3)], tied=[("0.linear.bias", "1.linear.bias")]
    )
    state = reference(job).snapshot
    assert "1.linear.bias" not in state.parameters
    group = partial(_tied_sum, job)
    group(20_000.0, 10_000.0)
    with pytest.raises(ExactRangeError, match=r"the gradients of the tied 0\.linear\.bias may add up to 40000"):
        group(20_000.0, 20_000.0)


def _tied_sum(job: Any, first: float, second: float) -> None:
    from culm.runtime.compute.model_state import ModelState

    state = ModelState(job, range(3))
    (tied,) = state.tied.values()
    sums, bounds = [], []
    for name, value in zip(tied.names, (first, second), strict=True):
        layer = state.layers[int(name[0])]
        for parameter in layer.trainable.values():
            parameter.grad = torch.full_like(parameter, value)
        layer.accumulator.add_micro_batch()
        sums.append(layer.gradient_sums()[name])
        bounds.append(layer.accumulator.bound)
    tied.finalize_gradient(sums, bounds, 1.0)
    assert tied.gradient.tolist() == [first + second] * WIDTH


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(JobError, match=r"Job\.layers\[1\] has complex parameters"):
        reference(job_around(partial(nn.Linear, WIDTH, WIDTH, dtype=torch.complex64), exact=True))


def test_exact_and_fast_learn_the_same_to_rounding() -> None:
    for name in ("plain", "weights as floats"):
        fast, exact = reference(JOBS[name]), reference(job_with(JOBS[name], exact=True))
        assert fast.losses == pytest.approx(exact.losses, rel=1e-5)


def test_the_fingerprint_contains_what_exact_results_depend_on() -> None:
    assert fingerprint(plain) == fingerprint(job_with(seed=9, steps=1))
    assert fingerprint(plain) != fingerprint(job_with(threads=2))
    assert torch.__version__ in fingerprint(plain)
