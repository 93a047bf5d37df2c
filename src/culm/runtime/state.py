"""What a worker holds: layers with their parameters, buffers, sums of gradients and optimizers; and tied groups.

State is addressed by layer, never by stage, so that a layer can move with everything that belongs to it. Tensors are
named as in torch.nn.Sequential's state_dict ("3.weight"), optimizer state "optimizer.3.weight.exp_avg"; a parameter
that several layers share is a unit of its own and stands under its first name.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from culm.errors import JobError, said
from culm.runtime import statistics
from culm.runtime.accumulate import Accumulator, finish, laid
from culm.runtime.call import Manner
from culm.runtime.joint import Stepped, joined, step_of
from culm.runtime.keys import key, knows_outside, seed_everything
from culm.runtime.raised import RAISED

if TYPE_CHECKING:
    from culm.job import Job

Scalar = int | float | bool | str | None


@dataclass(repr=False)
class Snapshot:
    """State on its way: to a checkpoint, to another holder, into a test."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    """Optimizer state that is tensors ..."""
    scalars: dict[str, Scalar] = field(default_factory=dict)
    """... and that is plain numbers."""

    def __repr__(self) -> str:
        return f"Snapshot of {len(self.tensors)} tensors"

    def update(self, other: Snapshot) -> None:
        self.parameters.update(other.parameters)
        self.buffers.update(other.buffers)
        self.moments.update(other.moments)
        self.scalars.update(other.scalars)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them by name, as they stand in a file."""
        return {**self.parameters, **self.buffers, **self.moments}

    def copy(self) -> Snapshot:
        """Tensors cloned to host memory: what the layers do next does not show in it."""
        return Snapshot(_cloned(self.parameters), _cloned(self.buffers), _cloned(self.moments), dict(self.scalars))

    def digest(self) -> tuple[str, str]:
        """SHA-256 of the parameters alone, and of everything: little-endian bytes, sorted by name."""
        weights = hashlib.sha256()
        for name in sorted(self.parameters):
            weights.update(_bytes(self.parameters[name]))
        state = weights.copy()
        for part in (self.buffers, self.moments):
            for name in sorted(part):
                state.update(_bytes(part[name]))
        state.update(repr(sorted(self.scalars.items())).encode() if self.scalars else b"")
        return weights.hexdigest(), state.hexdigest()


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def _bytes(value: Tensor) -> Any:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def total_digest(digests: Iterable[str]) -> str:
    """SHA-256 over the concatenated digests of the layers, in layer order."""
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


