"""Named values of a job: declared, computed per micro-batch, reduced once whatever happens, written everywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_jobs import DATA, job
from torch import Tensor, nn

import culm
from culm.errors import JobError, LayerFailed
from culm.metric import Metric
from culm.observe.step_metrics import StepMetrics
from culm.runtime.compute.model_check import check_model
from culm.runtime.compute.rng import sample_indices
from culm.runtime.microbatch_stats import MicroBatchStats, combine_values
from culm.runtime.worker_state import StageReplica
from culm.testing import Faults, simulate

STEPS = 3


def recording_loss(output: Tensor, target: Tensor) -> Tensor:
    culm.record("square", output.square().mean())
    return nn.functional.mse_loss(output, target)


def weighted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    weight = 1.0 + float(target.numel() % 3) + float(output.detach().sum() > 0)
    return nn.functional.mse_loss(output, target) * weight, weight


METRICS: dict[str, Any] = {
    "largest": culm.Metric(lambda output, target: output.max(), reduce="max"),
    "absolute": lambda output, target: (output - target).abs().mean(),
    "square": "sum",
}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def values_of(found: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{name: line[name] for name in METRICS} for line in found]


def measured(**fields: Any) -> culm.Job:
    return job(loss=recording_loss, metrics=METRICS, exact=True, **fields)


def test_values_do_not_change_what_is_learned_and_are_lines_of_their_own(tmp_path: Path) -> None:
    plain = simulate(job(exact=True), pipelines=2, stages=2)
    found = simulate(measured(), pipelines=2, stages=2, out=str(tmp_path))
    assert found.state_sha256 == plain.state_sha256
    assert found.losses == plain.losses
    assert [line["step"] for line in lines(tmp_path)] == list(range(STEPS))
    assert all(math.isfinite(value) for line in values_of(lines(tmp_path)) for value in line.values())


def test_the_first_step_has_the_values_of_its_micro_batches(tmp_path: Path) -> None:
    """Computed here by hand, with the weights that the run begins with."""
    described = measured(steps=1)
    before = simulate(job(exact=True, steps=0), stages=1).snapshot
    layers = [nn.Linear(4, 4) for _ in range(4)]
    for number, layer in enumerate(layers):
        state = {name.partition(".")[2]: v for name, v in before.parameters.items() if name.startswith(f"{number}.")}
        layer.load_state_dict(state)
    simulate(described, pipelines=2, stages=2, out=str(tmp_path))
    batches = [sample_indices(described, 0, micro) for micro in range(described.micro_batches)]
    with torch.no_grad():
        outputs = [nn.Sequential(*layers)(torch.stack([DATA[i][0] for i in batch])) for batch in batches]
    (line,) = lines(tmp_path)
    assert line["largest"] == pytest.approx(float(max(output.max() for output in outputs)))
    assert line["absolute"] == pytest.approx(float(torch.stack(outputs).abs().mean()))
    assert line["square"] == pytest.approx(sum(float(output.square().mean()) for output in outputs))


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "checkpoint"])
@pytest.mark.parametrize("node", [1, 3])
def test_values_are_the_same_through_the_loss_of_a_node(tmp_path: Path, strategy: str, node: int) -> None:
    """Nodes 1 and 3 run the last stage, where the values come from."""
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": strategy, "checkpoint_every": 1}
    simulate(measured(), out=str(tmp_path / "calm"), **shape)
    faults = Faults().kill(node, step=1, nth=5)
    found = simulate(measured(), out=str(tmp_path / "lost"), faults=faults, **shape)
    assert found.summary["preemptions"] == 1
    assert values_of(lines(tmp_path / "lost")) == values_of(lines(tmp_path / "calm"))


def test_values_are_the_same_when_the_leader_is_lost(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}
    simulate(measured(), out=str(tmp_path / "calm"), **shape)
    faults = Faults().kill(0, at="commit", step=1)
    simulate(measured(), out=str(tmp_path / "lost"), faults=faults, **shape)
    assert values_of(lines(tmp_path / "lost")) == values_of(lines(tmp_path / "calm"))


def test_values_of_a_dropped_pipeline_are_left_out(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "drop"}
    found = simulate(measured(), out=str(tmp_path), faults=Faults().kill(3, step=1, nth=1), **shape)
    assert found.summary["samples_lost"] > 0
    dropped = [line for line in lines(tmp_path) if line.get("samples_lost")]
    assert dropped
    assert all(0 < line["square"] < lines(tmp_path)[0]["square"] for line in dropped)


def test_means_are_weighted_like_the_loss(tmp_path: Path) -> None:
    declared = {"same": nn.functional.mse_loss}
    simulate(job(loss=weighted_loss, metrics=declared), stages=2, out=str(tmp_path))
    for line in lines(tmp_path):
        assert line["same"] == pytest.approx(line["loss"])


def test_layers_with_batch_norm_have_their_statistics_beside_the_values(tmp_path: Path) -> None:
    layers = [*[lambda: nn.Linear(4, 4)] * 3, lambda: nn.BatchNorm1d(4)]
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2}
    plain = simulate(job(layers=layers, exact=True), **shape)
    found = simulate(measured(layers=layers), out=str(tmp_path), **shape)
    assert found.state_sha256 == plain.state_sha256
    assert lines(tmp_path)[0]["square"] > 0


@pytest.mark.parametrize(
    ("reduce", "values", "weights", "expected"),
    [
        ("mean", [1.0, 4.0], [1.0, 1.0], 2.5),
        ("mean", [1.0, 4.0], [3.0, 1.0], 1.75),
        ("mean", [1.0, 4.0], [0.0, 0.0], 0.0),
        ("sum", [1.0, 4.0], [3.0, 1.0], 5.0),
        ("max", [-4.0, -1.0], [1.0, 1.0], -1.0),
        ("max", [math.nan, 1.0], [1.0, 1.0], math.nan),
        ("max", [1.0, math.nan], [1.0, 1.0], math.nan),
        ("sum", [math.inf, 1.0], [1.0, 1.0], math.inf),
    ],
)
def test_values_are_reduced_as_declared(reduce: Any, values: Any, weights: Any, expected: float) -> None:
    assert repr(combine_values(Metric(None, reduce), values, weights)) == repr(expected)


# What is refused


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (["accuracy"], "Job.metrics is a list: pass a dict from names to functions, culm.Metric or reductions"),
        ({"loss": "mean"}, "Job.metrics names a value 'loss', which every step has already: use another, as 'my_loss'"),
        ({"": "mean"}, "Job.metrics names a value '': use a string of letters"),
        ({"a": "median"}, "Job.metrics['a'] is 'median': use a function (output, target) -> scalar"),
        ({"a": 3}, "Job.metrics['a'] is 3: use a function (output, target) -> scalar"),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_job(metrics: Any, sentence: str) -> None:
    with pytest.raises(JobError) as error:
        job(metrics=metrics)
    assert str(error.value).startswith(sentence)


def test_a_metric_names_its_wrong_field() -> None:
    with pytest.raises(JobError, match=r"culm.Metric has reduce='min': use one of mean, sum, max"):
        culm.Metric(lambda output, target: 0.0, reduce="min")  # type: ignore[arg-type]
    with pytest.raises(JobError, match=r"culm.Metric has function=3, not callable"):
        culm.Metric(3)  # type: ignore[arg-type]


def twice(output: Tensor, target: Tensor) -> Tensor:
    culm.record("square", 1.0)
    return recording_loss(output, target)


class Recording(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        culm.record("inside", x.mean())
        return super().forward(x)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"loss": recording_loss},
            "the loss records 'square', which Job.metrics does not declare: add metrics={'",
        ),
        (
            {"metrics": {"square": "sum"}},
            "Job.metrics declares 'square', which the loss did not record: call culm",
        ),
        ({"loss": twice, "metrics": {"square": "sum"}}, "the loss records 'square' twice for one micro-batch"),
        ({"metrics": {"a": lambda o, t: o}}, "Job.metrics['a'] is a tensor of shape (2, 4): use one real number"),
        ({"metrics": {"a": lambda o, t: "x"}}, "Job.metrics['a'] is a str: use one real number for each micro-batch"),
        ({"metrics": {"a": lambda o, t: 1 / 0}}, "the layers do not run: Job.metrics['a'] raised ZeroDivisionError"),
        ({"layers": [lambda: Recording(4, 4)] * 2}, "a layer calls culm.record('inside', ...): call it in Job.loss"),
    ],
)
def test_what_cannot_be_reduced_is_refused_before_anything_starts(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(JobError) as error:
        check_model(job(**fields))
    assert str(error.value).startswith(sentence)


def test_a_function_that_looks_at_values_is_fine() -> None:
    check_model(job(metrics={"a": lambda output, target: 1.0 if output.max().item() > 0 else 0.0}))


def test_an_error_in_a_function_ends_the_run_with_its_name() -> None:
    calls: list[int] = []

    def fails_later(output: Tensor, target: Tensor) -> float:
        calls.append(len(calls))
        if len(calls) > 6:
            raise ValueError("boom")
        return float(output.sum() + target.sum())

    with pytest.raises(LayerFailed, match=r"Job.metrics\['a'\] raised ValueError: boom"):
        simulate(job(metrics={"a": fails_later}), stages=2, strategy="none")


def test_recording_outside_of_a_run_does_nothing() -> None:
    assert recording_loss(torch.ones(2, 4), torch.zeros(2, 4)) == 1


# The hook


def test_values_that_the_hook_returns_are_in_the_line_and_in_what_others_hear(tmp_path: Path) -> None:
    def hook(metrics: StepMetrics) -> object:
        values = {"scaled": 10 * metrics["loss"]}
        return (values, culm.STOP) if metrics.step == 1 else values

    simulate(job(on_step=hook), stages=2, out=str(tmp_path), strategy="none")
    found = lines(tmp_path)
    assert [line["scaled"] for line in found] == [10 * line["loss"] for line in found]
    assert len(found) == 2


def test_a_hook_that_returns_a_wrong_value_ends_the_run_after_its_step(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"Job\.on_step names a value 'loss'"):
        simulate(job(on_step=lambda metrics: {"loss": 1.0}), stages=2, out=str(tmp_path), strategy="none")
    assert [line["step"] for line in lines(tmp_path)] == [0]


# The vector that is reduced


@pytest.mark.parametrize("metrics", [{}, METRICS], ids=["none", "three"])
def test_only_rows_of_the_last_segment_are_wider_with_values(metrics: dict[str, Any]) -> None:
    """M counts, a bound and a flag for each layer, then M rows: two counts of additions and, in the last segment, two
    digests of samples, loss, weight and values."""
    described = job(metrics=metrics, loss=recording_loss)
    stages = {0: range(2), 1: range(2, 4)}
    replica = StageReplica(described, 0, stages, torch.device("cpu"), 0)
    first, last = (MicroBatchStats(replica.segments[g], 4).metadata().numel() for g in stages)
    assert (first, last) == (4 + 2 * 2 + 4 * 2, 4 + 2 * 2 + 4 * (4 + 2 + len(metrics)))
