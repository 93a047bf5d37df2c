"""What a training loop offers (schedulers, parameter groups, averages, clipping, compiled layers, streams) gives the
same bits as the reference loop, at every shape and through losses of nodes; and the same as a plain torch loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests import tiny_jobs
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.optim import lr_scheduler

from culm import EarlyStop, Job, Metric, Monitor
from culm.cluster.prepare_run import inspect_layers
from culm.data import Stream
from culm.errors import JobError, UsageError
from culm.runtime.compute.batch_loading import load_micro_batch
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.parameter_groups import LayerParameters
from culm.runtime.compute.segment import Segment
from culm.testing import Faults, SimulatedRun, reference, simulate
from culm.testing.reference_loop import train_step


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def decayed(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters.groups(weight_decay=0.3), lr=0.05)


def wsd(step: int) -> float:
    """Warm up, stay, decay."""
    return min(1.0, (step + 1) / 2, (6 - step) / 2)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5, eta_min=1e-3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
    "own function": wsd,
}


class BatchNormed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))


class Numbers:
    """A stream with a state: `start` is where the next iterator begins."""

    def __init__(self, size: int = 11) -> None:
        self.size, self.start, self.at = size, 0, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, self.start = self.start, 0
        for number in range(first, self.size):
            self.at = number + 1
            yield tiny_jobs.DATA[number]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class Forgetful:
    """A stream without a state."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(tiny_jobs.DATA[:13])


FEATURES: dict[str, dict[str, Any]] = {
    **{f"schedule: {name}": {"lr_schedule": schedule, "optimizer": adamw} for name, schedule in SCHEDULES.items()},
    "parameter groups": {"optimizer": decayed, "lr_schedule": SCHEDULES["one cycle"]},
    "average": {"ema": 0.8, "optimizer": adamw},
    "average, tied": {"ema": 0.8, "tied": [("0.0.weight", "3.0.weight")]},
    "clip by value": {"clip_value": 0.01, "clip_norm": 0.5},
    "stream": {"data": Numbers()},
    "stream without state": {"data": Forgetful()},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "compiled, recompute": {"compile": {"backend": "aot_eager"}, "recompute": True},
}


def job(**fields: Any) -> Job:
    return tiny_jobs.job(**{"layers": [Normed] * 4, "steps": 5, "exact": True, **fields})


def equal(found: SimulatedRun, wanted: Any) -> None:
    assert found.losses == wanted.losses
    assert (found.weights_sha256, found.state_sha256) == (wanted.weights_sha256, wanted.state_sha256)
    summary = found.summary
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    assert summary["samples"] == summary["samples_expected"]


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_equals_the_reference_through_losses(name: str) -> None:
    described = job(**FEATURES[name])
    wanted = reference(described)
    equal(simulate(described, pipelines=1, stages=4, schedule="gpipe", strategy="none"), wanted)
    for strategy, faults in (
        ("reroute", Faults().kill(1, at="1B1", step=2)),
        ("shadow", Faults().kill(2, at="0F2", step=1).kill(0, at="0B0", step=3)),
    ):
        equal(simulate(described, pipelines=2, stages=2, strategy=strategy, faults=faults), wanted)


def test_a_run_resumed_from_a_checkpoint_equals_one_that_was_not_interrupted(tmp_path: Any) -> None:
    fields = {"ema": 0.8, "optimizer": decayed, "lr_schedule": SCHEDULES["one cycle"]}
    wanted = reference(job(**fields, data=Numbers()))
    first = job(**fields, data=Numbers(), steps=3)
    simulate(first, pipelines=1, stages=2, strategy="none", out=str(tmp_path), checkpoint_every=3)
    found = simulate(job(**fields, data=Numbers()), pipelines=2, stages=1, strategy="none", resume=str(tmp_path))
    assert (found.weights_sha256, found.state_sha256) == (wanted.weights_sha256, wanted.state_sha256)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_equal_a_plain_torch_loop(name: str) -> None:
    """One layer and one micro-batch a step: the arithmetic of culm is that of torch."""
    schedule = SCHEDULES[name]
    described = tiny_jobs.job(layers=[tiny_jobs.linear], optimizer=adamw, lr_schedule=schedule, micro_batch=8, steps=6)
    state, other = ModelState(described, [0]), ModelState(described, [0])
    module = other.layers[0].module
    optimizer = adamw(module.parameters())
    made = schedule(optimizer) if name != "own function" else lr_scheduler.LambdaLR(optimizer, wsd)
    for step in range(6):
        train_step(described, state, step)
        (inputs,), target, _ = load_micro_batch(described, step, 0, torch.device("cpu"))
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), target).backward()
        optimizer.step()
        made.step()
    for one, plain in zip(state.layers[0].module.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, plain)


