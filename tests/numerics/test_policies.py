"""What a run does beside the plain step: evaluate, stop, skip, start from a file."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.known import ready, truth
from torch import Tensor, nn

import culm
from culm.errors import JobError, LayerFailed, NonFiniteLoss
from culm.job import Job
from culm.runtime.blueprint import probe
from culm.runtime.data import evaluation_batch, evaluation_batches
from culm.runtime.state import State, build_layer
from culm.testing import Simulated, reference, simulate
from culm.testing.cluster import enact

from .jobs import JOBS, around, but, everything, plain, words
from .layers import Dense
from .samples import WIDTH, Points, by_label, drawing, sgd

evaluated = but(
    JOBS["batch norm"], evaluate=Points(count=8), evaluate_every=2, steps=4, layers=[
        partial(Dense, dropout=0.5), *JOBS["batch norm"].layers[1:]
    ],
)  # fmt: skip


EVALUATED = {
    "a mean": evaluated,
    "a sum": but(everything, evaluate=words.data, evaluate_every=1),
    "layers that draw": but(JOBS["random layers"], evaluate=Points(count=7), evaluate_every=2, loss=drawing),
}


def run(job: Job, *, like: Job | None = None, **request: Any) -> Simulated:
    return enact(job, ready(job, like=like, **request))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
@pytest.mark.parametrize("job", EVALUATED.values(), ids=EVALUATED)
def test_evaluations_equal_the_reference(job: Job, schedule: str) -> None:
    wanted = truth(job).evaluations
    assert len(wanted) == job.steps // job.evaluate_every
    assert run(job, schedule=schedule, stages=2).evaluations == wanted


def test_pipelines_share_an_evaluation_and_come_to_the_same_bits() -> None:
    job = but(evaluated, exact=True)
    assert run(job, like=evaluated, pipelines=3, stages=2).evaluations == reference(job).evaluations


def test_an_evaluation_is_the_mean_over_all_items_with_dropout_off_and_running_statistics() -> None:
    trained = truth(evaluated)
    model = nn.Sequential(*(build_layer(evaluated, index) for index in range(len(evaluated.layers)))).eval()
    model.load_state_dict({**trained.snapshot.parameters, **trained.snapshot.buffers})
    total = 0.0
    for micro in range(evaluation_batches(evaluated)):
        (inputs,), target = evaluation_batch(evaluated, micro, torch.device("cpu"))
        loss = evaluated.loss(model(inputs), target)
        assert isinstance(loss, Tensor)
        total += loss.item() * len(inputs)
    assert trained.evaluations[3] == pytest.approx(total / 8, rel=1e-6)


def test_evaluating_does_not_disturb_the_training() -> None:
    quiet = but(evaluated, evaluate=None, evaluate_every=0)
    loud = run(evaluated, schedule="zb", stages=3)
    assert loud.state_sha256 == run(quiet, like=evaluated, schedule="zb", stages=3).state_sha256


class Watch:
    """A hook that remembers what it was told, and stops after some step."""

    def __init__(self, last: int = 1 << 30) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.last = last

    def __call__(self, metrics: Mapping[str, Any]) -> object:
        self.told.append(metrics)
        return culm.STOP if metrics["step"] == self.last else None


def test_the_hook_hears_of_every_step_in_order() -> None:
    watch = Watch()
    found = run(but(plain, on_step=watch, steps=4), like=plain, stages=3)
    assert [(told["step"], told["loss"]) for told in watch.told] == list(enumerate(found.losses))


plain_exact = but(plain, exact=True)


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_a_hook_that_returns_stop_ends_the_run_after_that_step(schedule: str) -> None:
    job = but(plain, on_step=Watch(last=1), steps=9, exact=True)
    found, wanted = run(job, like=plain, pipelines=2, stages=2, schedule=schedule), truth(plain_exact)
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


nan_loss = around(Dense, data=Poisoned(count=30), steps=3, optimizer=sgd)
nan_gradient = but(layers=[Rooted, Dense, partial(Dense, WIDTH, 3)], data=Blank(count=30), steps=3, optimizer=sgd)
BROKEN = {
    "a loss": nan_loss,
    "a loss, clipped": but(nan_loss, clip_norm=0.1),
    "a gradient": nan_gradient,
    "a gradient, clipped": but(nan_gradient, clip_norm=0.1),
}
SHAPES: list[dict[str, Any]] = [{"stages": 3}, {"stages": 2, "schedule": "zb"}, {"pipelines": 2, "stages": 2}]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_a_step_that_is_not_finite_can_be_skipped_and_moves_nothing(name: str, exact: bool) -> None:
    job = but(BROKEN[name], nonfinite="skip", exact=exact)
    wanted = reference(job)
    assert all(bool(value.isfinite().all()) for value in wanted.snapshot.tensors.values())
    for shape in SHAPES if exact else SHAPES[:2]:
        found = run(job, like=BROKEN[name], **shape)
        assert found.summary["skipped_steps"] == 1
        assert found.state_sha256 == wanted.state_sha256


def test_a_skipped_step_is_as_if_it_had_not_been() -> None:
    """Item 7 comes in one of the three steps of a pass: with that step alone, nothing moves at all."""
    job = but(nan_loss, nonfinite="skip")
    states = [reference(but(job, steps=steps)).state_sha256 for steps in range(4)]
    assert len(set(states)) == 3


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_a_step_that_is_not_finite_stops_the_run_by_default(name: str, exact: bool) -> None:
    job = but(BROKEN[name], exact=exact)
    with pytest.raises(NonFiniteLoss) as wanted:
        reference(job)
    step = next(word for word in str(wanted.value).split() if word.isdigit())
    for shape in SHAPES:
        with pytest.raises(NonFiniteLoss, match=f"step {step}") as found:
            run(job, like=BROKEN[name], **shape)
        assert str(found.value).count("\n") == 0


def nothing_counts(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return by_label(output, target)[0], 0.0


def test_weights_that_add_up_to_nothing_stop_the_run_or_skip_the_step() -> None:
    job = but(loss=nothing_counts)
    with pytest.raises(NonFiniteLoss, match="add up to 0 in step 0"):
        run(job, stages=2)
    found = run(but(job, nonfinite="skip"), like=job, stages=2)
    assert found.state_sha256 == reference(but(job, steps=0)).state_sha256


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_weights_that_would_turn_training_around_are_named(weight: float) -> None:
    def turned(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        return by_label(output, target)[0], weight

    with pytest.raises(LayerFailed, match=f"weights that the loss returned add up to {5 * weight} in step 0"):
        simulate(but(loss=turned), stages=2)


def test_weights_below_nothing_are_no_step_to_skip() -> None:
    def turned(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
        return by_label(output, target)[0], -1.0

    job = but(loss=turned, nonfinite="skip")
    for made in (lambda: simulate(job, stages=2), lambda: reference(job)):
        with pytest.raises(LayerFailed, match=r"weights that the loss returned add up to -5\.0 in step 0"):
            made()


SCHEDULES_GONE_WRONG = {
    "raises": (lambda step: 1 / (1 - step), "Job.lr_schedule raised ZeroDivisionError for step 1: division by zero"),
    "is no number": (lambda step: "small", "Job.lr_schedule raised ValueError for step 0: could not convert"),
    "is not finite": (lambda step: math.nan, "Job.lr_schedule is nan for step 0: return a finite factor"),
}


@pytest.mark.parametrize("name", SCHEDULES_GONE_WRONG)
def test_a_learning_rate_that_is_no_number_is_named_with_its_step(name: str) -> None:
    schedule, sentence = SCHEDULES_GONE_WRONG[name]
    with pytest.raises(LayerFailed, match=sentence):
        run(but(lr_schedule=schedule), like=plain, stages=2)


@pytest.mark.parametrize("limit", ["a lot", -1.0, math.inf])
def test_a_limit_of_the_norm_that_is_no_number_is_named(limit: Any) -> None:
    with pytest.raises(JobError, match=r"Job\.clip_norm is .*: use a number above 0"):
        but(clip_norm=limit)


def test_a_loss_without_any_gradient_for_one_micro_batch_is_fine() -> None:
    job = but(loss=sometimes_constant)
    assert simulate(job, stages=3, schedule="zb").state_sha256 == reference(job).state_sha256


def sometimes_constant(output: Tensor, target: Tensor) -> Tensor:
    """Nothing to learn from a micro-batch of an even sum."""
    return nn.functional.cross_entropy(output, target) if int(target.sum()) % 2 else torch.tensor(0.5)


def saved(job: Job, path: Path, **renamed: str) -> str:
    """Weights and buffers of the job after its steps, as a file."""
    found = truth(job).snapshot
    tensors = {renamed.get(name, name): value for name, value in {**found.parameters, **found.buffers}.items()}
    save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize("name", ["batch norm", "gpt tied", "tied and shared", "everything"])
def test_a_run_starts_from_a_file(name: str, tmp_path: Path) -> None:
    job = but(JOBS[name], exact=True)
    start = but(job, init=saved(job, tmp_path / "a.safetensors"))
    assert reference(but(start, steps=0)).weights_sha256 == truth(job).weights_sha256
    assert truth(start).weights_sha256 != truth(job).weights_sha256
    assert simulate(start, pipelines=2, stages=2).state_sha256 == truth(start).state_sha256


def test_a_parameter_with_two_names_in_a_layer_is_saved_once() -> None:
    found = reference(JOBS["tied and shared"]).snapshot
    assert [name for name in found.parameters if name.startswith("1.")] == ["1.up.bias", "1.down.bias", "1.up.weight"]
    assert not found.buffers


def test_a_tied_tensor_may_stand_in_the_file_under_any_of_its_names(tmp_path: Path) -> None:
    path = saved(everything, tmp_path / "a.safetensors", **{"0.table.weight": "5.head.weight"})
    probe(but(everything, init=path))
    assert reference(but(everything, init=path, steps=0)).weights_sha256 == reference(everything).weights_sha256


@pytest.mark.parametrize("used", [reference, probe], ids=["where it is read", "before anything starts"])
def test_a_file_of_another_model_is_refused(used: Callable[[Job], object], tmp_path: Path) -> None:
    path = saved(plain, tmp_path / "a.safetensors")
    with pytest.raises(JobError, match=r"has no tensor '5\.linear\.bias' \(2 are missing\)"):
        used(but(layers=[Dense, *plain.layers], init=path))
    with pytest.raises(JobError, match=r"'4\.linear\.\w+' has shape \(3,.*\), the layer wants \(4,"):
        used(but(layers=[*plain.layers[:-1], partial(Dense, WIDTH, 4)], data=Points(classes=4), init=path))
    Path(path).write_bytes(b"nothing of the kind")
    with pytest.raises(JobError, match="can not be read as safetensors"):
        used(but(init=path))


def test_another_seed_learns_something_else() -> None:
    assert len({run(but(seed=seed), like=plain, stages=2).weights_sha256 for seed in range(4)}) == 4
    assert len({reference(but(seed=seed, steps=0)).weights_sha256 for seed in range(4)}) == 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_steps_leave_the_initial_weights(shape: dict[str, Any]) -> None:
    job = but(everything, steps=0)
    found = run(job, like=everything, **shape)
    state = State(everything, range(6))
    assert found.losses == []
    assert found.summary["steps"] == 0
    assert found.weights_sha256 == reference(job).weights_sha256
    assert torch.equal(found.snapshot.parameters["1.linear.weight"], state.layers[1].trained["1.linear.weight"])


class Faulty(Dense):
    """Works when it is looked at, and not in the second step."""

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


def test_code_of_the_user_that_raises_is_named() -> None:
    Faulty.calls = 0
    with pytest.raises(
        LayerFailed, match=r"node 1: layer 2 \(Faulty\) raised ValueError on input \(2, 6\) float32: seven"
    ):
        simulate(around(Dense, Faulty), stages=2, strategy="none")
    for schedule in ("1f1b", "zb"):
        with pytest.raises(LayerFailed, match=r"the backward of layer 2 \(OneWay\).* raised ValueError: not backwards"):
            simulate(around(Dense, OneWay), stages=2, schedule=schedule, cuts=(2,), strategy="none")


class Clamped(Dense):
    """Keeps its weights within bounds, in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def test_weights_that_move_in_forward_are_refused_where_others_hold_them_too() -> None:
    job = around(Clamped)
    assert simulate(job, stages=2, strategy="none").state_sha256 == reference(job).state_sha256
    shapes: list[dict[str, Any]] = [{"pipelines": 2, "strategy": "none"}, {"stages": 2, "strategy": "shadow"}]
    for shape in shapes:
        with pytest.raises(JobError, match=r"Job\.layers\[1\] moves its parameter 'linear\.weight' in forward, which"):
            simulate(job, **shape)


