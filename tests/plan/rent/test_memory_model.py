"""What a worker needs on its device and in host memory, and why a job is refused that does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from culm.plan.model.model_profile import LayerCost
from culm.plan.rent.memory_model import WorkerMemory, explain_memory_misfit, worker_memories
from culm.strategies import registry
from culm.text_format import format_bytes

MB = 10**6
LAYER = LayerCost(
    name="Block",
    forward_s=1.0,
    input_s=1.0,
    weight_s=1.0,
    parameter_bytes=10 * MB,
    state_bytes=30 * MB,
    activation_bytes=5 * MB,
    output_bytes=2 * MB,
)
FOUR = [(LAYER,)] * 4


def memories(
    segments: Sequence[tuple[LayerCost, ...]], strategy: str = "reroute", *, pipelines: int = 2, **options: Any
) -> list[WorkerMemory]:
    """Eight micro-batches on accelerators."""
    options = {"strategy": registry.get(strategy), "on_accelerator": True, **options}
    return worker_memories(segments, 8, pipelines=pipelines, **options)


def test_each_stage_has_its_activations_in_flight_and_its_frames() -> None:
    found = memories(FOUR)
    assert [memory.activations // MB for memory in found] == [20, 15, 10, 5]
    assert [memory.frames // MB for memory in found] == [36, 72, 72, 36], "of two steps, and two that have arrived"
    assert all(memory.on_host == memory.frames + memory.sums for memory in found)


def test_activations_of_shadows_that_run_ahead_are_on_the_host_but_for_two_forwards() -> None:
    """Of the stage that follows; the last one shadows the first."""
    segments = [(LAYER,), (LAYER, LAYER), (LAYER,), (LAYER,)]
    found = memories(segments, "shadow")
    assert [memory.shadow_activations // MB for memory in found] == [20, 10, 10, 10]
    assert [memory.off_loaded // MB for memory in found] == [80, 40, 40, 40], "of eight micro-batches"
    for eager, lazy in zip(found, memories(segments, "shadow-lazy"), strict=True):
        assert lazy.off_loaded == lazy.shadow_activations == 0
        assert eager.on_host == lazy.on_host + eager.off_loaded
        assert eager.total == lazy.total + eager.shadow_activations
    two_segments = memories(segments, "shadow", stages=2, in_flight=[4, 3, 2, 1])
    assert [memory.shadow_activations // MB for memory in two_segments] == [20, 10], "of the larger of two segments"
    assert [memory.off_loaded // MB for memory in two_segments] == [120, 80]


def test_a_shadow_that_does_not_fit_is_advised_to_run_nothing_in_advance() -> None:
    found = memories(FOUR, "shadow")
    limit = max(memory.total for memory in memories(FOUR, "shadow-lazy"))
    told = explain_memory_misfit(found, limit, where="--memory", strategy="shadow", layers=8)
    assert told is not None
    assert "--strategy shadow-lazy, which runs nothing in advance" in told
    assert "activations of the shadow" in told


def test_exact_sums_are_twice_as_large_and_none_keeps_neither_outputs_nor_weights() -> None:
    assert [memories([(LAYER,)], exact=exact)[0].sums // MB for exact in (False, True)] == [10, 20]
    for memory in memories(FOUR, "none"):
        assert memory.saved_weights == 0
        assert memory.frames < memories(FOUR)[memory.stage].frames / 8


def test_one_pipeline_without_kept_outputs_sums_nothing() -> None:
    assert memories(FOUR, "none", pipelines=1)[0].sums == 0


def test_a_cpu_has_one_memory_for_everything() -> None:
    (memory,) = memories([(LAYER,)], on_accelerator=False)
    assert memory.on_host == 0
    assert memory.total >= memory.sums + memory.weights + memory.saved_weights + memory.workspace


def test_a_stage_of_two_segments_has_the_sum_of_both() -> None:
    found = memories(FOUR, stages=2, in_flight=[4, 3, 2, 1])
    assert [memory.activations // MB for memory in found] == [30, 20]
    assert [memory.weights // MB for memory in found] == [20, 20]


def test_frozen_layers_have_no_sums() -> None:
    frozen = LayerCost(
        name="Frozen",
        forward_s=1.0,
        input_s=1.0,
        weight_s=0.0,
        parameter_bytes=10 * MB,
        state_bytes=0,
        activation_bytes=0,
        output_bytes=0,
    )
    assert memories([(frozen,)])[0].sums == 0


@pytest.mark.parametrize(("exact", "bucket"), [(False, 20), (True, 0)])
def test_on_a_cpu_a_bucket_has_trained_layers_only_as_large_as_they_are_summed(exact: bool, bucket: int) -> None:
    """Two layers of 10 MB share a bucket of 25 MB, but not if they are summed in 8 bytes; frozen ones never."""
    frozen = structs.replace(LAYER, state_bytes=0)
    options: dict[str, Any] = {"strategy": registry.get("none"), "on_accelerator": False}

    def workspace(*layers: LayerCost, pipelines: int = 2) -> int:
        return worker_memories([layers], 8, pipelines=pipelines, exact=exact, **options)[0].workspace

    def sums(*layers: LayerCost) -> float:
        return 0.03 * worker_memories([layers], 8, pipelines=2, exact=exact, **options)[0].sums

    more = workspace(LAYER, LAYER) - workspace(LAYER, LAYER, pipelines=1) - sums(LAYER, LAYER)
    assert more == pytest.approx(bucket * MB, abs=2)
    none = workspace(frozen, frozen) - workspace(frozen, frozen, pipelines=1)
    assert none == 0


@pytest.mark.parametrize(
    ("strategy", "available", "fixes"),
    [
        ("reroute", 79, "more --stages than 4, or Job.recompute or a smaller micro_batch"),
        ("shadow", 159, "--strategy reroute, which keeps no shadows"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_with_stage_need_and_fix(strategy: str, available: int, fixes: str) -> None:
    found = memories(FOUR, strategy)

    def explain(size: int) -> str | None:
        return explain_memory_misfit(found, size * MB, where="the GPU", strategy=strategy, layers=8)

    sentence = explain(available)
    assert sentence is not None
    assert sentence.startswith(
        f"stage 0 needs {format_bytes((available + 1) * MB)} of device memory under {strategy} ("
    )
    assert fixes in sentence
    assert "\n" not in sentence
    assert explain(available + 1) is None
