"""Inspect a job's layers before any node starts: shapes, sizes, work, and whether they fit together.

The layers run once on fake tensors, which have shapes but no memory, so that a model too large for this machine can be
checked, too. Code that cannot run on fake tensors (because it reads values) is run for real, one layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from culm.data.stream import Stream
from culm.errors import CulmError, JobError, LayerFailed, message_suffix
from culm.metric import declared_metrics, refusing_records
from culm.plan.model.model_profile import LayerCost, Profile
from culm.runtime.compute import buffer_statistics
from culm.runtime.compute.batch_loading import (
    Activations,
    MicroBatch,
    load_evaluation_batch,
    load_micro_batch,
    map_structure,
)
from culm.runtime.compute.device import select_device
from culm.runtime.compute.label_check import LabelRange
from culm.runtime.compute.lr_schedule import LearningRates
from culm.runtime.compute.metric_values import MetricValues
from culm.runtime.compute.model_state import (
    LayerReplica,
    build_layer,
    check_initial_weights,
    layer_index,
    named_parameter,
)
from culm.runtime.compute.rng import derive_seed, seed_everything
from culm.runtime.compute.saved_tensors import DeferredBytes, SavedTensorBytes
from culm.runtime.compute.token_check import check_items, check_token_ids
from culm.runtime.compute.user_code import call_layer, call_within, detach_contiguous, late_message
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS
from culm.runtime.epoch import LayerInput

if TYPE_CHECKING:
    from culm.job import Job

T = TypeVar("T")
_FLOPS_PER_S = 5e10
_BYTES_PER_S = 1e10
_CALL_S = 2e-5
_SPLIT_BACKWARD_S = 4e-5
"""Rough estimates for one core; the last one is per trained parameter. Mostly the ratios matter, to partition the
model, and whether a layer is large. `culm profile` measures instead."""


@dataclass(frozen=True)
class ModelInfo:
    """The facts about a job that need its layers."""

    profile: Profile
    weighted_loss: bool
    """Whether the loss returns (sum, weight)."""
    tensor_names: frozenset[str]
    """Parameters and buffers as in a checkpoint: tied ones under their first name, frozen ones if they are saved."""
    optimizer_classes: str
    """The class names of the optimizers, such as 'AdamW'."""
    layer_inputs: tuple[tuple[LayerInput, ...], ...] = ()
    """By layer: the tensors that it gets with the first micro-batch."""


class _NoModuleTracker(nullcontext[None]):
    """Replaces torch's module tracker, which fails where a forward computes a gradient itself."""

    parents = ("Global",)


