"""Shape search: finds the fastest shape that fits, with reasons; skipping shapes that cannot win changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from culm.errors import PlanError, ScheduleError
from culm.plan import (
    LayerCost,
    Profile,
    choose_shape,
    in_flight_1f1b,
    partition_layers,
    peak_in_flight,
    segment_layer_ranges,
)
from culm.plan.model.shape_prediction import (
    PipelineGrid,
    ShapeCandidate,
    ShapeSearchProblem,
    predict_step,
    work_lower_bound,
)
from culm.plan.model.shape_search import shared_cores_step_s
from culm.schedule import Costs, generate_plan, time_plan

schedules = st.sampled_from(["gpipe", "1f1b", "zb", "interleaved"])


def layer(time: float = 3.0, **fields: Any) -> LayerCost:
    made: dict[str, Any] = {"name": "block", "forward_s": time / 3, "input_s": time / 3, "weight_s": time / 3}
    made |= {"parameter_bytes": 0, "state_bytes": 0, "activation_bytes": 0, "output_bytes": 0}
    return LayerCost(**made | fields)


def profile(*layers: LayerCost) -> Profile:
    return Profile(layers=layers, device="cpu", micro_batch=1, threads=1, source="estimated")


def blocks(number: int, **fields: Any) -> Profile:
    return profile(*[layer(**fields) for _ in range(number)])


def shapes(table: tuple[ShapeCandidate, ...]) -> set[tuple[int, int]]:
    return {(row.pipelines, row.stages) for row in table}


a_layer = st.builds(
    layer,
    st.integers(1, 9),
    parameter_bytes=st.integers(0, 20),
    activation_bytes=st.integers(0, 3),
    output_bytes=st.integers(0, 5),
)


models = st.lists(a_layer, min_size=2, max_size=7)


def task(
    layers: list[LayerCost], nodes: int, micro_batches: int, schedule: str, memory: int | None = None
) -> ShapeSearchProblem:
    return ShapeSearchProblem(
        layers=tuple(layers),
        nodes=nodes,
        micro_batches=micro_batches,
        schedule=schedule,
        ranges=2 if schedule == "interleaved" else 1,
        memory=memory,
        bandwidth=1.0,
    )


@given(models, st.integers(1, 14), st.integers(1, 10), schedules, st.none() | st.integers(20, 90))
def test_no_shape_beats_the_chosen_one(
    layers: list[LayerCost], nodes: int, micro_batches: int, schedule: str, memory: int | None
) -> None:
    asked = task(layers, nodes, micro_batches, schedule, memory)
    depths = range(1, len(layers) // asked.ranges + 1)
    every = [PipelineGrid(D, P) for D in range(1, micro_batches + 1) for P in depths if nodes >= D * P]
    possible = [candidate for shape in every if (candidate := predict_step(asked, shape))]
    fixed: dict[str, Any] = {"nodes": nodes, "micro_batches": micro_batches, "schedule": schedule, "memory": memory}
    if not possible:
        with pytest.raises(PlanError):
            choose_shape(profile(*layers), bandwidth=1.0, **fixed)
        return
    choice = choose_shape(profile(*layers), bandwidth=1.0, **fixed)
    near = [c for c in possible if c.step_s <= 1.02 * min(p.step_s for p in possible)]
    assert choice.best == min(near, key=lambda c: (c.idle_nodes, c.step_s, c.stages))
    assert memory is None or all(row.max_stage_bytes <= memory for row in choice.table)


@given(models, st.integers(1, 4), st.integers(1, 4), st.integers(4, 10), schedules)
@example([layer()] * 4, 1, 4, 8, "zb")
def test_a_shape_is_skipped_only_if_its_step_is_longer(
    layers: list[LayerCost], pipelines: int, stages: int, micro_batches: int, schedule: str
) -> None:
    asked = task(layers, 16, micro_batches, schedule)
    shape = PipelineGrid(pipelines, min(stages, len(layers) // asked.ranges))
    candidate = predict_step(asked, shape)
    assert candidate is not None
    assert work_lower_bound(asked, shape) <= candidate.step_s * (1 + 1e-9)
    assert predict_step(asked, shape, cutoff_s=candidate.step_s * (1 + 1e-9)) == candidate


def test_a_shape_that_takes_much_too_long_is_skipped() -> None:
    assert predict_step(task([layer()] * 4, 4, 8, "1f1b"), PipelineGrid(1, 4), cutoff_s=11 * 3 - 0.1) is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
@pytest.mark.parametrize("micro_batches", [8, 9])
def test_the_predicted_step_is_that_of_the_whole_plan(schedule: str, micro_batches: int) -> None:
    model = profile(*[layer(1 + i % 3, parameter_bytes=4, output_bytes=1, step_s=0.5) for i in range(9)])
    asked: dict[str, Any] = {"nodes": 8, "micro_batches": micro_batches, "schedule": schedule, "bandwidth": 8.0}
    choice = choose_shape(model, pipelines=4, stages=2, **asked)
    plan = generate_plan(schedule, pipelines=4, stages=2, micro_batches=micro_batches)
    held = [[model.layers[i] for i in span] for span in segment_layer_ranges(choice.cuts, 9)]
    each = tuple(sum(c.forward_s for c in segment) for segment in held)
    ring = tuple(2 * 3 / 4 * 4 * len(segment) / 8.0 for segment in held)
    step = tuple(0.5 * len(segment) for segment in held)
    whole = time_plan(plan, Costs(forward=each, input=each, weight=each, reduce=ring, step=step, send=1 / 8.0))
    assert choice.step_s == pytest.approx(whole.makespan)
    assert choice.best.bubble_fraction == pytest.approx(whole.bubble_fraction, abs=0.02)


@given(st.integers(1, 6), st.integers(1, 12))
def test_live_activations_of_the_known_schedules_equal_the_textbook_values(stages: int, micro_batches: int) -> None:
    def alive(schedule: str) -> tuple[int, ...]:
        return peak_in_flight(generate_plan(schedule, pipelines=1, stages=stages, micro_batches=micro_batches))

    assert alive("gpipe") == (micro_batches,) * stages
    assert alive("1f1b") == tuple(in_flight_1f1b(micro_batches)(s, stages) for s in range(stages))
    assert max(alive("zb")) == min(stages, micro_batches)


def test_a_small_model_is_data_parallel_if_reduce_is_cheap() -> None:
    choice = choose_shape(blocks(8), nodes=4, micro_batches=8, schedule="1f1b")
    assert (choice.pipelines, choice.stages, choice.cuts) == (4, 1, ())
    assert choice.step_s == pytest.approx(2 * 8 * 3.0)


def test_a_model_with_expensive_reduce_becomes_a_pipeline() -> None:
    choice = choose_shape(blocks(8, parameter_bytes=10**12), nodes=4, micro_batches=8, schedule="1f1b")
    assert (choice.pipelines, choice.stages, choice.cuts) == (1, 4, (2, 4, 6))
    cheap = choose_shape(blocks(8, parameter_bytes=10**12), nodes=4, micro_batches=8, schedule="1f1b", bandwidth=1e15)
    assert cheap.stages == 1


def test_a_model_that_is_too_large_for_a_node_is_cut() -> None:
    choice = choose_shape(blocks(8, parameter_bytes=100), nodes=4, micro_batches=8, schedule="1f1b", memory=450)
    assert (choice.pipelines, choice.stages) == (2, 2)
    assert choice.best.max_stage_bytes == 400


def test_the_table_has_every_shape_of_a_small_cluster_best_first() -> None:
    table = choose_shape(blocks(8), nodes=4, micro_batches=8, schedule="1f1b").table
    assert shapes(table) == {(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3), (1, 4)}
    assert [row.step_s for row in table] == sorted(row.step_s for row in table)
    assert {(row.pipelines, row.stages): row.idle_nodes for row in table}[3, 1] == 1


def test_of_equally_fast_shapes_the_one_that_uses_all_nodes_wins() -> None:
    # 4 micro-batches on 2 or on 3 pipelines: two rounds either way.
    choice = choose_shape(blocks(4), nodes=3, micro_batches=4, schedule="1f1b", stages=1)
    assert (choice.pipelines, choice.best.idle_nodes) == (3, 0)


def test_there_are_never_more_pipelines_than_micro_batches() -> None:
    choice = choose_shape(blocks(2), nodes=16, micro_batches=3, schedule="1f1b")
    assert max(row.pipelines for row in choice.table) == 3


def test_fixed_dimensions_are_kept() -> None:
    asked: dict[str, Any] = {"nodes": 8, "micro_batches": 8, "schedule": "1f1b"}
    assert {P for _, P in shapes(choose_shape(blocks(8), stages=2, **asked).table)} == {2}
    assert {D for D, _ in shapes(choose_shape(blocks(8), pipelines=2, **asked).table)} == {2}
    both = choose_shape(blocks(8), pipelines=2, stages=3, **asked)
    assert shapes(both.table) == {(2, 3)}
    assert both.cuts == partition_layers(blocks(8).layers, 3)
    assert "the only shape that fits" in both.why and "2 of 8 nodes idle" in both.why


def test_interleaved_cuts_twice_as_many_segments() -> None:
    choice = choose_shape(blocks(8), nodes=2, micro_batches=4, schedule="interleaved", pipelines=1, stages=2)
    assert choice.cuts == (2, 4, 6)


def test_the_reason_names_the_shape_the_time_and_the_runner_up() -> None:
    why = choose_shape(blocks(8), nodes=4, micro_batches=8, schedule="1f1b").why
    assert why == "4 pipelines x 1 stage: 48 s a step, 25% faster than 2 x 2; bubble 0%, 0 bytes in the fullest stage"


def test_the_choice_is_deterministic() -> None:
    asked: dict[str, Any] = {"nodes": 12, "micro_batches": 12, "schedule": "zb", "memory": 700}
    model = blocks(12, parameter_bytes=50, activation_bytes=10)
    assert choose_shape(model, **asked) == choose_shape(model, **asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"nodes": 0}, "nodes is 0: use a whole number of at least 1"),
        ({"micro_batches": 0}, "micro_batches is 0: use a whole number of at least 1"),
        ({"pipelines": -1}, "pipelines is -1: use a whole number of at least 1"),
        ({"bandwidth": 0}, "bandwidth is 0: use a number of bytes per second above 0"),
        ({"stages": 5}, "stages is 5: 3 layers can fill at most 3 stages; use --stages 3"),
        (
            {"pipelines": 9, "nodes": 64},
            "pipelines is 9, but a step has only 8 micro-batches: use --pipelines 8, or a larger global batch",
        ),
        ({"pipelines": 4, "stages": 2}, "nodes is 4, but 4 pipelines x 2 stages take 8: use --nodes 8"),
        ({"pipelines": 5}, "nodes is 4, but 5 pipelines take 5: use --nodes 5"),
        (
            {"schedule": "interleaved", "stages": 2},
            "stages is 2: 3 layers can fill at most 1 stage of 2 ranges; use --stages 1",
        ),
        (
            {"memory": 5},
            "layer 0 (block) alone needs 10 bytes, and memory is 5 bytes: use a larger device or a smaller micro-batch",
        ),
        (
            {"memory": 20, "nodes": 1},
            "memory is 20 bytes, too little for any shape on 1 node: 1 pipeline of 2 stages would fit; use --nodes 2",
        ),
        (
            {"memory": 20, "pipelines": 2, "nodes": 3},
            "memory is 20 bytes, too little for any shape on 3 nodes: 2 pipelines of 2 stages would fit; use --nodes 4",
        ),
        (
            {"memory": 20, "stages": 1},
            "memory is 20 bytes, too little for 1 stage: at least 2 stages are needed; use --stages 2",
        ),
    ],
)
def test_an_impossible_request_names_the_nearest_possible_one(asked: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"nodes": 4, "micro_batches": 8, "schedule": "1f1b"}
    with pytest.raises(PlanError) as caught:
        choose_shape(blocks(3, parameter_bytes=10), **usual | asked)
    assert str(caught.value) == message


def test_errors_distinguish_activations_that_never_fit_from_a_layer_that_never_fits() -> None:
    with pytest.raises(PlanError, match=r"^memory is 15 bytes, too little for any number of stages: use a larger"):
        choose_shape(blocks(3, activation_bytes=10), nodes=4, micro_batches=8, schedule="gpipe", memory=15)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ScheduleError, match="did you mean '1f1b'"):
        choose_shape(blocks(3), nodes=2, micro_batches=2, schedule="1f1")


def test_workers_that_share_cores_take_at_least_all_work_divided_by_the_cores() -> None:
    model = blocks(8)  # 3 s of work in each layer and micro-batch
    asked = {"pipelines": 2, "stages": 2, "micro_batches": 8}
    assert shared_cores_step_s(model, threads=1, cores=2, **asked) == pytest.approx(8 * 8 * 3.0 / 2)
    assert shared_cores_step_s(model, threads=2, cores=4, **asked) == pytest.approx(8 * 8 * 3.0 * 2 / 4)
    assert shared_cores_step_s(model, threads=1, cores=4, **asked) is None