class DecayLater(lr_scheduler.LambdaLR):
    """Changes a setting that torch's own schedulers leave alone, and changes it back."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.5 if self.last_epoch in (2, 3) else 0.0


def tensor_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.05), weight_decay=0.0)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.ConstantLR(optimizer, 0.5)],
            milestones=[2],
        ),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3)),
        lambda optimizer: DecayLater(optimizer, lambda step: 0.9**step),
    ],
)
@pytest.mark.parametrize("rate", [tensor_rate, decayed])
def test_every_setting_of_a_scheduler_and_rates_in_tensors_equal_a_plain_torch_loop(
    rate: Any, schedule: Callable[[Any], Any], tmp_path: Any
) -> None:
    """A scheduler writes into a learning rate that is a tensor, and must not change the one that the factory gave."""
    fields: dict[str, Any] = {"layers": [tiny_jobs.linear], "micro_batch": 8, "optimizer": rate}
    described = tiny_jobs.job(**fields, steps=6, lr_schedule=schedule)
    state = ModelState(described, [0])
    layer = state.layers[0]
    layer.accumulator.detach_grads()
    optimizer = rate(layer.unit.parameters.values() if rate is tensor_rate else LayerParameters(layer.unit.parameters))
    made = schedule(optimizer)
    losses = []
    for step in range(6):
        (inputs,), target, _ = load_micro_batch(described, step, 0, torch.device("cpu"))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(layer.module(inputs), target)
        loss.backward()
        optimizer.step()
        made.step()
        losses.append(loss.item())
    request: dict[str, Any] = {"pipelines": 1, "stages": 1, "strategy": "none"}
    assert reference(described).losses == losses
    first = tiny_jobs.job(**fields, steps=3, lr_schedule=schedule)
    simulate(first, **request, out=str(tmp_path))
    resumed = simulate(described, **request, resume=str(tmp_path))
    assert resumed.losses[-3:] == losses[3:]
    for name, value in layer.module.named_parameters():
        assert torch.equal(resumed.snapshot.parameters[f"0.{name}"], value)


def test_averages_and_clipping_equal_torch() -> None:
    described = tiny_jobs.job(layers=[tiny_jobs.linear], ema=0.9, clip_value=0.01, micro_batch=8, steps=4)
    state, other = ModelState(described, [0]), ModelState(described, [0])
    module = other.layers[0].module
    optimizer = described.optimizer(other.layers[0].unit.parameters.values())
    averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(module)  # begins with the initial weights
    for step in range(4):
        train_step(described, state, step)
        (inputs,), target, _ = load_micro_batch(described, step, 0, torch.device("cpu"))
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs), target).backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.01)
        optimizer.step()
        averaged.update_parameters(module)
    for name, expected in averaged.module.named_parameters():
        torch.testing.assert_close(state.layers[0].unit.averages[f"0.{name}"], expected.detach(), rtol=0, atol=0)


def test_weight_decay_groups_are_made_by_name_and_shape() -> None:
    seen: list[list[str]] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        seen.append(list(parameters.named))
        groups = parameters.groups(weight_decay=0.1, no_decay=lambda name, _: name.endswith("bias"), lr=0.2)
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
        return torch.optim.SGD(groups)

    ModelState(tiny_jobs.job(optimizer=optimizer), [2])
    assert seen == [["2.weight", "2.bias"]]


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.abs() < 0.5).float().mean()


def same_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


EVALUATED = {
    "evaluate": tiny_jobs.DATA[:7],
    "evaluate_every": 2,
    "metrics": {"accuracy": accuracy, "perplexity": Metric(same_loss, transform=math.exp)},
}


@pytest.mark.parametrize("averaged", [False, True])
def test_evaluations_have_the_metrics_of_the_job_and_equal_the_reference(averaged: bool) -> None:
    described = job(**EVALUATED, ema=0.5, evaluate_ema=averaged)
    wanted = reference(described)
    faults = Faults().kill(1, at="evaluate 1F0", step=3)
    found = simulate(described, pipelines=2, stages=2, strategy="reroute", faults=faults)
    equal(found, wanted)
    assert found.evaluations == wanted.evaluations
    assert found.faults_not_reached(faults) == []
    for step, loss in wanted.evaluations.items():
        assert wanted.evaluation_values[step]["perplexity"] == math.exp(loss)
    plain = reference(job(**EVALUATED, ema=0.5))
    assert (plain.evaluations == wanted.evaluations) is not averaged
    assert plain.weights_sha256 == wanted.weights_sha256


def test_a_run_stops_early_when_evaluations_do_not_improve() -> None:
    stop = EarlyStop("eval_loss", mode="max", patience=2)
    described = job(**EVALUATED, steps=40, early_stop=stop, optimizer=adamw)
    wanted = reference(job(**EVALUATED, steps=40, optimizer=adamw)).evaluations
    for strategy, faults in (("none", Faults()), ("reroute", Faults().kill(0, at="0F0", step=3))):
        found = simulate(described, pipelines=2, stages=2, strategy=strategy, faults=faults)
        end = found.summary["steps"]
        assert stop.is_exhausted(found.evaluations)
        assert not stop.is_exhausted({step: loss for step, loss in found.evaluations.items() if step < end - 1})
        assert found.evaluations == {step: loss for step, loss in wanted.items() if step < end}
        assert len(found.losses) == end < 40


def test_the_best_checkpoint_by_a_metric_is_kept(tmp_path: Any) -> None:
    from culm.checkpoint import CheckpointCatalog, Storage

    described = job(**EVALUATED, steps=12, keep_best=Monitor("eval_accuracy", "min"), ema=0.5)
    values = reference(described).evaluation_values
    best = Monitor("accuracy", "min").best_step({step: named["accuracy"] for step, named in values.items()})
    assert best is not None
    found = simulate(described, pipelines=1, stages=2, strategy="none", out=str(tmp_path), keep_last=1)
    catalog = CheckpointCatalog(Storage(str(tmp_path / "checkpoints")))
    assert catalog.best() == best + 1 == found.summary["best"]["completed_steps"]
    assert catalog.steps() == sorted({best + 1, 12})


def test_hooks_are_called_for_evaluations_checkpoints_and_losses(tmp_path: Any) -> None:
    seen: list[tuple[str, Any]] = []
    described = job(
        **EVALUATED,
        on_evaluate=lambda event: seen.append(("evaluate", event["eval_accuracy"])),
        on_checkpoint=lambda event: seen.append(("checkpoint", (event["step"], event["path"]))),
        on_node_lost=lambda event: seen.append(("lost", event["node"])),
    )
    faults = Faults().kill(1, at="1B1", step=2)
    simulate(described, pipelines=2, stages=2, strategy="reroute", faults=faults, out=str(tmp_path), checkpoint_every=4)
    values = reference(described).evaluation_values
    assert [value for kind, value in seen if kind == "evaluate"] == [named["accuracy"] for named in values.values()]
    assert ("lost", 1) in seen
    folder = str(tmp_path / "checkpoints")
    assert ("checkpoint", (4, f"{folder}/step-00000004")) in seen


def test_a_hook_for_an_event_that_raises_is_reported_and_the_run_goes_on(tmp_path: Any) -> None:
    def fail(event: Any) -> None:
        raise ValueError("no")

    described = job(**EVALUATED, on_evaluate=fail)
    found = simulate(described, pipelines=1, stages=2, strategy="none", out=str(tmp_path))
    assert found.state_sha256 == reference(described).state_sha256
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    failures = [(event["name"], event["why"]) for event in events if event["kind"] == "hook_failed"]
    assert failures == [("on_evaluate", "Job.on_evaluate raised ValueError: no")] * len(found.evaluations)


def plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def bound() -> Any:
    return lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr_schedule": plateau}, "ReduceLROnPlateau, which depends on past losses"),
        ({"lr_schedule": lr_scheduler.CosineAnnealingLR}, "Job.lr_schedule raised"),
        ({"lr_schedule": lambda step: 1 / step}, "Job.lr_schedule raised ZeroDivisionError for step 0"),
    ],
)
def test_wrong_schedules_are_refused_before_the_run(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        simulate(job(**fields), pipelines=1, stages=1, strategy="none")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr_schedule": bound()}, "Job.lr_schedule is a StepLR, which belongs to one optimizer"),
        ({"ema": 1.5}, "Job.ema is 1.5"),
        ({"evaluate_ema": True}, "Job.evaluate_ema is set but Job.ema is None"),
        ({"clip_value": -1}, "Job.clip_value is -1"),
        ({"compile": "yes"}, "Job.compile is 'yes'"),
        ({"early_stop": 3}, "Job.early_stop is 3"),
        (
            {"evaluate_every": "soon"},
            "Job.evaluate_every is 'soon': use a whole number of steps, or a time such as \"90s\"",
        ),
        ({"evaluate_every": -1}, "Job.evaluate_every is -1"),
        ({"keep_best": "eval_loss"}, "Job.keep_best is set but Job.evaluate_every is 0"),
        ({**EVALUATED, "keep_best": "eval_bleu"}, "'eval_bleu', which no evaluation has"),
        ({"data": iter(())}, "an iterator that can be read only once"),
        ({"data": Numbers(), "loaders": 2}, "Job.data is a stream"),
        ({"evaluate": Numbers()}, "Job.evaluate is a Numbers, which has no items by index"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        job(**fields)


def test_compiled_layers_refuse_a_split_backward_with_the_reason() -> None:
    with pytest.raises(UsageError, match=r"a compiled layer .* has one fused backward"):
        simulate(job(compile=True), pipelines=1, stages=2, schedule="zb", strategy="none")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_compiled_layers_run_under_fused_schedules(schedule: str) -> None:
    described = job(compile={"backend": "aot_eager"})
    equal(simulate(described, pipelines=2, stages=2, schedule=schedule, strategy="none"), reference(described))


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_were_compiled_ahead_compile_nothing_in_their_first_action(recompute: bool) -> None:
    """Layers are nn.Sequential, whose forward is torch's own code, and one has moving buffers. Nothing that belongs to
    the run changes: weights, buffers, gradient sums, additions, tapes."""
    graphs = []

    def count_graphs(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    fields = {"layers": [Normed, BatchNormed, Normed], "steps": 1, "recompute": recompute}
    ran = {}
    for ahead in (False, True):
        described = job(**fields, compile={"backend": count_graphs})
        state = ModelState(described, range(3))
        segment = Segment(described, state, range(3))
        before = state.snapshot_all().digest()
        if ahead:
            torch._dynamo.reset()
            segment.compile_layers(inspect_layers(described).layer_inputs)
            assert len(graphs) > 0
            graphs.clear()
        assert state.snapshot_all().digest() == before
        assert not segment.tapes
        inputs, target, _ = load_micro_batch(described, 0, 0, state.device)
        _, result = segment.forward(0, 0, inputs, target)
        segment.backward(0, 0, ())
        compiled = len(graphs)
        assert (compiled == 0) is ahead
        graphs.clear()
        sums = {
            name: value.tolist() for layer in state.layers.values() for name, value in layer.gradient_sums().items()
        }
        assert result.loss is not None
        ran[ahead] = result.loss.item(), sums, segment.take_additions(), state.snapshot_all().digest()
    assert ran[True] == ran[False]


def test_a_stream_reads_the_same_items_from_any_state() -> None:
    stream = Stream(Numbers(), block=4)
    items = [stream[number] for number in range(30)]
    assert [stream[number] is items[number] for number in range(14, 30)] == [True] * 16
    other = Stream(Numbers(), block=4)
    other.add_positions(stream.positions(24))
    assert [torch.equal(other[number][0], items[number][0]) for number in range(24, 30)] == [True] * 6
    assert torch.equal(other[3][0], items[3][0])  # back to the beginning


TIMED = EVALUATED | {"evaluate_every": "2s", "steps": 16}


def timed(described: Job, faults: Faults, strategy: str, **options: Any) -> SimulatedRun:
    request: dict[str, Any] = {"strategy": strategy, "pipelines": 2, "stages": 2, **options}
    return simulate(described, faults=faults, cost=lambda *_: 0.1, **request)


@pytest.mark.parametrize(
    ("strategy", "faults"),
    [
        ("none", Faults()),
        ("reroute", Faults().kill(1, at="evaluate 1F0")),
        ("reroute", Faults().kill(0, at="0F0", step=5).kill(1, at="1B1", step=9)),
        ("shadow", Faults().kill(0, at="evaluate 0F0")),
        ("checkpoint", Faults().kill(3, at="1F2", step=9)),
    ],
)
def test_evaluations_are_due_by_time_and_every_worker_evaluates_after_the_same_steps(
    strategy: str, faults: Faults, tmp_path: Any
) -> None:
    wanted = reference(job(**TIMED))
    assert list(wanted.evaluations) == list(range(16))
    stored = {"out": str(tmp_path), "checkpoint_every": 4} if strategy == "checkpoint" else {}
    found = timed(job(**TIMED), faults, strategy, **stored)
    assert found.state_sha256 == wanted.state_sha256
    assert found.summary["samples_lost"] == found.summary["samples_duplicated"] == 0
    assert found.evaluations.items() <= wanted.evaluations.items()
    assert 3 <= len(found.evaluations) < 12
    assert found.faults_not_reached(faults) == []


def test_an_evaluation_by_time_can_end_the_run_and_has_a_checkpoint(tmp_path: Any) -> None:
    from culm.checkpoint import CheckpointCatalog, Storage

    stop = EarlyStop("eval_loss", mode="max", patience=2)
    for strategy in ("none", "reroute"):
        found = timed(job(**TIMED | {"steps": 40, "early_stop": stop, "optimizer": adamw}), Faults(), strategy)
        assert stop.is_exhausted(found.evaluations)
        assert max(found.evaluations) + 1 == found.summary["steps"] < 40
    described = job(**TIMED, keep_best="eval_loss")
    found = timed(described, Faults(), "none", pipelines=1, out=str(tmp_path), keep_last=1)
    best = Monitor().best_step(found.evaluations)
    assert best is not None
    assert CheckpointCatalog(Storage(str(tmp_path / "checkpoints"))).best() == best + 1


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_resumed_run_stops_and_chooses_its_best_checkpoint_as_one_that_was_not_interrupted(
    mode: Any, tmp_path: Any
) -> None:
    from culm.checkpoint import CheckpointCatalog, Storage

    rules = {"early_stop": EarlyStop("eval_loss", mode=mode, patience=3), "keep_best": Monitor("eval_loss", mode)}
    fields: dict[str, Any] = EVALUATED | {"evaluate_every": 1, "optimizer": adamw, **rules}
    whole = simulate(job(**fields, steps=30), pipelines=1, stages=2, strategy="none", out=str(tmp_path / "whole"))
    end = whole.summary["steps"]
    for first in (end - 2, end - 1):
        out = str(tmp_path / f"parts-{first}")
        request: dict[str, Any] = {"pipelines": 1, "stages": 2, "strategy": "none", "out": out, "keep_last": 1}
        simulate(job(**fields, steps=first), **request)
        found = simulate(job(**fields, steps=30), **request, resume=out)
        assert found.summary["steps"] == end
        assert found.weights_sha256 == whole.weights_sha256
        assert found.summary["best"] == whole.summary["best"]
        best = found.summary["best"]["completed_steps"]
        assert CheckpointCatalog(Storage(f"{out}/checkpoints")).best() == best


def test_values_that_are_no_numbers_are_in_a_checkpoint(tmp_path: Any) -> None:
    from culm.checkpoint import CheckpointCatalog, Storage

    described = job(
        **EVALUATED | {"metrics": {"odd": lambda *_: torch.tensor(math.inf)}}, keep_best="eval_odd", steps=2
    )
    simulate(described, pipelines=1, stages=1, strategy="none", out=str(tmp_path))
    manifest = CheckpointCatalog(Storage(str(tmp_path / "checkpoints"))).newest().manifest
    assert manifest.evaluation_values == {1: {"eval_odd": math.inf}}


def test_evaluations_by_time_are_chosen_again_when_the_events_of_a_run_are_replayed(tmp_path: Any) -> None:
    from culm.cluster.leader.output import input_log

    described = job(**TIMED | {"metrics": {}})
    found = timed(described, Faults().kill(0, at="0F0", step=5), "reroute", out=str(tmp_path))
    assert len(found.evaluations) > 1
    logs = list(tmp_path.glob(input_log.FILE_PATTERN))
    assert len(logs) == 2, "of the first leader and of the one that took over"
    assert [input_log.replay(path)[1] for path in logs] == [None, None]
