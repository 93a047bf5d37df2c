"""The model state of a worker: layers with parameters, buffers, gradient sums and optimizers, and tied groups.

State is addressed by layer, never by stage, so that a layer can move with its state. Tensors are named as in
torch.nn.Sequential's state_dict ("3.weight"), optimizer state is named "optimizer.3.weight.exp_avg". A parameter that
several layers share is a unit of its own, stored under its first name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from culm.data.stream import POSITION_NAME, Stream
from culm.errors import JobError, message_suffix
from culm.runtime.compute import buffer_statistics
from culm.runtime.compute.compile_layer import compile_layer
from culm.runtime.compute.fused_step import Steppable, fuse_units, run_optimizer_step
from culm.runtime.compute.grad_accumulator import GradientAccumulator, finalize_gradient, view_like
from culm.runtime.compute.initial_weights import InitialWeights
from culm.runtime.compute.large_gradients import large_gradients
from culm.runtime.compute.lr_schedule import GroupSettings, LearningRates
from culm.runtime.compute.parameter_groups import LayerParameters
from culm.runtime.compute.rng import derive_seed, may_use_python_rng, seed_everything
from culm.runtime.compute.snapshot import Scalar, Snapshot
from culm.runtime.compute.user_code import UserCodeTraits
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Job


AVERAGE = "ema"
"""Last part of the names of averaged weights in a checkpoint: "optimizer.3.weight.ema"."""


class OptimizerUnit:
    """Parameters that one optimizer steps: the untied ones of a layer, or one tied parameter."""

    def __init__(self, job: Job, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = _build_optimizer(job, LayerParameters(trained)) if trained else None
        self._original_storage = [(p, p.data) for p in trained.values()]
        """Data pointers of the parameters. Aliases and saved copies rely on them."""
        self.base_groups: list[GroupSettings] = (
            [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
            if self.optimizer
            else []
        )
        """The settings that the factory gave the parameter groups. Learning rates depend on them and on the step."""
        self._ema = job.ema
        self.averages = {name: p.detach().clone() for name, p in trained.items()} if job.ema is not None else {}
        """Moving averages of the trained parameters (Job.ema), by name."""

    @property
    def label(self) -> str:
        """For messages: the layer of the unit; of a tied group its first layer."""
        return f"layer {layer_index(next(iter(self.parameters)))}"

    def step(self, step: int, rates: LearningRates) -> None:
        """Make the optimizer step of a step on the gradients in `.grad`, then update the averages."""
        if self.optimizer is None:
            return
        settings = rates.settings_at(step, self.optimizer, self.base_groups)
        for group, changed in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(changed)
        run_optimizer_step(self.optimizer, self.label)
        for parameter, home in self._original_storage:
            if parameter.data_ptr() != home.data_ptr():  # a user's optimizer replaced its memory
                parameter.data = home.copy_(parameter.data)
        self.update_averages()

    @torch.no_grad()
    def update_averages(self) -> None:
        """Move the averages towards the weights, after an optimizer step."""
        for name, average in self.averages.items():
            assert self._ema is not None
            average.lerp_(self.parameters[name].detach(), 1.0 - self._ema)

    def snapshot(self) -> Snapshot:
        """Parameters and optimizer state, not copied."""
        snapshot = Snapshot(parameters={name: p.detach() for name, p in self.parameters.items()})
        for name, parameter in self.parameters.items():
            for part, value in self._optimizer_state(parameter).items():
                label = f"optimizer.{name}.{part}"
                if isinstance(value, Tensor):
                    snapshot.moments[label] = value.detach()
                elif value is None or isinstance(value, (int, float, bool, str)):
                    snapshot.scalars[label] = value
                else:
                    raise JobError(
                        f"Job.optimizer keeps {part!r} as a {type(value).__name__}: its state must be tensors and "
                        "numbers by parameter, so that it can be saved and moved"
                    )
            if name in self.averages:
                snapshot.moments[f"optimizer.{name}.{AVERAGE}"] = self.averages[name]
        return snapshot

    def _optimizer_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        return dict(self.optimizer.state.get(parameter, {})) if self.optimizer else {}

    @torch.no_grad()
    def restore(self, saved: Snapshot) -> None:
        """Restore parameters and, if there is any, optimizer state from a snapshot."""
        for name, parameter in self.parameters.items():
            if name in saved.parameters:
                parameter.copy_(_checked_shape(name, saved.parameters[name], parameter))
            if self.optimizer is None:
                continue
            prefix = f"optimizer.{name}."
            moments = {n.removeprefix(prefix): v for n, v in saved.moments.items() if n.startswith(prefix)}
            average = moments.pop(AVERAGE, saved.parameters.get(name))  # weights to start from are their own average
            if name in self.averages and average is not None:
                self.averages[name].copy_(average)
            state: dict[str, Any] = {
                part: value.to("cpu", copy=True)
                if part == "step" and not self._steps_on_device(parameter)
                else _copy_like_parameter(value, parameter)
                for part, value in moments.items()
            }
            state |= {n.removeprefix(prefix): v for n, v in saved.scalars.items() if n.startswith(prefix)}
            if state:
                self.optimizer.state[parameter] = state

    def _steps_on_device(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer keeps the step count of a parameter on its device. torch's optimizers do if they are
        fused or capturable, and keep it on the CPU otherwise."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        own = next((group for group in groups if any(p is parameter for p in group["params"])), {})
        return bool(own.get("fused") or own.get("capturable"))


def _build_optimizer(job: Job, parameters: LayerParameters) -> torch.optim.Optimizer:
    try:
        optimizer = job.optimizer(parameters)
    except ASYNC_USER_EXCEPTIONS as error:
        raise JobError(f"Job.optimizer raised {type(error).__name__}{message_suffix(error)}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"Job.optimizer returned a {type(optimizer).__name__}: return a torch.optim.Optimizer")
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise JobError(
            f"Job.optimizer returned a {type(optimizer).__name__}: gradients are dense and the loss is computed once a "
            "step, use another optimizer such as Adam"
        )
    return optimizer


def _copy_like_parameter(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A copy on the parameter's device with the parameter's memory layout, which a file does not store."""
    if value.shape != parameter.shape or parameter.is_contiguous():
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _checked_shape(name: str, value: Tensor, like: Tensor) -> Tensor:
    _check_shape(name, value.shape, like.shape)
    return value