class _FlopCounter(FlopCounterMode):
    """Count in total, not by module."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = _NoModuleTracker()


def check_model(job: Job) -> ModelInfo:
    """Check every layer. Raises JobError, which names the field, for wrong layers, data, tied names or loss."""
    device = torch.device("cpu")
    job = replace(job, compile=False)  # fake tensors have no kernels
    (inputs, target, _), evaluated = _load_first(job, device)
    sizes = check_token_ids(job, inputs)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            info, labels = _inspect_layers(job, _to_fake(fake, inputs), _to_fake(fake, target))
            if evaluated is not None and _shapes(evaluated[0]) != _shapes(inputs):
                _check_evaluation(job, _to_fake(fake, evaluated[0]))
    except Exception as error:
        if isinstance(error, JobError) and error.__cause__ is None:
            raise
        # User code raised, perhaps only because of the fake tensors: the real run decides.
        info, labels = _inspect_layers(job, inputs, target)
        if evaluated is not None and _shapes(evaluated[0]) != _shapes(inputs):
            _check_evaluation(job, evaluated[0])
    labels.check("the first micro-batch of Job.data", target)
    check_items(job, sizes, labels)
    return info


def _load_first(job: Job, device: torch.device) -> tuple[MicroBatch, MicroBatch | None]:
    """The first micro-batch of Job.data and of Job.evaluate. Raises JobError for items that cannot be loaded, a data
    set that hangs, and a stream that is not repeatable."""

    def check_stream() -> None:
        if isinstance(job.data, Stream):
            seed_everything(derive_seed(job.seed, "another reader"))
            job.data.check_repeatable()

    def load(function: Callable[[], T], field: str) -> T:
        late = f"Job.{field} did not deliver its first items {late_message(job)}"
        return call_within(job.loader_timeout, function, late)

    try:
        evaluated = None
        if job.evaluate_every:
            evaluated = load(lambda: load_evaluation_batch(job, 0, device), "evaluate")
        first = load(lambda: load_micro_batch(job, 0, 0, device), "data")
        load(check_stream, "data")
    except LayerFailed as error:
        raise JobError(str(error)) from error
    return first, evaluated


def _shapes(values: Activations) -> list[tuple[torch.Size, torch.dtype]]:
    return [(value.shape, value.dtype) for value in values]


def _check_evaluation(job: Job, values: Activations) -> None:
    """Run the layers on items of the evaluation set, which have other shapes than those of the data."""
    try:
        with torch.no_grad():
            for index in range(len(job.layers)):
                layer = _build_layer_replica(job, index)
                layer.module.eval()
                values = call_layer(layer, values, derive_seed(job.seed, -1, 0, index))
    except LayerFailed as error:
        raise JobError(f"the layers do not run on the items of Job.evaluate: {error}") from error


def _to_fake(fake: FakeTensorMode, value: Any) -> Any:
    return map_structure(value, lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf)


def _inspect_layers(job: Job, values: Activations, target: Any) -> tuple[ModelInfo, LabelRange]:
    labels = LabelRange(target)
    costs: list[LayerCost] = []
    layer_inputs: list[tuple[LayerInput, ...]] = []
    shapes: dict[str, tuple[int, ...]] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    optimizers: set[str] = set()
    frozen: set[str] = set()
    cast: AbstractContextManager[Any] = nullcontext()
    if job.precision == "bf16":
        cast = torch.autocast("cpu", torch.bfloat16)
    try:
        with cast:
            for index in range(len(job.layers)):
                layer = _build_layer_replica(job, index)
                _record_tied_shapes(job, layer, shapes)
                wanted |= {name: tuple(value.shape) for name, value in layer.named_tensors().items()}
                frozen |= {name for name, p in layer.unit.parameters.items() if not p.requires_grad}
                optimizers |= {type(layer.unit.optimizer).__name__} if layer.unit.optimizer is not None else set()
                check_lr_schedule(job, layer)
                layer_inputs.append(tuple(map(_describe_input, values)))
                values, cost = _run_layer(job, layer, values)
                values = tuple(detach_contiguous(v) for v in values)
                costs.append(cost)
            metrics = MetricValues(declared_metrics(job.metrics))
            seed = derive_seed(job.seed, 0, 0, len(job.layers))
            with labels:
                saved = SavedTensorBytes(values)
                with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
                    loss, weight, _ = metrics.compute_loss(job, values, target, seed)
        costs[-1] = msgspec.structs.replace(costs[-1], activation_bytes=costs[-1].activation_bytes + saved.total)
    except LayerFailed as error:
        raise JobError(f"the layers do not run: {error}") from error
    if not loss.requires_grad:
        raise JobError("Job.loss does not depend on any trainable parameter: there is nothing to train")
    _check_loss_parameters(loss)
    _check_tied(job, shapes)
    if job.init is not None:
        check_initial_weights(job, wanted)
    profile = Profile(
        layers=tuple(costs), device="cpu", micro_batch=job.micro_batch, threads=job.threads, source="estimated"
    )
    aliases = {name for group in job.tied for name in sorted(group, key=layer_index)[1:]}
    names = frozenset(wanted.keys() - aliases - (set() if job.save_frozen else frozen))
    info = ModelInfo(profile, weight is not None, names, ", ".join(sorted(optimizers)), tuple(layer_inputs))
    return info, labels


def _describe_input(value: Tensor) -> LayerInput:
    return LayerInput(tuple(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad)


def _check_loss_parameters(loss: Tensor) -> None:
    """Raises JobError if parameters other than the layers' own would get gradients. The layers are copies of those of
    the job, and the loss is cut off from them here: a parameter that it reaches is not one of theirs."""
    todo = [loss.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            raise JobError(
                f"Job.loss computes with a trainable parameter of shape {tuple(leaf.shape)} that the last layer does "
                "not hand to it, and does not train it: make it part of a layer, or freeze it by requires_grad_(False)"
            )
        below = {child for child, _ in node.next_functions if child is not None} - seen if node is not None else set()
        seen |= below
        todo += below


def _build_layer_replica(job: Job, index: int) -> LayerReplica:
    try:
        return LayerReplica(job, index, build_layer(job, index), {})
    except CulmError:
        raise
    except ASYNC_USER_EXCEPTIONS as error:
        raise JobError(
            f"Job.layers[{index}] could not be built: {type(error).__name__}{message_suffix(error)}"
        ) from error


def _run_layer(job: Job, layer: LayerReplica, values: Activations) -> tuple[Activations, LayerCost]:
    saved, deferred = SavedTensorBytes(layer.module.parameters()), DeferredBytes()
    layer.guard.before_forward()
    with (
        _FlopCounter() as flops,
        torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor),
        buffer_statistics.RecordCollector() as recorded,
        refusing_records(),
        deferred.counting(layer.module),
    ):
        outputs = call_layer(layer, values, derive_seed(job.seed, 0, 0, layer.index))
    for output in outputs:
        if output.layout is not torch.strided:
            kind = f"{output.layout} {output.dtype}".replace("torch.", "")
            raise JobError(f"the output of {layer.label} is {kind}: hand dense tensors from layer to layer")
    layer.guard.check_buffers()
    buffer_statistics.gather_statistics(layer.moving_modules, recorded)
    on_cpu = select_device(job).type == "cpu"
    return outputs, _estimate_cost(layer, outputs, flops.get_total_flops(), saved.total, deferred.total, on_cpu)


def _estimate_cost(
    layer: LayerReplica, outputs: Activations, flops: int, saved: int, deferred: int, on_cpu: bool
) -> LayerCost:
    parameters = sum(p.nbytes for p in layer.module.parameters())
    trained = sum(p.nbytes for p in layer.trainable.values())
    moved = sum(o.nbytes for o in outputs)
    forward = flops / _FLOPS_PER_S + (moved + saved) / _BYTES_PER_S + _CALL_S
    return LayerCost(
        name=type(layer.module).__name__,
        forward_s=forward,
        input_s=forward,
        weight_s=(flops / _FLOPS_PER_S + trained / _BYTES_PER_S) if trained else 0.0,
        parameter_bytes=parameters,
        state_bytes=3 * trained,
        activation_bytes=saved,
        deferred_bytes=deferred,
        output_bytes=moved,
        buffer_bytes=sum(b.nbytes for b in layer.module.buffers()),
        largest_parameter_bytes=max((p.nbytes for p in layer.module.parameters()), default=0),
        step_s=4 * trained / _BYTES_PER_S,
        halving_s=_SPLIT_BACKWARD_S * len(layer.trainable) if on_cpu else None,
    )


def check_lr_schedule(job: Job, layer: LayerReplica) -> None:
    """Raise JobError for a schedule that fails, or that is not a function of the step."""
    if layer.unit.optimizer is not None and job.lr_schedule is not None:
        try:
            LearningRates(job).settings_at(0, layer.unit.optimizer, layer.unit.base_groups)
        except LayerFailed as error:
            raise JobError(str(error)) from error


def _record_tied_shapes(job: Job, layer: LayerReplica, shapes: dict[str, tuple[int, ...]]) -> None:
    for group in job.tied:
        for name in group:
            if int(name.partition(".")[0]) == layer.index:
                shapes[name] = tuple(named_parameter(layer.module, name).shape)


def _check_tied(job: Job, shapes: dict[str, tuple[int, ...]]) -> None:
    for group in job.tied:
        if len({shapes[name] for name in group}) > 1:
            listed = ", ".join(f"{name} {shapes[name]}" for name in group)
            raise JobError(
                f"Job.tied joins parameters of different shapes ({listed}): shared parameters have one shape"
            )
