"""Layer partition: optimal compared with brute force, deterministic, with helpful errors if nothing fits."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan.model.layer_partition import (
    Cuts,
    InFlight,
    find_cuts,
    in_flight_1f1b,
    partition_layers,
    segment_layer_ranges,
    stage_memory_bytes,
)
from culm.plan.model.model_profile import LayerCost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def layer(time: float = 3.0, *, resident: int = 0, activation: int = 0, name: str = "block") -> LayerCost:
    return LayerCost(
        name=name,
        forward_s=time / 3,
        input_s=time / 3,
        weight_s=time / 3,
        parameter_bytes=resident,
        state_bytes=0,
        activation_bytes=activation,
        output_bytes=1,
    )


def layers(*times: float) -> list[LayerCost]:
    return [layer(time) for time in times]


def every_cut(count: int, segments: int) -> Iterator[Cuts]:
    """All cuts in lexicographic order: the earliest cuts first."""
    return combinations(range(1, count), segments - 1)


def times(costs: Sequence[LayerCost], cuts: Cuts) -> list[int]:
    return [sum(round(costs[i].time_s * 1e9) for i in span) for span in segment_layer_ranges(cuts, len(costs))]


def brute_force(
    costs: Sequence[LayerCost], stages: int, memory: int | None, keep: InFlight, ranges: int = 1
) -> Cuts | None:
    def fits(cuts: Cuts) -> bool:
        return memory is None or max(stage_memory_bytes(costs, stages, cuts, keep)) <= memory

    result = [cuts for cuts in every_cut(len(costs), stages * ranges) if fits(cuts)]
    return min(result, key=lambda c: (max(times(costs, c)), sum(t * t for t in times(costs, c)), c), default=None)


a_layer = st.builds(
    layer, st.integers(0, 6), resident=st.integers(0, 5), activation=st.integers(0, 3), name=st.just("block")
)
models = st.lists(a_layer, min_size=1, max_size=9)
limits = st.none() | st.integers(0, 40)


@given(models, st.data(), limits, st.none() | st.integers(1, 5))
def test_cuts_equal_those_of_brute_force(
    costs: list[LayerCost], data: st.DataObject, memory: int | None, micro_batches: int | None
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    keep = in_flight_1f1b(micro_batches)
    expected = brute_force(costs, stages, memory, keep)
    assert find_cuts(costs, stages, memory=memory, in_flight=keep) == expected
    if expected is None:
        with pytest.raises(PlanError):
            partition_layers(costs, stages, memory=memory, in_flight=keep)
    else:
        assert partition_layers(costs, stages, memory=memory, in_flight=keep) == expected


@given(st.lists(a_layer, min_size=4, max_size=9), st.sampled_from([(2, 2), (1, 3), (4, 1), (1, 2)]))
def test_an_interleaved_cut_without_a_limit_is_optimal_too(costs: list[LayerCost], shape: tuple[int, int]) -> None:
    stages, ranges = shape
    assert partition_layers(costs, stages, ranges=ranges) == brute_force(costs, stages, None, in_flight_1f1b(), ranges)


@given(st.lists(a_layer, min_size=4, max_size=9), st.integers(0, 80))
def test_an_interleaved_cut_fits_whenever_it_is_returned(costs: list[LayerCost], memory: int) -> None:
    keep = in_flight_1f1b()
    cuts = find_cuts(costs, 2, memory=memory, in_flight=keep, ranges=2)
    assert cuts is None or max(stage_memory_bytes(costs, 2, cuts, keep)) <= memory
    free = partition_layers(costs, 2, ranges=2)
    if max(stage_memory_bytes(costs, 2, free, keep)) <= memory:
        assert cuts == free


def test_an_overfull_interleaved_stage_gives_layers_to_the_others() -> None:
    costs = [layer(1, resident=8), *[layer(1, resident=2) for _ in range(7)]]
    free = partition_layers(costs, 2, ranges=2)
    assert stage_memory_bytes(costs, 2, free, in_flight_1f1b()) == (14, 8)
    held = partition_layers(costs, 2, ranges=2, memory=12)
    assert max(stage_memory_bytes(costs, 2, held, in_flight_1f1b())) <= 12


def test_a_stage_with_one_large_layer_still_fits() -> None:
    # Segment 0 is one layer and cannot shrink: the other segment of the stage gives up layers.
    costs = [layer(9, resident=8), *[layer(3, resident=2) for _ in range(8)]]
    assert stage_memory_bytes(costs, 2, partition_layers(costs, 2, ranges=2), in_flight_1f1b()) == (14, 10)
    assert partition_layers(costs, 2, ranges=2, memory=12) == (1, 4, 6)


def test_equal_layers_are_cut_evenly() -> None:
    assert partition_layers(layers(*[0.1] * 12), 4) == (3, 6, 9)


def test_of_equally_fast_cuts_the_more_even_one_wins() -> None:
    # The last layer determines the pace in any case; the three before it should still be divided evenly.
    assert partition_layers(layers(1, 1, 1, 1, 9), 3) == (2, 4)


def test_of_equally_even_cuts_the_earliest_wins() -> None:
    assert partition_layers(layers(1, 1, 1), 2) == (1,)


def test_memory_can_rule_out_the_fastest_cuts() -> None:
    costs = [layer(1, resident=1), layer(1, resident=1), layer(1, resident=9), layer(1, resident=9)]
    assert partition_layers(costs, 2) == (2,)
    assert partition_layers(costs, 2, memory=12) == (3,)


def test_an_early_stage_keeps_more_micro_batches_and_so_gets_fewer_layers() -> None:
    costs = [layer(1, activation=1) for _ in range(6)]
    assert stage_memory_bytes(costs, 2, (3,), in_flight_1f1b()) == (6, 3)
    assert partition_layers(costs, 2, memory=5) == (2,)
    assert partition_layers(costs, 2, memory=5, in_flight=in_flight_1f1b(1)) == (3,)


def test_spans_are_the_layers_of_each_segment() -> None:
    assert segment_layer_ranges((2, 4), 6) == (range(2), range(2, 4), range(4, 6))
    assert segment_layer_ranges((), 3) == (range(3),)


@pytest.mark.parametrize(
    ("stages", "ranges", "message"),
    [
        (5, 1, "stages is 5: 3 layers can fill at most 3 stages; use --stages 3"),
        (2, 2, "stages is 2: 3 layers can fill at most 1 stage of 2 ranges; use --stages 1"),
        (1, 4, "ranges is 4, but the model has only 3 layers: use --schedule 1f1b, which needs one"),
        (0, 1, "stages is 0: use a whole number of at least 1"),
        (1, 0, "ranges is 0: use a whole number of at least 1"),
    ],
)
def test_an_invalid_count_names_the_nearest_valid_one(stages: int, ranges: int, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        partition_layers(layers(1, 1, 1), stages, ranges=ranges)
    assert str(caught.value) == message


def test_too_few_stages_for_the_memory_says_how_many_are_needed() -> None:
    costs = [layer(1, resident=1000) for _ in range(10)]
    with pytest.raises(PlanError, match=r"^memory is 2.00 kB, too little for 3 stages: at least 5 stages are needed"):
        partition_layers(costs, 3, memory=2000)


def test_too_many_stages_for_the_memory_names_the_nearest_that_fits() -> None:
    # The first layer keeps its activations once for every stage: four stages need too much, one stage holds too much.
    costs = [layer(1, activation=10) for _ in range(4)]
    with pytest.raises(PlanError, match=r"^memory is 30 bytes, too little for 4 stages: use --stages 3$"):
        partition_layers(costs, 4, memory=30)


def test_a_layer_that_never_fits_is_named() -> None:
    costs = [layer(1), layer(1, resident=2_000_000_000, activation=5_000_000, name="head")]
    with pytest.raises(PlanError, match=r"^layer 1 \(head\) alone needs 2.00 GB, and memory is 1.00 GB"):
        partition_layers(costs, 2, memory=1_000_000_000)


def test_if_only_the_total_is_too_large_no_number_of_stages_fits() -> None:
    costs = [layer(1, activation=10) for _ in range(3)]
    with pytest.raises(PlanError, match=r"too little for any number of stages: use a larger device"):
        partition_layers(costs, 3, memory=12, in_flight=lambda g, n: 2)