def _check_shape(name: str, saved: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(saved) != tuple(wanted):
        raise JobError(
            f"the saved tensor {name!r} has shape {tuple(saved)}, the layer needs {tuple(wanted)}: "
            "it is from another model"
        )


class LayerReplica:
    """One layer on one worker."""

    def __init__(self, job: Job, index: int, module: nn.Module, tied: Mapping[str, nn.Parameter]) -> None:
        self.index = index
        self.module = module.train()
        self.moving_modules = buffer_statistics.prepare_moving_modules(index, module)
        self.guard = buffer_statistics.MutationGuard(f"Job.layers[{index}]", module, self.moving_modules)
        self.traits = UserCodeTraits(exact=job.exact, uses_python_rng=may_use_python_rng(module) or None)
        self.unpacks_inputs = _takes_several_inputs(module)
        compile_layer(index, module, job.compile)
        named = {f"{index}.{name}": p for name, p in module.named_parameters()}
        _check_parameters(job, index, module, named)
        self.unit = OptimizerUnit(job, {name: p for name, p in named.items() if name not in tied})
        self.trainable = {name: p for name, p in named.items() if p.requires_grad}
        self.accumulator = GradientAccumulator(list(self.trainable.values()), exact=job.exact, label=self.label)
        adds_in_place = not job.exact and not job.compile
        self.large_gradients = large_gradients(self.trainable.values()) if adds_in_place else None

    @property
    def label(self) -> str:
        """For messages: 'layer 3 (Block)'."""
        return f"layer {self.index} ({type(self.module).__name__})"

    @contextmanager
    def unknown_traits(self) -> Iterator[None]:
        """While this is open, nothing is learned about how the layer treats its inputs: they are invented."""
        known, self.traits = self.traits, UserCodeTraits(exact=True)
        try:
            yield
        finally:
            self.traits = known

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that are in the state_dict."""
        mine = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        return {f"{self.index}.{name}": value for name, value in self.module.state_dict().items() if name not in mine}

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, by name."""
        return {f"{self.index}.{name}": value for name, value in self.module.named_parameters()} | self.buffers()

    def gradient_sums(self) -> dict[str, Tensor]:
        """Views of the gradient sum, by name of the parameter."""
        sizes = [p.numel() for p in self.trainable.values()]
        return dict(zip(self.trainable, self.accumulator.total.split(sizes), strict=True))


def _takes_several_inputs(module: nn.Module) -> bool:
    """Whether forward gets a tuple as several arguments: if it names more than one, or *args."""
    kinds = [
        p.kind for p in inspect.signature(module.forward).parameters.values() if p.default is inspect.Parameter.empty
    ]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in positional for kind in kinds) > 1


