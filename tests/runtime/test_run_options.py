"""What a run does besides plain steps: evaluate, stop, skip, start from a file."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.cached_runs import cached_setup, reference_result
from tests.runtime.sample_data import WIDTH, Points, by_label, drawing, sgd
from tests.runtime.sample_jobs import JOBS, everything, job_around, job_with, plain, words
from tests.runtime.sample_layers import Dense
from torch import Tensor, nn

import culm
from culm.errors import JobError, LayerFailed, NonFiniteLoss
from culm.job import Job
from culm.observe.step_metrics import StepMetrics
from culm.runtime.compute.batch_loading import evaluation_micro_batches, load_evaluation_batch
from culm.runtime.compute.model_check import check_model
from culm.runtime.compute.model_state import ModelState, build_layer
from culm.testing import SimulatedRun, reference, simulate
from culm.testing.simulated_cluster import run_prepared

evaluated = job_with(
    JOBS["batch norm"], evaluate=Points(count=8), evaluate_every=2, steps=4, layers=[
        partial(Dense, dropout=0.5), *JOBS["batch norm"].layers[1:]
    ],
)  # fmt: skip


EVALUATED = {
    "a mean": evaluated,
    "a sum": job_with(everything, evaluate=words.data, evaluate_every=1),
    "layers that draw": job_with(JOBS["random layers"], evaluate=Points(count=7), evaluate_every=2, loss=drawing),
}


def run(job: Job, *, like: Job | None = None, **request: Any) -> SimulatedRun:
    return run_prepared(job, cached_setup(job, same_layers_as=like, **request))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
@pytest.mark.parametrize("job", EVALUATED.values(), ids=EVALUATED)
def test_evaluations_equal_the_reference(job: Job, schedule: str) -> None:
    wanted = reference_result(job).evaluations
    assert len(wanted) == job.steps // job.evaluation_interval.steps
    assert run(job, schedule=schedule, stages=2).evaluations == wanted


def test_pipelines_share_an_evaluation_and_come_to_the_same_bits() -> None:
    job = job_with(evaluated, exact=True)
    assert run(job, like=evaluated, pipelines=3, stages=2).evaluations == reference(job).evaluations


def test_an_evaluation_is_the_mean_over_all_items_with_dropout_off_and_running_statistics() -> None:
    trained = reference_result(evaluated)
    model = nn.Sequential(*(build_layer(evaluated, index) for index in range(len(evaluated.layers)))).eval()
    model.load_state_dict({**trained.snapshot.parameters, **trained.snapshot.buffers})
    total = 0.0
    for micro in range(evaluation_micro_batches(evaluated)):
        (inputs,), target, _ = load_evaluation_batch(evaluated, micro, torch.device("cpu"))
        loss = evaluated.loss(model(inputs), target)
        assert isinstance(loss, Tensor)
        total += loss.item() * len(inputs)
    assert trained.evaluations[3] == pytest.approx(total / 8, rel=1e-6)


def test_evaluating_does_not_disturb_the_training() -> None:
    quiet = job_with(evaluated, evaluate=None, evaluate_every=0)
    loud = run(evaluated, schedule="zb", stages=3)
    assert loud.state_sha256 == run(quiet, like=evaluated, schedule="zb", stages=3).state_sha256


class Watch:
    """A hook that records its calls, and stops the run after some step."""

    def __init__(self, last: int = 1 << 30) -> None:
        self.told: list[StepMetrics] = []
        self.last = last

    def __call__(self, metrics: StepMetrics) -> object:
        self.told.append(metrics)
        return culm.STOP if metrics["step"] == self.last else None


def test_the_hook_is_called_for_every_step_in_order() -> None:
    watch = Watch()
    found = run(job_with(plain, on_step=watch, steps=4), like=plain, stages=3)
    assert [(told["step"], told["loss"]) for told in watch.told] == list(enumerate(found.losses))


plain_exact = job_with(plain, exact=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_a_hook_that_returns_stop_ends_the_run_after_that_step(schedule: str) -> None:
    job = job_with(plain, on_step=Watch(last=1), steps=9, exact=True)
    found, wanted = run(job, like=plain, pipelines=2, stages=2, schedule=schedule), reference_result(plain_exact)
    assert (found.summary["steps"], found.losses) == (2, wanted.losses)
    assert found.state_sha256 == wanted.state_sha256


class Poisoned(Points):
    """Item 7 is not a number."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point, label = super().__getitem__(index)
        return point * (math.nan if index == 7 else 1.0), label