class Unnoted(nn.Module):
    """Batch norm as a function: torch's kernel moves the buffers, and leaves no note of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True)  # type: ignore[arg-type]


def test_buffers_that_move_without_a_note_are_refused_too() -> None:
    for run in (simulate, reference):
        with pytest.raises(JobError, match=r"Job\.layers\[1\] moves its buffer 'mean' in forward"):
            run(around(Unnoted))


class Remembering(nn.Module):
    """A loss that counts how often it was asked."""

    asked: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("asked", torch.tensor(0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.asked += 1
        return nn.functional.cross_entropy(output, target)


def test_a_loss_whose_buffers_move_is_refused() -> None:
    with pytest.raises(JobError, match=r"Job\.loss moves its buffer 'asked', which other workers would not see"):
        simulate(but(loss=Remembering()))


def at_times(output: Tensor, target: Tensor) -> Any:
    made = nn.functional.cross_entropy(output, target)
    return made if int(target[0]) else (made, 2.0)


def test_a_loss_that_returns_weights_at_times_is_refused() -> None:
    with pytest.raises(LayerFailed, match=r"the loss returned a mean at first, and \(sum, weight\) in step 0"):
        simulate(but(loss=at_times, seed=1))


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even that")


class Astray(Dense):
    """Raises, when it is run in earnest, what asyncio or Python would take for its own."""

    calls = 0
    raised: BaseException

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        if self.calls > 7:
            raise self.raised
        return super().forward(x)


ASTRAY = (asyncio.CancelledError(), GeneratorExit(), SystemExit(), Speechless())


@pytest.mark.parametrize("raised", ASTRAY, ids=lambda error: type(error).__name__)
def test_whatever_code_of_the_user_raises_ends_the_run_with_its_name_alone(raised: BaseException) -> None:
    Astray.calls, Astray.raised = 0, raised
    sentence = rf"node 1: layer 2 \(Astray\) raised {type(raised).__name__} on input \(2, 6\) float32\nFaults"
    with pytest.raises(LayerFailed, match=sentence):
        simulate(around(Dense, Astray), stages=2, strategy="none")


class Stumbling(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("no step")


def test_an_optimizer_that_raises_is_named_with_its_layer() -> None:
    job = but(optimizer=partial(Stumbling, lr=0.1))
    for run in (simulate, reference):
        with pytest.raises(LayerFailed, match=r"the optimizer of layer 0 \(Stumbling\) raised ValueError: no step"):
            run(job)


def test_a_hook_that_asks_to_leave_ends_the_run_with_its_name() -> None:
    job = but(on_step=lambda metrics: sys.exit(9))
    with pytest.raises(LayerFailed, match=r"Job\.on_step raised SystemExit: 9"):
        simulate(job, stages=2)