class Unit:
    """Parameters that one optimizer steps: those of a layer that are its own, or one that is tied."""

    def __init__(self, job: Job, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        trained = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = _optimizer(job, trained) if trained else None
        self._homes = [(p, p.data) for p in trained]
        """Where they lie: others that share them, and copies that are kept, know them by their memory."""
        self._base = [group.get("lr") for group in self.optimizer.param_groups] if self.optimizer else []

    @property
    def label(self) -> str:
        """For people: the layer that it is of, or of a tied group the first of them."""
        return f"layer {layer_of(next(iter(self.parameters)))}"

    def step(self, factor: float) -> None:
        """One optimizer step on the gradients that lie in `.grad`."""
        if self.optimizer is None:
            return
        for group, base in zip(self.optimizer.param_groups, self._base, strict=True):
            if base is not None:
                group["lr"] = base * factor
        step_of(self.optimizer, self.label)
        for parameter, home in self._homes:
            if parameter.data_ptr() != home.data_ptr():  # an optimizer of the user's gave it other memory
                parameter.data = home.copy_(parameter.data)

    def snapshot(self) -> Snapshot:
        """Parameters and optimizer state, not copied."""
        found = Snapshot(parameters={name: p.detach() for name, p in self.parameters.items()})
        for name, parameter in self.parameters.items():
            for part, value in self._moments(parameter).items():
                label = f"optimizer.{name}.{part}"
                if isinstance(value, Tensor):
                    found.moments[label] = value.detach()
                elif value is None or isinstance(value, (int, float, bool, str)):
                    found.scalars[label] = value
                else:
                    raise JobError(
                        f"Job.optimizer keeps {part!r} as a {type(value).__name__}: its state must be tensors and "
                        "numbers by parameter, so that it can be saved and moved"
                    )
        return found

    def _moments(self, parameter: nn.Parameter) -> dict[str, Any]:
        return dict(self.optimizer.state.get(parameter, {})) if self.optimizer else {}

    @torch.no_grad()
    def restore(self, saved: Snapshot) -> None:
        """Take parameters and, where there is any, optimizer state from a snapshot."""
        for name, parameter in self.parameters.items():
            if name in saved.parameters:
                parameter.copy_(_fitting(name, saved.parameters[name], parameter))
            if self.optimizer is None:
                continue
            prefix = f"optimizer.{name}."
            moments = {n.removeprefix(prefix): v for n, v in saved.moments.items() if n.startswith(prefix)}
            # Adam keeps its step count on the CPU whatever the device; everything else lives beside its parameter.
            state: dict[str, Any] = {
                part: value.clone() if value.ndim == 0 else _beside(value, parameter) for part, value in moments.items()
            }
            state |= {n.removeprefix(prefix): v for n, v in saved.scalars.items() if n.startswith(prefix)}
            if state:
                self.optimizer.state[parameter] = state


def _optimizer(job: Job, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        made = job.optimizer(parameters)
    except RAISED as error:
        raise JobError(f"Job.optimizer raised {type(error).__name__}{said(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise JobError(f"Job.optimizer returned a {type(made).__name__}: return a torch.optim.Optimizer")
    if isinstance(made, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise JobError(
            f"Job.optimizer returned a {type(made).__name__}: gradients are dense and the loss is computed once a "
            "step, use another optimizer such as Adam"
        )
    return made


def _beside(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A copy on the parameter's device that lies as the parameter does, which a file does not tell."""
    if value.shape != parameter.shape or parameter.is_contiguous():
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _fitting(name: str, value: Tensor, like: Tensor) -> Tensor:
    _check_shape(name, value.shape, like.shape)
    return value


def _check_shape(name: str, saved: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(saved) != tuple(wanted):
        raise JobError(
            f"the saved tensor {name!r} has shape {tuple(saved)}, the layer wants {tuple(wanted)}: "
            "it is from another model"
        )


class HeldLayer:
    """One layer on one worker."""

    def __init__(self, job: Job, index: int, module: nn.Module, tied: Mapping[str, nn.Parameter]) -> None:
        self.index = index
        self.module = module.train()
        self.moving = statistics.prepare(index, module)
        self.guard = statistics.Guard(f"Job.layers[{index}]", module, self.moving)
        self.manner = Manner(exact=job.exact, draws=knows_outside(module) or None)
        self.unpacks = _takes_several(module)
        named = {f"{index}.{name}": p for name, p in module.named_parameters()}
        _check_parameters(job, index, module, named)
        self.unit = Unit(job, {name: p for name, p in named.items() if name not in tied})
        self.trained = {name: p for name, p in named.items() if p.requires_grad}
        self.accumulator = Accumulator(list(self.trained.values()), exact=job.exact, label=self.label)

    @property
    def label(self) -> str:
        """For people: 'layer 3 (Block)'."""
        return f"layer {self.index} ({type(self.module).__name__})"

    def buffers(self) -> dict[str, Tensor]:
        """Those that a state_dict has."""
        mine = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        return {f"{self.index}.{name}": value for name, value in self.module.state_dict().items() if name not in mine}

    def named(self) -> dict[str, Tensor]:
        """Parameters and buffers, by name."""
        return {f"{self.index}.{name}": value for name, value in self.module.named_parameters()} | self.buffers()

    def sums(self) -> dict[str, Tensor]:
        """Views of the sum, by name of the parameter."""
        sizes = [p.numel() for p in self.trained.values()]
        return dict(zip(self.trained, self.accumulator.total.split(sizes), strict=True))


def _takes_several(module: nn.Module) -> bool:
    """Whether a tuple is handed to forward as several arguments: when it names more than one, or *args."""
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
    """A parameter that several layers share. Each layer has an alias with a gradient of its own; their sums are added
    in layer order, so that the result does not depend on where the model is cut."""

    def __init__(self, job: Job, names: Sequence[str], parameter: nn.Parameter) -> None:
        self.names = tuple(sorted(names, key=layer_of))
        self.name = self.names[0]
        self.parameter = parameter
        self.unit = Unit(job, {self.name: parameter})
        self.trains = parameter.requires_grad
        self.gradient = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)

    def layers(self) -> tuple[int, ...]:
        return tuple(layer_of(name) for name in self.names)

    def finish(self, totals: Sequence[Tensor], bounds: Sequence[int], divisor: float) -> None:
        """Turn the complete sums of its layers, in layer order, into the gradient. Not where it does not train."""
        complete = totals[0].clone()
        for total in totals[1:]:
            complete += total
        finish(self.gradient, complete, sum(bounds), divisor, f"the tied {self.name}")
        self.parameter.grad = laid(self.gradient, self.parameter)


def layer_of(name: str) -> int:
    """The layer of a tensor's name: 3 for '3.weight' and 'optimizer.3.weight.exp_avg'."""
    return int(name.removeprefix("optimizer.").partition(".")[0])


class State:
    """All that a worker holds of a model: any set of layers, and the tied groups that touch them."""

    def __init__(self, job: Job, layers: Iterable[int], device: torch.device | None = None) -> None:
        self.job = job
        self.device = device or torch.device("cpu")
        self.layers: dict[int, HeldLayer] = {}
        self.tied: dict[str, TiedGroup] = {}
        self._stepped: list[Stepped] = []
        """What makes the optimizer steps of all units; known once the first is made."""
        wanted = sorted(layers)
        self._tie(wanted)
        for index in wanted:
            self._hold(index)
        if job.init is not None:
            others = {group.name: group.names for group in self.tied.values()}
            self.restore_named(_initial(job.init, self.names(), others), {})

    def _tie(self, wanted: Sequence[int]) -> None:
        for group in self.job.tied:
            names = sorted(group, key=layer_of)
            if any(layer_of(name) in wanted for name in names):
                first = build_layer(self.job, layer_of(names[0])).to(self.device)
                parameter = nn.Parameter(named_parameter(first, names[0]).detach().clone())
                parameter.requires_grad_(named_parameter(first, names[0]).requires_grad)
                self.tied[names[0]] = TiedGroup(self.job, names, parameter)

    def _hold(self, index: int) -> None:
        module = build_layer(self.job, index).to(self.device)
        tied: dict[str, nn.Parameter] = {}
        for group in self.tied.values():
            for name in group.names:
                if layer_of(name) == index:
                    alias = nn.Parameter(group.parameter.data, requires_grad=group.parameter.requires_grad)
                    _replace_parameter(module, name, alias)
                    tied[name] = alias
        self.layers[index] = HeldLayer(self.job, index, module, tied)

    def units(self) -> list[tuple[int, Unit]]:
        """(layer, unit): those of the layers held here, and of tied groups that touch them, by their first layer."""
        own = [(index, layer.unit) for index, layer in self.layers.items()]
        return own + [(group.layers()[0], group.unit) for group in self.tied.values()]

    def step(self, factor: float) -> None:
        """One optimizer step of everything held here, the learning rates multiplied by a factor."""
        self._stepped = self._stepped or joined([unit for _, unit in self.units()])
        for one in self._stepped:
            one.step(factor)

    def snapshot(self, layers: Iterable[int] | None = None) -> Snapshot:
        """The state of some layers (default: all held), tied groups under their first; not copied."""
        chosen = set(self.layers if layers is None else layers)
        found = Snapshot()
        for first, unit in self.units():
            if first in chosen:
                found.update(unit.snapshot())
        for index in sorted(chosen & set(self.layers)):
            found.buffers.update(self.layers[index].buffers())
        return found

    def parameters(self) -> dict[str, Tensor]:
        """All that are held here, those of tied groups included; not copied."""
        return {name: p.detach() for _, unit in self.units() for name, p in unit.parameters.items()}

    def moving_buffers(self) -> dict[str, Tensor]:
        """Those of layers that record statistics: a forward may use them, and a step moves them. Not copied."""
        moving = (layer.buffers() for layer in self.layers.values() if layer.moving)
        return {name: buffer for buffers in moving for name, buffer in buffers.items()}

    def whole(self) -> Snapshot:
        """All that is held here, with every tied group that touches it: enough to build the same elsewhere."""
        found = Snapshot()
        for _, unit in self.units():
            found.update(unit.snapshot())
        for layer in self.layers.values():
            found.buffers.update(layer.buffers())
        return found

    def part(self, layer: int) -> Snapshot:
        """One layer, with every tied group that touches it: what another holder of the layer needs. Not copied."""
        found = self.layers[layer].unit.snapshot()
        for group in self.tied.values():
            if layer in group.layers():
                found.update(group.unit.snapshot())
        found.buffers.update(self.layers[layer].buffers())
        return found

    @torch.no_grad()
    def restore(self, saved: Snapshot) -> None:
        """Take whatever the snapshot has for the layers held here."""
        for _, unit in self.units():
            unit.restore(saved)
        for layer in self.layers.values():
            for name, buffer in layer.buffers().items():
                if name in saved.buffers:
                    buffer.copy_(_fitting(name, saved.buffers[name], buffer))
            layer.guard.forgive()

    def names(self) -> set[str]:
        """Names of the parameters and buffers held here; tied ones under their first name."""
        own = {name for _, unit in self.units() for name in unit.parameters}
        return own | {name for layer in self.layers.values() for name in layer.buffers()}

    def restore_named(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> None:
        """Take state from the flat names of a file; names of layers that are not held here are passed over."""
        parameters = {name for _, unit in self.units() for name in unit.parameters}
        saved = Snapshot(scalars=dict(scalars))
        for name, value in tensors.items():
            part = saved.moments if name.startswith("optimizer.") else saved.buffers
            (saved.parameters if name in parameters else part)[name] = value
        self.restore(saved)

    def digests(self, layers: Iterable[int]) -> dict[int, tuple[str, str]]:
        """(weights, state) as SHA-256 of each layer; a tied parameter counts in its first layer only."""
        return {index: self.snapshot([index]).digest() for index in layers}


def build_layer(job: Job, index: int) -> nn.Module:
    """The layer as every node builds it: its initial weights come from (seed, layer) alone."""
    source = job.layers[index]
    if isinstance(source, nn.Module):
        return copy.deepcopy(source)
    seed_everything(key(job.seed, "init", index))
    made, fresh = _made(source)
    if not isinstance(made, nn.Module):
        raise JobError(f"Job.layers[{index}] made a {type(made).__name__}: a factory returns a torch.nn.Module")
    return made if fresh.issuperset(map(id, made.parameters())) else copy.deepcopy(made)


def _made(source: Callable[[], nn.Module]) -> tuple[nn.Module, set[int]]:
    """What a factory made, and which parameters are new. Those that were there before (`lambda: module`) may be given
    out again, to another holder in this process."""
    fresh: list[nn.Parameter | None] = []
    noting = register_module_parameter_registration_hook(lambda _, __, parameter: fresh.append(parameter))
    try:
        return source(), set(map(id, fresh))
    finally:
        noting.remove()


def named_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter that '3.weight' names, in the module of layer 3."""
    own, known = name.partition(".")[2], dict(module.named_parameters())
    if own in known:
        return known[own]
    shared = dict(module.named_parameters(remove_duplicate=False)).get(own)
    if shared is not None:
        first = next(n for n, p in known.items() if p is shared)
        raise JobError(f"Job.tied names {name!r}, which layer {layer_of(name)} has as {first!r} first: use that name")
    has = ", ".join(known) or "none"
    raise JobError(f"Job.tied names {name!r}, which layer {layer_of(name)} does not have: it has {has}")


def _replace_parameter(module: nn.Module, name: str, alias: nn.Parameter) -> None:
    mine = named_parameter(module, name)
    if mine.shape != alias.shape:
        raise JobError(
            f"Job.tied names {name!r} of shape {tuple(mine.shape)} with a parameter of shape {tuple(alias.shape)}: "
            "shared parameters have one shape"
        )
    for part in module.modules():
        for own, parameter in part._parameters.items():
            if parameter is mine:  # a module may have it under several names
                part._parameters[own] = alias


def check_initial(job: Job, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises JobError unless Job.init has all that the layers, whose shapes these are, begin with. Reads no tensor."""
    assert job.init is not None
    ties = {names[0]: names for names in (sorted(group, key=layer_of) for group in job.tied)}
    aliases = {name for names in ties.values() for name in names[1:]}
    with _opened(job.init) as file:
        for name, stored in _stored(job.init, file, shapes.keys() - aliases, ties).items():
            _check_shape(name, file.get_slice(stored).get_shape(), shapes[name])


def _initial(path: str, names: set[str], others: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Named tensors of a safetensors file to start from; a tied one may stand under any of its names."""
    with _opened(path) as file:
        return {name: file.get_tensor(stored) for name, stored in _stored(path, file, names, others).items()}


def _stored(path: str, file: Any, names: Iterable[str], others: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Under which name each tensor stands. Every one must be there: a half-loaded model is a trap."""
    known = set(file.keys())
    found = {name: next((n for n in (name, *others.get(name, ())) if n in known), None) for name in sorted(names)}
    missing = [name for name, stored in found.items() if stored is None]
    if missing:
        raise JobError(
            f"Job.init {path!r} has no tensor {missing[0]!r} ({len(missing)} are missing): it is from another model"
        )
    return {name: stored for name, stored in found.items() if stored is not None}


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise JobError(f"Job.init {path!r} can not be read as safetensors: {error}") from None