class Rooted(nn.Module):
    """Its gradient is infinite where an input is exactly zero, though its output is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).abs().sqrt()


class Blank(Points):
    """Item 7 is all zeros."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point, label = super().__getitem__(index)
        return point * (0.0 if index == 7 else 1.0), label


nan_loss = job_around(Dense, data=Poisoned(count=30), steps=3, optimizer=sgd)
nan_gradient = job_with(layers=[Rooted, Dense, partial(Dense, WIDTH, 3)], data=Blank(count=30), steps=3, optimizer=sgd)
BROKEN = {
    "a loss": nan_loss,
    "a loss, clipped": job_with(nan_loss, clip_norm=0.1),
    "a gradient": nan_gradient,
    "a gradient, clipped": job_with(nan_gradient, clip_norm=0.1),
}
SHAPES: list[dict[str, Any]] = [{"stages": 3}, {"stages": 2, "schedule": "zb"}, {"pipelines": 2, "stages": 2}]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_a_step_that_is_not_finite_can_be_skipped_and_moves_nothing(name: str, exact: bool) -> None:
    job = job_with(BROKEN[name], nonfinite="skip", exact=exact)
    wanted = reference(job)
    assert all(bool(value.isfinite().all()) for value in wanted.snapshot.tensors.values())
    for shape in SHAPES if exact else SHAPES[:2]:
        found = run(job, like=BROKEN[name], **shape)
        assert found.summary["skipped_steps"] == 1
        assert found.state_sha256 == wanted.state_sha256


def test_a_skipped_step_changes_nothing() -> None:
    """Item 7 is in one of the three steps of a pass. If a run consists of that step only, nothing changes."""
    job = job_with(nan_loss, nonfinite="skip")
    states = [reference(job_with(job, steps=steps)).state_sha256 for steps in range(4)]
    assert len(set(states)) == 3


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_a_step_that_is_not_finite_stops_the_run_by_default(name: str, exact: bool) -> None:
    job = job_with(BROKEN[name], exact=exact)
    with pytest.raises(NonFiniteLoss) as wanted:
        reference(job)
    step = next(word for word in str(wanted.value).split() if word.isdigit())
    for shape in SHAPES:
        with pytest.raises(NonFiniteLoss, match=f"step {step}") as found:
            run(job, like=BROKEN[name], **shape)
        assert str(found.value).count("\n") == 0