def _check_parameters(job: Job, index: int, module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    for name, value in (*named.items(), *((f"{index}.{name}", value) for name, value in module.named_buffers())):
        if isinstance(value, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise JobError(f"Job.layers[{index}] is lazy, {name!r} has no shape yet: give the sizes when building it")
    types = sorted({str(p.dtype).removeprefix("torch.") for p in named.values() if p.requires_grad})
    if len(types) > 1:
        raise JobError(f"Job.layers[{index}] trains parameters of types {', '.join(types)}: use one type in a layer")
    if job.exact and types and types[0].startswith("complex"):
        raise JobError(f"Job.layers[{index}] has complex parameters: exact sums are of real numbers, use exact=False")


class TiedGroup:
    """A parameter that several layers share. Each layer has an alias with its own gradient. The sums of the aliases are
    added in layer order, so that the result does not depend on how the model is partitioned."""

    def __init__(self, job: Job, names: Sequence[str], parameter: nn.Parameter) -> None:
        self.names = tuple(sorted(names, key=layer_index))
        self.name = self.names[0]
        self.parameter = parameter
        self.unit = OptimizerUnit(job, {self.name: parameter})
        self.requires_grad = parameter.requires_grad
        self.gradient = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)

    def layer_indices(self) -> tuple[int, ...]:
        return tuple(layer_index(name) for name in self.names)

    def finalize_gradient(self, totals: Sequence[Tensor], bounds: Sequence[int], divisor: float) -> None:
        """Turn the complete sums of its layers, in layer order, into the gradient. Not called for a group that is not
        trained."""
        complete = totals[0].clone()
        for total in totals[1:]:
            complete += total
        finalize_gradient(self.gradient, complete, sum(bounds), divisor, f"the tied {self.name}")
        self.parameter.grad = view_like(self.gradient, self.parameter)


def layer_index(name: str) -> int:
    """The layer in a tensor's name: 3 for '3.weight' and 'optimizer.3.weight.exp_avg'."""
    return int(name.removeprefix("optimizer.").partition(".")[0])


class ModelState:
    """The part of a model that a worker holds: any set of layers, and the tied groups that include one of them."""

    def __init__(self, job: Job, layers: Iterable[int], device: torch.device | None = None) -> None:
        self.job = job
        self.device = device or torch.device("cpu")
        self.layers: dict[int, LayerReplica] = {}
        self.tied: dict[str, TiedGroup] = {}
        self.rates = LearningRates(job)
        self._steppables: list[Steppable] = []
        """What makes the optimizer steps of all units; determined at the first step."""
        wanted = sorted(layers)
        self._build_tied_groups(wanted)
        for index in wanted:
            self._build_layer_replica(index)
        if job.init is not None:
            others = {group.name: group.names for group in self.tied.values()}
            self.restore_named(InitialWeights(job.init).read(self.tensor_names(), others), {})

    def _build_tied_groups(self, wanted: Sequence[int]) -> None:
        for group in self.job.tied:
            names = sorted(group, key=layer_index)
            if any(layer_index(name) in wanted for name in names):
                first = build_layer(self.job, layer_index(names[0])).to(self.device)
                parameter = nn.Parameter(named_parameter(first, names[0]).detach().clone())
                parameter.requires_grad_(named_parameter(first, names[0]).requires_grad)
                self.tied[names[0]] = TiedGroup(self.job, names, parameter)

    def _build_layer_replica(self, index: int) -> None:
        module = build_layer(self.job, index).to(self.device)
        tied: dict[str, nn.Parameter] = {}
        for group in self.tied.values():
            for name in group.names:
                if layer_index(name) == index:
                    alias = nn.Parameter(group.parameter.data, requires_grad=group.parameter.requires_grad)
                    _replace_parameter(module, name, alias)
                    tied[name] = alias
        self.layers[index] = LayerReplica(self.job, index, module, tied)

    def units(self) -> list[tuple[int, OptimizerUnit]]:
        """(layer, unit) of the layers held here, and of tied groups that include one of them, under their first
        layer."""
        own = [(index, layer.unit) for index, layer in self.layers.items()]
        return own + [(group.layer_indices()[0], group.unit) for group in self.tied.values()]

    def step(self, step: int) -> None:
        """Make the optimizer step of all units for a step, with its learning rates."""
        self._steppables = self._steppables or fuse_units([unit for _, unit in self.units()])
        for one in self._steppables:
            one.step(step, self.rates)

    def averages_of(self, layer: LayerReplica) -> dict[str, Tensor]:
        """The averaged weights of a layer by name, tied ones included; empty without Job.ema."""
        found = dict(layer.unit.averages)
        for group in self.tied.values():
            if group.unit.averages:
                found |= dict.fromkeys(group.names, group.unit.averages[group.name])
        return {name: value for name, value in found.items() if layer_index(name) == layer.index}

    def snapshot(self, layers: Iterable[int] | None = None) -> Snapshot:
        """The state of some layers (default: all held). Tied groups are under their first layer. Not copied."""
        chosen = set(self.layers if layers is None else layers)
        snapshot = Snapshot()
        for first, unit in self.units():
            if first in chosen:
                snapshot.update(unit.snapshot())
        for index in sorted(chosen & set(self.layers)):
            snapshot.buffers.update(self.layers[index].buffers())
        return snapshot

    def parameters(self) -> dict[str, Tensor]:
        """All parameters held here, including those of tied groups. Not copied."""
        return {name: p.detach() for _, unit in self.units() for name, p in unit.parameters.items()}

    def moving_buffers(self) -> dict[str, Tensor]:
        """The buffers of layers that record statistics: a forward may read them, and a step updates them. Not
        copied."""
        moving = (layer.buffers() for layer in self.layers.values() if layer.moving_modules)
        return {name: buffer for buffers in moving for name, buffer in buffers.items()}

    def snapshot_all(self) -> Snapshot:
        """Everything held here, with every tied group that includes a held layer: enough to build the same
        elsewhere."""
        snapshot = Snapshot()
        for _, unit in self.units():
            snapshot.update(unit.snapshot())
        for layer in self.layers.values():
            snapshot.buffers.update(layer.buffers())
            snapshot.scalars.update(self._stream_positions(layer.index))
        return snapshot

    def _stream_positions(self, layer: int) -> dict[str, Scalar]:
        """With the first and the last layer, which need items: where the stream of the job is."""
        if not isinstance(self.job.data, Stream) or layer not in (0, len(self.job.layers) - 1):
            return {}
        return {POSITION_NAME: self.job.data.newest_positions()}

    def snapshot_layer(self, layer: int) -> Snapshot:
        """One layer, with every tied group that includes it: what another holder of the layer needs. Not copied."""
        snapshot = self.layers[layer].unit.snapshot()
        for group in self.tied.values():
            if layer in group.layer_indices():
                snapshot.update(group.unit.snapshot())
        snapshot.buffers.update(self.layers[layer].buffers())
        snapshot.scalars.update(self._stream_positions(layer))
        return snapshot

    @torch.no_grad()
    def restore(self, saved: Snapshot) -> None:
        """Restore whatever the snapshot has for the layers held here."""
        if isinstance(self.job.data, Stream) and POSITION_NAME in saved.scalars:
            self.job.data.add_positions(str(saved.scalars[POSITION_NAME]))
        for _, unit in self.units():
            unit.restore(saved)
        for layer in self.layers.values():
            for name, buffer in layer.buffers().items():
                if name in saved.buffers:
                    buffer.copy_(_checked_shape(name, saved.buffers[name], buffer))
            layer.guard.accept_current_buffers()

    def tensor_names(self) -> set[str]:
        """Names of the parameters and buffers held here. Tied ones are under their first name."""
        own = {name for _, unit in self.units() for name in unit.parameters}
        return own | {name for layer in self.layers.values() for name in layer.buffers()}

    def saved_names(self) -> set[str]:
        """Names of the parameters and buffers that a checkpoint has of the layers held here."""
        return self.tensor_names() - self._unsaved_names()

    def saved_snapshot(self, layers: Iterable[int]) -> Snapshot:
        """What a checkpoint has of some layers: without frozen parameters, if the job does not save them."""
        snapshot = self.snapshot(layers)
        for name in self._unsaved_names() & snapshot.parameters.keys():
            del snapshot.parameters[name]
        return snapshot

    def _unsaved_names(self) -> set[str]:
        if self.job.save_frozen:
            return set()
        return {name for _, unit in self.units() for name, p in unit.parameters.items() if not p.requires_grad}

    def restore_named(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> None:
        """Restore state from the flat names of a file. Names of layers that are not held here are ignored."""
        parameters = {name for _, unit in self.units() for name in unit.parameters}
        saved = Snapshot(scalars=dict(scalars))
        for name, value in tensors.items():
            part = saved.moments if name.startswith("optimizer.") else saved.buffers
            (saved.parameters if name in parameters else part)[name] = value
        self.restore(saved)

    def digests(self, layers: Iterable[int]) -> dict[int, tuple[str, str]]:
        """(weights, state) as SHA-256 of each layer. A tied parameter counts in its first layer only."""
        return {index: self.snapshot([index]).digest() for index in layers}


def build_layer(job: Job, index: int) -> nn.Module:
    """Build a layer as every node does: its initial weights depend on (seed, layer) only."""
    source = job.layers[index]
    if isinstance(source, nn.Module):
        return copy.deepcopy(source)
    seed_everything(derive_seed(job.seed, "init", index))
    module, fresh = _call_factory(source)
    if not isinstance(module, nn.Module):
        raise JobError(f"Job.layers[{index}] made a {type(module).__name__}: a factory returns a torch.nn.Module")
    return module if fresh.issuperset(map(id, module.parameters())) else copy.deepcopy(module)


def _call_factory(source: Callable[[], nn.Module]) -> tuple[nn.Module, set[int]]:
    """The module that a factory returned, and the ids of its new parameters. Parameters that existed before (`lambda:
    module`) may be returned again, to another holder in this process."""
    fresh: list[nn.Parameter | None] = []
    noting = register_module_parameter_registration_hook(lambda _, __, parameter: fresh.append(parameter))
    try:
        return source(), set(map(id, fresh))
    finally:
        noting.remove()


def named_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter with a name such as '3.weight', in the module of layer 3."""
    own, known = name.partition(".")[2], dict(module.named_parameters())
    if own in known:
        return known[own]
    shared = dict(module.named_parameters(remove_duplicate=False)).get(own)
    if shared is not None:
        first = next(n for n, p in known.items() if p is shared)
        raise JobError(
            f"Job.tied names {name!r}, which layer {layer_index(name)} has as {first!r} first: use that name"
        )
    has = ", ".join(known) or "none"
    raise JobError(f"Job.tied names {name!r}, which layer {layer_index(name)} does not have: its parameters are {has}")


def _replace_parameter(module: nn.Module, name: str, alias: nn.Parameter) -> None:
    mine = named_parameter(module, name)
    if mine.shape != alias.shape:
        raise JobError(
            f"Job.tied names {name!r} of shape {tuple(mine.shape)} with a parameter of shape {tuple(alias.shape)}: "
            "shared parameters have one shape"
        )
    for part in module.modules():
        for own, parameter in part._parameters.items():
            if parameter is mine:  # a module may contain it under several names
                part._parameters[own] = alias


def check_initial_weights(job: Job, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises JobError unless Job.init has all tensors that the layers need, in these shapes. Reads no tensor."""
    assert job.init is not None
    ties = {names[0]: names for names in (sorted(group, key=layer_index) for group in job.tied)}
    aliases = {name for names in ties.values() for name in names[1:]}
    found = InitialWeights(job.init)
    for name, stored in found.stored_names(shapes.keys() - aliases, ties).items():
        _check_shape(name, found.shape(stored), shapes[name])
