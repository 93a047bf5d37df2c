"""What a user describes: the Job. It imports no torch, and checks what can be checked without running anything."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from culm.errors import RAISED, JobError, said

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    import torch
    from torch import Tensor, nn

Precision: TypeAlias = Literal["fp32", "bf16"]
NonFinite: TypeAlias = Literal["stop", "skip"]
Layer: TypeAlias = "nn.Module | Callable[[], nn.Module]"
Loss: TypeAlias = "Callable[[Any, Any], Tensor | tuple[Tensor, Any]]"
OptimizerFactory: TypeAlias = "Callable[[list[nn.Parameter]], torch.optim.Optimizer]"
Hook: TypeAlias = "Callable[[Mapping[str, Any]], object]"


class Dataset(Protocol):
    """Map-style: a length and items by number. An item is (input, target)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training job. Micro-batches are counted over the whole step: M = global_batch / micro_batch."""

    layers: Sequence[Layer]
    """Modules, or zero-argument factories (preferred: a node builds only the layers it holds)."""
    loss: Loss
    """(output, target) -> a scalar mean over the micro-batch, or (sum, weight)."""
    optimizer: OptimizerFactory
    """Called once per layer with its parameters, so that a layer can move with its own optimizer state."""
    data: Dataset
    global_batch: int
    micro_batch: int
    steps: int
    seed: int = 0
    lr_schedule: Callable[[int], float] | None = None
    """step -> factor on the optimizer's learning rate. A function, because a scheduler object could not move."""
    clip_norm: float | None = None
    precision: Precision = "fp32"
    """bf16 means autocast: parameters, gradients and optimizer state stay fp32."""
    recompute: bool = False
    """Activation checkpointing: keep the inputs of the layers only, run their forward again in the backward."""
    tied: Sequence[Sequence[str]] = ()
    """Groups of shared parameters, each named "layer index . parameter name": [("0.weight", "13.weight")]."""
    exact: bool = False
    """Bit-for-bit the undisturbed run, whatever happens and for any number of pipelines."""
    threads: int = 1
    """Threads per worker: part of what exact means, since sums over 1 and 2 threads differ."""
    init: str | None = None
    """A safetensors file of named tensors ("0.weight") to start from."""
    collate: Callable[[list[Any]], Any] | None = None
    evaluate: Dataset | None = None
    evaluate_every: int = 0
    on_step: Hook | None = None
    """Called after every committed step with its metrics; returning `culm.job.STOP` ends the run there."""
    nonfinite: NonFinite = "stop"
    """A NaN or infinite loss: stop the run, or skip the step (nothing moves) and go on."""
    device: str = "auto"
    """Where workers compute: auto (cuda if there is one), cpu, cuda."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def micro_batches(self) -> int:
        """M: micro-batches of one step, over all pipelines."""
        return self.global_batch // self.micro_batch


class _Stop:
    def __repr__(self) -> str:
        return "culm.STOP"


STOP = _Stop()
"""What an on_step hook returns to end the run after the step it was called for."""


def check(job: Job) -> None:
    """Refuse what is wrong by itself. What needs the layers to run is checked by `culm.runtime.blueprint`."""
    for field in _LEAST:
        _whole(field, getattr(job, field))
    if job.global_batch % job.micro_batch:
        raise JobError(_indivisible(job.global_batch, job.micro_batch))
    _layers(job.layers)
    for field in ("loss", "optimizer"):
        if not callable(getattr(job, field)):
            raise JobError(f"Job.{field} is {getattr(job, field)!r}, not callable: pass a function")
    for field in ("lr_schedule", "collate", "on_step"):
        value = getattr(job, field)
        if value is not None and not callable(value):
            raise JobError(f"Job.{field} is {value!r}, not callable: pass a function or None")
    _data("data", job.data)
    if job.evaluate is not None:
        _data("evaluate", job.evaluate)
    if job.evaluate_every and job.evaluate is None:
        raise JobError("Job.evaluate_every is set but Job.evaluate is None: pass the data set to evaluate on")
    _one_of("precision", job.precision, get_args(Precision))
    _one_of("nonfinite", job.nonfinite, get_args(NonFinite))
    if job.device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise JobError(f"Job.device is {job.device!r}: use auto, cpu or cuda")
    if job.clip_norm is not None and not (
        isinstance(job.clip_norm, int | float) and math.isfinite(job.clip_norm) and job.clip_norm > 0
    ):
        raise JobError(f"Job.clip_norm is {job.clip_norm!r}: use a number above 0, or None for no clipping")
    _tied(job.tied, len(job.layers))
    _parameters(job.layers, job.tied)
    if job.init is not None and not Path(job.init).is_file():
        raise JobError(f"Job.init is {job.init!r}: there is no such file on this machine")


_LEAST = {"global_batch": 1, "micro_batch": 1, "steps": 0, "threads": 1, "evaluate_every": 0, "seed": 0}
"""Whole numbers, each with the smallest that makes sense."""


def _whole(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < _LEAST[field]:
        raise JobError(f"Job.{field} is {value!r}: use a whole number of at least {_LEAST[field]}")


def _indivisible(batch: int, micro: int) -> str:
    fits = [m for m in range(1, batch + 1) if batch % m == 0]
    nearest = min(fits, key=lambda m: (abs(m - micro), m))
    return (
        f"Job.global_batch is {batch}, not divisible by Job.micro_batch {micro}: "
        f"use micro_batch={nearest}, or global_batch={max(1, round(batch / micro)) * micro}"
    )


def _layers(layers: object) -> None:
    if not isinstance(layers, Sequence):
        raise JobError(f"Job.layers is a {type(layers).__name__}: pass a list of modules or factories, as list(model)")
    if not layers:
        raise JobError("Job.layers is empty: pass at least one module or factory")
    for index, layer in enumerate(layers):
        if not callable(layer):
            raise JobError(f"Job.layers[{index}] is {layer!r}: use a module, or a function that returns one")
    modules = [id(layer) for layer in layers if _is_module(layer)]
    if len(set(modules)) != len(modules):
        raise JobError(
            "Job.layers holds one module twice: pass a factory for each layer, and name shared parameters in Job.tied"
        )


def _is_module(layer: object) -> bool:
    return hasattr(layer, "named_parameters") and not isinstance(layer, type)


def _parameters(layers: Sequence[Any], tied: Sequence[Sequence[str]]) -> None:
    """Of layers that are modules: nodes compute with copies, which know neither each other nor what hung on them."""
    groups = {name: number for number, group in enumerate(tied) for name in group}
    first: dict[int, str] = {}
    for index, layer in enumerate(layers):
        for own, parameter in layer.named_parameters() if _is_module(layer) else ():
            name = f"{index}.{own}"
            other = first.setdefault(id(parameter), name)
            if other != name and groups.get(other, other) != groups.get(name, name):
                raise JobError(
                    f"Job.layers has one parameter as {other!r} and {name!r}: add ({other!r}, {name!r}) to Job.tied"
                )
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise JobError(
                    f"Job.layers[{index}] has a hook on its parameter {own!r}, which copies of the module lack: "
                    "pass a function that makes the layer with its hook"
                )


def _data(field: str, data: object) -> None:
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise JobError(f"Job.{field} is a {type(data).__name__}: use a map-style data set with len() and [i]")
    if len(data) == 0:
        raise JobError(f"Job.{field} is empty: it needs at least one item")


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise JobError(f"Job.{field} is {value!r}: use one of {', '.join(allowed)}")


def _tied(groups: Sequence[Sequence[str]], layers: int) -> None:
    seen: set[str] = set()
    for group in groups:
        if isinstance(group, str) or len(group) < 2:
            raise JobError(
                f"Job.tied has {group!r}: a group names at least two parameters, like ('0.weight', '13.weight')"
            )
        for name in group:
            index, dot, rest = name.partition(".")
            if not (dot and rest and index.isdigit() and int(index) < layers):
                raise JobError(
                    f"Job.tied has {name!r}: write 'layer index . parameter name' with an index below {layers}"
                )
            if name in seen:
                raise JobError(f"Job.tied names {name!r} twice: join the groups into one")
            seen.add(name)


MODULES = "culm_job_"
"""What the names of modules begin with that were made of job files."""


def load(reference: str, overrides: Mapping[str, str] | None = None) -> Job:
    """The job that `FILE[:function]` describes, with fields replaced by `--set field=value`."""
    job = call(reference)
    return override(job, overrides or {})


def call(reference: str) -> Job:
    """Import the file, call the function and insist on a Job."""
    path, _, name = reference.partition(":")
    name = name or "job"
    found = module(path)
    function = getattr(found, name, None)
    if function is None:
        raise JobError(f"{path} has no function {name!r}{_did_you_mean(name, _functions(found))}")
    made = _called(f"{path}:{name}", function) if callable(function) else function
    if not isinstance(made, Job):
        kind = type(made).__name__
        raise JobError(f"{path}:{name} returned a value of type {kind}, not a culm.Job: return culm.Job(...)")
    return made


def _functions(found: Any) -> list[str]:
    """What the file itself defines, without what it imported."""
    own = {n: v for n, v in vars(found).items() if callable(v) and getattr(v, "__module__", "") == found.__name__}
    return [name for name in own if not name.startswith("_")]


def _called(label: str, function: Callable[[], object]) -> object:
    try:
        return function()
    except JobError:
        raise
    except RAISED as error:
        raise JobError(f"{label} raised {type(error).__name__}{said(error)}") from error


def locate(reference: str) -> Path:
    """The file of `FILE[:function]`, which must be there; nothing is imported."""
    path = reference.partition(":")[0]
    file = Path(path).resolve()
    if not file.is_file():
        raise JobError(f"there is no job file {path!r}: give a Python file, as in 'culm run examples/gpt.py'")
    return file


def home(file: Path) -> Path:
    """The folder that a file's imports start from: above its outermost package, or its own where it is in none."""
    return next(folder for folder in file.parents if not (folder / "__init__.py").is_file())