def nothing_counts(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return by_label(output, target)[0], 0.0


def test_weights_that_add_up_to_zero_stop_the_run_or_skip_the_step() -> None:
    job = job_with(loss=nothing_counts)
    with pytest.raises(NonFiniteLoss, match="add up to 0 in step 0"):
        run(job, stages=2)
    found = run(job_with(job, nonfinite="skip"), like=job, stages=2)
    assert found.state_sha256 == reference(job_with(job, steps=0)).state_sha256


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_negative_weights_are_named(weight: float) -> None:
    def turned(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        return by_label(output, target)[0], weight

    with pytest.raises(LayerFailed, match=f"weights that the loss returned add up to {5 * weight} in step 0"):
        simulate(job_with(loss=turned), stages=2)


def test_a_step_with_negative_weights_is_not_skipped() -> None:
    def turned(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        return by_label(output, target)[0], -1.0

    job = job_with(loss=turned, nonfinite="skip")
    for made in (lambda: simulate(job, stages=2), lambda: reference(job)):
        with pytest.raises(LayerFailed, match=r"weights that the loss returned add up to -5\.0 in step 0"):
            made()


SCHEDULES_GONE_WRONG = {
    "raises": (lambda step: 1 / (1 - step), "Job.lr_schedule raised ZeroDivisionError for step 1: division by zero"),
    "is not a number": (lambda step: "small", "Job.lr_schedule raised ValueError for step 0: could not convert"),
    "is not finite": (lambda step: math.nan, "Job.lr_schedule is nan for step 0: return a finite factor"),
}


@pytest.mark.parametrize("name", SCHEDULES_GONE_WRONG)
def test_a_learning_rate_that_is_no_number_is_named_with_its_step(name: str) -> None:
    schedule, sentence = SCHEDULES_GONE_WRONG[name]
    with pytest.raises(LayerFailed, match=sentence):
        run(job_with(lr_schedule=schedule), like=plain, stages=2)


@pytest.mark.parametrize("limit", ["a lot", -1.0, math.inf])
def test_a_clip_norm_that_is_no_number_is_named(limit: Any) -> None:
    with pytest.raises(JobError, match=r"Job\.clip_norm is .*: use a number above 0"):
        job_with(clip_norm=limit)


def test_a_loss_without_any_gradient_for_one_micro_batch_is_fine() -> None:
    job = job_with(loss=sometimes_constant)
    assert simulate(job, stages=3, schedule="zb").state_sha256 == reference(job).state_sha256


def sometimes_constant(output: Tensor, target: Tensor) -> Tensor:
    """A weight of zero for micro-batches with an even sum."""
    return nn.functional.cross_entropy(output, target) if int(target.sum()) % 2 else torch.tensor(0.5)


def saved(job: Job, path: Path, **renamed: str) -> str:
    """Weights and buffers of the job after its steps, as a file."""
    found = reference_result(job).snapshot
    tensors = {renamed.get(name, name): value for name, value in {**found.parameters, **found.buffers}.items()}
    save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize("name", ["batch norm", "gpt tied", "tied and shared", "everything"])
def test_a_run_starts_from_a_file(name: str, tmp_path: Path) -> None:
    job = job_with(JOBS[name], exact=True)
    start = job_with(job, init=saved(job, tmp_path / "a.safetensors"))
    assert reference(job_with(start, steps=0)).weights_sha256 == reference_result(job).weights_sha256
    assert reference_result(start).weights_sha256 != reference_result(job).weights_sha256
    assert simulate(start, pipelines=2, stages=2).state_sha256 == reference_result(start).state_sha256


def test_a_parameter_with_two_names_in_a_layer_is_saved_once() -> None:
    found = reference(JOBS["tied and shared"]).snapshot
    assert [name for name in found.parameters if name.startswith("1.")] == ["1.up.bias", "1.down.bias", "1.up.weight"]
    assert not found.buffers


def test_a_tied_tensor_may_stand_in_the_file_under_any_of_its_names(tmp_path: Path) -> None:
    path = saved(everything, tmp_path / "a.safetensors", **{"0.table.weight": "5.head.weight"})
    check_model(job_with(everything, init=path))
    assert reference(job_with(everything, init=path, steps=0)).weights_sha256 == reference(everything).weights_sha256


@pytest.mark.parametrize("used", [reference, check_model], ids=["where it is read", "before anything starts"])
def test_a_file_of_another_model_is_refused(used: Callable[[Job], object], tmp_path: Path) -> None:
    path = saved(plain, tmp_path / "a.safetensors")
    with pytest.raises(JobError, match=r"has no tensor '5\.linear\.bias' \(2 are missing\)"):
        used(job_with(layers=[Dense, *plain.layers], init=path))
    with pytest.raises(JobError, match=r"'4\.linear\.\w+' has shape \(3,.*\), the layer needs \(4,"):
        used(job_with(layers=[*plain.layers[:-1], partial(Dense, WIDTH, 4)], data=Points(classes=4), init=path))
    Path(path).write_bytes(b"nothing of the kind")
    with pytest.raises(JobError, match="cannot be read as safetensors"):
        used(job_with(init=path))


def test_another_seed_learns_something_else() -> None:
    assert len({run(job_with(seed=seed), like=plain, stages=2).weights_sha256 for seed in range(4)}) == 4
    assert len({reference(job_with(seed=seed, steps=0)).weights_sha256 for seed in range(4)}) == 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_steps_leave_the_initial_weights(shape: dict[str, Any]) -> None:
    job = job_with(everything, steps=0)
    found = run(job, like=everything, **shape)
    state = ModelState(everything, range(6))
    assert found.losses == []
    assert found.summary["steps"] == 0
    assert found.weights_sha256 == reference(job).weights_sha256
    assert torch.equal(found.snapshot.parameters["1.linear.weight"], state.layers[1].trainable["1.linear.weight"])


class Faulty(Dense):
    """Works in the model check, and fails in the second step."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if self.calls > 7:
            raise ValueError("seven is enough")
        return super().forward(x)


class Hindered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("not backwards")


class OneWay(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return Hindered.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


def test_user_code_that_raises_is_named() -> None:
    Faulty.calls = 0
    with pytest.raises(
        LayerFailed, match=r"node 1: layer 2 \(Faulty\) raised ValueError on input \(2, 6\) float32: seven"
    ):
        simulate(job_around(Dense, Faulty), stages=2, strategy="none")
    for schedule in ("1f1b", "zb"):
        with pytest.raises(LayerFailed, match=r"the backward of layer 2 \(OneWay\).* raised ValueError: not backwards"):
            simulate(job_around(Dense, OneWay), stages=2, schedule=schedule, cuts=(2,), strategy="none")


class Clamped(Dense):
    """Clamps its weights in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def test_weights_that_change_in_forward_are_refused_where_other_workers_hold_them_too() -> None:
    job = job_around(Clamped)
    assert simulate(job, stages=2, strategy="none").state_sha256 == reference(job).state_sha256
    shapes: list[dict[str, Any]] = [{"pipelines": 2, "strategy": "none"}, {"stages": 2, "strategy": "shadow"}]
    for shape in shapes:
        with pytest.raises(
            JobError, match=r"Job\.layers\[1\] changes its parameter 'linear\.weight' in forward, which"
        ):
            simulate(job, **shape)


class Unnoted(nn.Module):
    """Batch norm as a function: torch's kernel changes the buffers without increasing their version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True)  # type: ignore[arg-type]


def test_buffers_that_change_without_a_new_version_are_refused_too() -> None:
    for run in (simulate, reference):
        with pytest.raises(JobError, match=r"Job\.layers\[1\] moves its buffer 'mean' in forward"):
            run(job_around(Unnoted))


class Remembering(nn.Module):
    """A loss that counts its calls."""

    asked: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("asked", torch.tensor(0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.asked += 1
        return nn.functional.cross_entropy(output, target)


def test_a_loss_whose_buffers_change_is_refused() -> None:
    with pytest.raises(JobError, match=r"Job\.loss moves its buffer 'asked', which other workers would not see"):
        simulate(job_with(loss=Remembering()))


def at_times(output: Tensor, target: Tensor) -> Any:
    made = nn.functional.cross_entropy(output, target)
    return made if int(target[0]) else (made, 2.0)


def test_a_loss_that_returns_weights_only_sometimes_is_refused() -> None:
    with pytest.raises(LayerFailed, match=r"Job.loss returned a mean before, and \(sum, weight\) in step 0"):
        simulate(job_with(loss=at_times, seed=1))


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class Astray(Dense):
    """Raises, in a real run, exceptions that asyncio or Python would handle themselves."""

    calls = 0
    raised: BaseException

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if self.calls > 7:
            raise self.raised
        return super().forward(x)


ASTRAY = (asyncio.CancelledError(), GeneratorExit(), SystemExit(), Speechless())


@pytest.mark.parametrize("raised", ASTRAY, ids=lambda error: type(error).__name__)
def test_any_exception_of_user_code_ends_the_run_and_is_named(raised: BaseException) -> None:
    Astray.calls, Astray.raised = 0, raised
    sentence = rf"node 1: layer 2 \(Astray\) raised {type(raised).__name__} on input \(2, 6\) float32\nFaults"
    with pytest.raises(LayerFailed, match=sentence):
        simulate(job_around(Dense, Astray), stages=2, strategy="none")


class Stumbling(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("no step")


def test_an_optimizer_that_raises_is_named_with_its_layer() -> None:
    job = job_with(optimizer=partial(Stumbling, lr=0.1))
    for run in (simulate, reference):
        with pytest.raises(LayerFailed, match=r"the optimizer of layer 0 \(Stumbling\) raised ValueError: no step"):
            run(job)


def test_a_hook_that_exits_ends_the_run_with_its_name() -> None:
    job = job_with(on_step=lambda metrics: sys.exit(9))
    with pytest.raises(LayerFailed, match=r"Job\.on_step raised SystemExit: 9"):
        simulate(job, stages=2)
