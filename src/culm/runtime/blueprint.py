"""What a job's layers look like, found out before any node starts: shapes, sizes, work, and whether they fit together.

The layers run once on fake tensors, which have shapes but no memory, so that a model too large for this machine can be
checked too. Code that fake tensors can not run (it looks at values) is run for real, one layer at a time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from culm.errors import CulmError, JobError, LayerFailed, said
from culm.plan.profile import LayerCost, Profile
from culm.runtime import statistics
from culm.runtime.call import call_layer, handed_on, loss_of
from culm.runtime.data import Values, evaluation_batch, mapped, micro_batch
from culm.runtime.device import device_of
from culm.runtime.keys import key
from culm.runtime.raised import RAISED
from culm.runtime.state import HeldLayer, build_layer, check_initial, layer_of, named_parameter

if TYPE_CHECKING:
    from culm.job import Job

_FLOPS = 5e10
_BYTES = 1e10
_CALL_S = 2e-5
_HALVING_S = 4e-5
"""Guesses at one core, the last one for each trained parameter: mostly ratios matter, to cut the model, and whether a
layer is large. `culm profile` measures."""


@dataclass(frozen=True)
class Blueprint:
    """The facts of a job that need its layers."""

    profile: Profile
    weighted: bool
    """The loss returns (sum, weight)."""
    names: frozenset[str]
    """Parameters and buffers as a checkpoint has them: tied ones under their first name."""
    optimizers: str
    """The classes of the optimizers, as in 'AdamW'."""


class _Untracked(nullcontext[None]):
    """Stands for torch's tracker of modules, which breaks off where a forward takes a gradient itself."""

    parents = ("Global",)


class _Flops(FlopCounterMode):
    """Counts over all, not by module."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker: Any = _Untracked()


def probe(job: Job) -> Blueprint:
    """Look at every layer. Raises JobError, naming the field, for layers, data, tied names or a loss that are wrong."""
    device = torch.device("cpu")
    try:
        if job.evaluate_every:
            evaluation_batch(job, 0, device)
        inputs, target = micro_batch(job, 0, 0, device)
    except LayerFailed as error:
        raise JobError(str(error)) from error
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            return _look(job, _faked(fake, inputs), _faked(fake, target))
    except Exception as error:
        if isinstance(error, JobError) and error.__cause__ is None:
            raise
        # Code of the user raised, perhaps at fake tensors alone: the real run decides.
        return _look(job, inputs, target)


def _faked(fake: FakeTensorMode, value: Any) -> Any:
    return mapped(value, lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf)


def _look(job: Job, values: Values, target: Any) -> Blueprint:
    costs: list[LayerCost] = []
    shapes: dict[str, tuple[int, ...]] = {}
    wanted: dict[str, tuple[int, ...]] = {}
    optimizers: set[str] = set()
    cast: AbstractContextManager[Any] = nullcontext()
    if job.precision == "bf16":
        cast = torch.autocast("cpu", torch.bfloat16)
    try:
        with cast:
            for index in range(len(job.layers)):
                layer = _built(job, index)
                _note_tied(job, layer, shapes)
                wanted |= {name: tuple(value.shape) for name, value in layer.named().items()}
                optimizers |= {type(layer.unit.optimizer).__name__} if layer.unit.optimizer is not None else set()
                values, cost = _run(job, layer, values)
                values = tuple(handed_on(v) for v in values)
                costs.append(cost)
            loss, weight = loss_of(job, values, target, key(job.seed, 0, 0, len(job.layers)))
    except LayerFailed as error:
        raise JobError(f"the layers do not run: {error}") from error
    if not loss.requires_grad:
        raise JobError("Job.loss does not depend on any trainable parameter: there is nothing to train")
    _check_loss_alone(loss)
    _check_tied(job, shapes)
    if job.init is not None:
        check_initial(job, wanted)
    profile = Profile(
        layers=tuple(costs), device="cpu", micro_batch=job.micro_batch, threads=job.threads, source="estimated"
    )
    aliases = {name for group in job.tied for name in sorted(group, key=layer_of)[1:]}
    names = frozenset(wanted.keys() - aliases)
    return Blueprint(profile, weight is not None, names, ", ".join(sorted(optimizers)))


def _check_loss_alone(loss: Tensor) -> None:
    """Raises JobError if parameters other than the layers' own would get gradients. The layers are copies of what the
    job has, cut off from the loss here: a parameter below it is not one of theirs."""
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


def _built(job: Job, index: int) -> HeldLayer:
    try:
        return HeldLayer(job, index, build_layer(job, index), {})
    except CulmError:
        raise
    except RAISED as error:
        raise JobError(f"Job.layers[{index}] could not be built: {type(error).__name__}{said(error)}") from error


def _run(job: Job, layer: HeldLayer, values: Values) -> tuple[Values, LayerCost]:
    saved = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.nbytes
        return tensor

    layer.guard.watch()
    with (
        _Flops() as flops,
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        statistics.recording() as recorded,
    ):
        outputs = call_layer(layer, values, key(job.seed, 0, 0, layer.index))
    for output in outputs:
        if output.layout is not torch.strided:
            kind = f"{output.layout} {output.dtype}".replace("torch.", "")
            raise JobError(f"the output of {layer.label} is {kind}: hand dense tensors from layer to layer")
    layer.guard.check()
    statistics.collect(layer.moving, recorded)
    on_cpu = device_of(job).type == "cpu"
    return outputs, _cost(layer, outputs, flops.get_total_flops(), saved, on_cpu)


def _cost(layer: HeldLayer, outputs: Values, flops: int, saved: int, on_cpu: bool) -> LayerCost:
    parameters = sum(p.nbytes for p in layer.module.parameters())
    trained = sum(p.nbytes for p in layer.trained.values())
    moved = sum(o.nbytes for o in outputs)
    forward = flops / _FLOPS + (moved + saved) / _BYTES + _CALL_S
    return LayerCost(
        name=type(layer.module).__name__,
        forward_s=forward,
        input_s=forward,
        weight_s=(flops / _FLOPS + trained / _BYTES) if trained else 0.0,
        parameter_bytes=parameters,
        state_bytes=3 * trained,
        activation_bytes=saved,
        output_bytes=moved,
        buffer_bytes=sum(b.nbytes for b in layer.module.buffers()),
        step_s=4 * trained / _BYTES,
        halving_s=_HALVING_S * len(layer.trained) if on_cpu else None,
    )


def _note_tied(job: Job, layer: HeldLayer, shapes: dict[str, tuple[int, ...]]) -> None:
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