def module(path: str) -> Any:
    """The module of a job file, imported once, so that the classes in it have one identity: under its name in its
    package, where it is in one, else under its stem."""
    file = locate(path)
    spec = _spec(file)
    if spec is None or spec.loader is None:
        raise JobError(f"{path!r} is not a Python file: a job file ends in .py")
    loaded = sys.modules.get(spec.name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    sys.path[:0] = dict.fromkeys((str(home(file)), str(file.parent)))
    try:
        if spec.parent:
            return importlib.import_module(spec.name)
        loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    except RAISED as error:
        sys.modules.pop(spec.name, None)
        if isinstance(error, JobError):
            raise
        raise JobError(f"{path} could not be imported: {type(error).__name__}{said(error)}") from error
    return loaded


def _spec(file: Path) -> ModuleSpec | None:
    """As part of its package, unless another package of that name is here already: then the file is taken alone."""
    *packages, name = file.relative_to(home(file)).with_suffix("").parts
    if packages and name != "__init__" and _ours(home(file) / packages[0]):
        return importlib.util.spec_from_file_location(".".join((*packages, name)), file)
    return importlib.util.spec_from_file_location(f"{MODULES}{file.stem}", file)


def _ours(package: Path) -> bool:
    known = sys.modules.get(package.name)
    return known is None or str(package) in map(str, getattr(known, "__path__", ()))


_SETTABLE = {
    f.name: f.type
    for f in dataclasses.fields(Job)
    if f.name not in ("layers", "loss", "optimizer", "data", "lr_schedule", "tied", "collate", "evaluate", "on_step")
}


def override(job: Job, values: Mapping[str, str]) -> Job:
    """A copy of the job with fields replaced, each parsed by the type of the field."""
    changes = parse(values)
    return dataclasses.replace(job, **changes) if changes else job


def parse(values: Mapping[str, str]) -> dict[str, Any]:
    """The values of `--set field=value`. Raises JobError for a field that is not there, a value of a wrong type, or a
    number that no job has."""
    found = {name: _parse(name, text) for name, text in values.items()}
    for field in _LEAST.keys() & found.keys():
        _whole(field, found[field])
    return found


_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number"}


def _parse(name: str, text: str) -> Any:
    if name not in _SETTABLE:
        raise JobError(f"--set {name}={text}: no such field{_did_you_mean(name, _SETTABLE)}")
    kind = str(_SETTABLE[name])
    if text.lower() == "none" and "None" in kind:
        return None
    try:
        if kind.startswith("bool"):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except (KeyError, ValueError):
        words = _WORDS[kind.partition(" ")[0]]
        raise JobError(f"--set {name}={text}: the field {name} takes {words}, not {text!r}") from None
    return text


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {close[0]!r}?" if close else f": it has {', '.join(names) or 'none'}"
