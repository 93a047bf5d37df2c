"""The Job: what is trained. Imports no torch, and checks what can be checked without running the layers."""

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
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias, get_args, overload

from culm.data.stream import Stream
from culm.errors import USER_EXCEPTIONS, JobError, message_suffix
from culm.initial_location import locate_initial
from culm.metric import MetricDeclaration, declared_metrics
from culm.monitor import EarlyStop, EvaluationInterval, Monitor, to_monitor
from culm.text_format import parse_seconds

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    import torch
    from torch import Tensor, nn

    from culm.observe.step_metrics import StepMetrics

Precision: TypeAlias = Literal["fp32", "bf16"]
NonFinite: TypeAlias = Literal["stop", "skip"]
Layer: TypeAlias = "nn.Module | Callable[[], nn.Module]"
Loss: TypeAlias = "Callable[[Any, Any], Tensor | tuple[Tensor, Any]]"
OptimizerFactory: TypeAlias = "Callable[[Any], torch.optim.Optimizer]"
"""From the `LayerParameters` of a layer, which are a list of parameters, to its optimizer."""
LrSchedule: TypeAlias = Callable[[Any], Any]
"""step -> factor, or optimizer -> torch.optim.lr_scheduler.LRScheduler."""
StepHook: TypeAlias = "Callable[[StepMetrics], object]"
EventHook: TypeAlias = Callable[[Mapping[str, Any]], object]


class Dataset(Protocol):
    """A map-style data set: len() and items by index. An item is (input, target)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class _Layers:
    """The field Job.layers: assigned any iterable of layers, read as a tuple."""

    @overload
    def __get__(self, job: None, owner: type[Job]) -> NoReturn: ...
    @overload
    def __get__(self, job: Job, owner: type[Job]) -> tuple[Layer, ...]: ...
    def __get__(self, job: Job | None, owner: type[Job]) -> tuple[Layer, ...]:
        if job is None:
            raise AttributeError("layers")  # a dataclass reads it as: there is no default
        layers: tuple[Layer, ...] = job.__dict__["layers"]
        return layers

    def __set__(self, job: Job, layers: Iterable[Layer]) -> None:
        job.__dict__["layers"] = _layer_tuple(layers)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained: layers, loss, optimizer, data and batch size. A RunConfig says how.

    A step consists of M = global_batch / micro_batch micro-batches, which are distributed over all pipelines.

    Raises JobError for a wrong field, with a sentence that names the field, the value and the fix.
    """

    layers: _Layers = _Layers()
    """An nn.Sequential, or any iterable of modules or zero-argument factories (preferred: a node builds only the layers
    that it holds). Stored as a tuple."""
    loss: Loss
    """(output, target) -> a scalar mean over the micro-batch, or (sum, weight)."""
    optimizer: OptimizerFactory
    """Called once per layer with its parameters, so that a layer can move with its own optimizer state. They are a list
    that also knows their names: `parameters.named`, and `parameters.groups(weight_decay=0.1)` for weight decay."""
    data: Any
    """A map-style data set (`Dataset`), or an iterable (`culm.data.Stream`), which is read in its own order."""
    global_batch: int
    micro_batch: int
    steps: int
    seed: int = 0
    lr_schedule: LrSchedule | None = None
    """step -> factor on the optimizer's learning rate, or optimizer -> one of torch's schedulers that are functions of
    the step. Not a scheduler object, which cannot move to a node."""
    clip_norm: float | None = None
    clip_value: float | None = None
    """Clip every element of the gradient to this absolute value, after `clip_norm`."""
    ema: float | None = None
    """Keep an exponential moving average of the weights: average = ema * average + (1 - ema) * weights after every
    step. It is in checkpoints; `culm export --ema` writes it."""
    precision: Precision = "fp32"
    """bf16 means autocast: parameters, gradients and optimizer state stay fp32."""
    recompute: bool = False
    """Activation checkpointing: keep only the inputs of layers, and run their forward again in the backward."""
    tied: Sequence[Sequence[str]] = ()
    """Groups of shared parameters, each named "layer index . parameter name": [("0.weight", "13.weight")]."""
    exact: bool = False
    """Compute the same bits for any number of pipelines, and through any loss of nodes."""
    threads: int = 1
    """Threads per worker. Exact results depend on it: sums over 1 and 2 threads differ."""
    init: str | None = None
    """Named tensors ("0.weight") to start from: a safetensors file, a folder of them, a model in the local cache of
    Hugging Face, or a URL. A node reads only the tensors of its layers."""
    collate: Callable[[list[Any]], Any] | None = None
    evaluate: Dataset | None = None
    evaluate_every: int | str = 0
    """Steps between two evaluations, or the time from one to the next: "90s", "10min", "2h". The leader then chooses
    the step, and every worker evaluates after that step."""
    evaluate_ema: bool = False
    """Evaluate with the averaged weights of `ema` instead of the current ones."""
    early_stop: EarlyStop | None = None
    """End the run when evaluations stop improving."""
    keep_best: str | Monitor | None = None
    """Keep the checkpoint with the best evaluation, whatever its age: "eval_loss" (smallest), or a `culm.Monitor` of a
    value of Job.metrics. Every evaluation then writes a checkpoint, if the run has a folder."""
    loaders: int = 0
    """Processes per worker that load micro-batches in advance; 0: the worker loads them itself while it waits."""
    loader_timeout: float = 120.0
    """Seconds after which a micro-batch that a loader has not delivered is an error."""
    compile: bool | Mapping[str, Any] = False
    """Compile every layer with torch.compile: True, or its keyword arguments, as in {"mode": "max-autotune"}."""
    on_step: StepHook | None = None
    """Called after every committed step with its `StepMetrics`. It may return `culm.STOP`, which ends the run there,
    a mapping of named values to add to the step, or (mapping, STOP)."""
    on_evaluate: EventHook | None = None
    """Called after every evaluation with its event: step, loss and the values of Job.metrics."""
    on_checkpoint: EventHook | None = None
    """Called after every checkpoint with its event: step, path and bytes. Text samples are made here."""
    on_node_lost: EventHook | None = None
    """Called for every lost node with its event: node and the reason."""
    metrics: Mapping[str, MetricDeclaration] = dataclasses.field(default_factory=dict)
    """Named values of every step, by name: a function (output, target) -> scalar whose mean is taken, a
    `culm.Metric(function, reduce="mean"|"sum"|"max")`, or a reduction alone for a value that the loss records with
    `culm.record(name, value)`."""
    nonfinite: NonFinite = "stop"
    """What happens on a NaN or infinite loss: stop the run, or skip the step without an update."""
    device: str = "auto"
    """Device of the workers: auto (cuda if available), cpu or cuda."""
    save_frozen: bool = True
    """False: parameters that are not trained are left out of checkpoints. A resumed run takes them from the layers."""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Files that describe the model, by name. They are written next to the checkpoints; `culm export --hf` needs
    those of `culm.hf.parts`."""

    def __new__(cls, **fields: Any) -> Job:
        """Check the names of the fields: a copy is made without any."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise JobError(f"culm.Job got {name}=...: no such field{_did_you_mean(name, known)}")
        missing = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory and f.name not in fields]
        if fields and missing:
            raise JobError(f"culm.Job needs {', '.join(missing)}: docs/job.md describes the fields")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if isinstance(self.data, Stream) or _is_iterable_only(self.data):
            stream = self.data if isinstance(self.data, Stream) else Stream(self.data)
            object.__setattr__(self, "data", stream.with_block(self.global_batch))
        check_job(self)

    @property
    def evaluation_interval(self) -> EvaluationInterval:
        """`evaluate_every` as a number of steps or of seconds."""
        every = self.evaluate_every
        return (
            EvaluationInterval(every) if isinstance(every, int) else EvaluationInterval(0, parse_seconds(every) or 0.0)
        )

    @property
    def micro_batches(self) -> int:
        """M: micro-batches of one step, over all pipelines."""
        return self.global_batch // self.micro_batch


class _Stop:
    def __repr__(self) -> str:
        return "culm.STOP"


STOP = _Stop()
"""Returned by an on_step hook to end the run after the current step."""


def check_job(job: Job) -> None:
    """Raise JobError for a wrong field. `culm.runtime.compute.model_check` checks the layers by running them."""
    for field in _MINIMUM:
        _check_whole_number(field, getattr(job, field))
    for field in _SWITCHES:
        if not isinstance(getattr(job, field), bool):
            raise JobError(f"Job.{field} is {getattr(job, field)!r}: use True or False")
    if job.global_batch % job.micro_batch:
        raise JobError(_indivisible_message(job.global_batch, job.micro_batch))
    _check_layers(job.layers)
    if hasattr(job.optimizer, "param_groups"):
        kind = type(job.optimizer).__name__
        raise JobError(
            f"Job.optimizer is an object of class {kind}, which has its parameters already: pass a function that makes "
            f"one for each layer, as in optimizer=lambda parameters: torch.optim.{kind}(parameters, lr=1e-3)"
        )
    for field in ("loss", "optimizer"):
        if not callable(getattr(job, field)):
            raise JobError(f"Job.{field} is {getattr(job, field)!r}, not callable: pass a function")
    if isinstance(job.loss, type):
        kind = job.loss.__name__
        raise JobError(f"Job.loss is the class {kind}: make an object of it, as in loss={kind}()")
    _check_scheduler_object(job.lr_schedule)
    for field in ("lr_schedule", "collate", *HOOKS):
        value = getattr(job, field)
        if value is not None and not callable(value):
            raise JobError(f"Job.{field} is {value!r}, not callable: pass a function or None")
    _check_data_fields(job)
    _check_one_of("precision", job.precision, get_args(Precision))
    _check_one_of("nonfinite", job.nonfinite, get_args(NonFinite))
    if job.device.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise JobError(f"Job.device is {job.device!r}: use auto, cpu or cuda")
    _check_loop_fields(job)
    declared_metrics(job.metrics)
    _check_monitors(job)
    _check_tied(job.tied, len(job.layers))
    _check_parameters(job.layers, job.tied)
    if job.init is not None:
        locate_initial(job.init)


HOOKS = ("on_step", "on_evaluate", "on_checkpoint", "on_node_lost")
"""Fields with functions that culm calls when something has happened."""


def _check_data_fields(job: Job) -> None:
    _check_dataset("data", job.data)
    if job.collate is None and isinstance(job.data, Stream):
        job.data.check_items_single()
    if job.loaders and isinstance(job.data, Stream):
        raise JobError(
            f"Job.loaders is {job.loaders}, but Job.data is a stream, which is read in order by one reader: use "
            "loaders=0, and load ahead in the stream itself"
        )
    if job.evaluate is not None:
        _check_dataset("evaluate", job.evaluate)
    _check_evaluate_every(job.evaluate_every)
    if job.evaluate_every and job.evaluate is None:
        raise JobError("Job.evaluate_every is set but Job.evaluate is None: pass the data set to evaluate on")


def _check_evaluate_every(every: object) -> None:
    is_steps = isinstance(every, int) and not isinstance(every, bool) and every >= 0
    if not is_steps and not (isinstance(every, str) and parse_seconds(every)):
        raise JobError(
            f'Job.evaluate_every is {every!r}: use a whole number of steps, or a time such as "90s", "10min" or "2h"'
        )


def _check_loop_fields(job: Job) -> None:
    for field in ("clip_norm", "clip_value"):
        _check_limit(field, getattr(job, field))
    if not (isinstance(job.loader_timeout, int | float) and job.loader_timeout > 0):
        raise JobError(f"Job.loader_timeout is {job.loader_timeout!r}: use a number of seconds above 0")
    if job.ema is not None and not (isinstance(job.ema, int | float) and 0 < job.ema < 1):
        raise JobError(f"Job.ema is {job.ema!r}: use a number between 0 and 1, such as 0.999, or None")
    if job.evaluate_ema and job.ema is None:
        raise JobError("Job.evaluate_ema is set but Job.ema is None: set ema=0.999 to average the weights")
    if not isinstance(job.compile, bool | Mapping):
        raise JobError(f"Job.compile is {job.compile!r}: use True, or a dict of torch.compile's keyword arguments")


def _check_limit(field: str, value: object) -> None:
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise JobError(f"Job.{field} is {value!r}: use a number above 0, or None for no clipping")


def _check_scheduler_object(schedule: object) -> None:
    name = type(schedule).__name__
    if type(schedule).__module__ == "torch.optim.lr_scheduler":
        raise JobError(
            f"Job.lr_schedule is a {name}, which belongs to one optimizer, and every layer has its own: pass a "
            f"function that makes it, as in lr_schedule=lambda optimizer: {name}(optimizer, ...)"
        )


def _check_monitors(job: Job) -> None:
    for field, value in (("early_stop", job.early_stop), ("keep_best", job.keep_best)):
        if value is None:
            continue
        kind = EarlyStop if field == "early_stop" else Monitor
        if not isinstance(value, kind | str if field == "keep_best" else kind):
            raise JobError(f"Job.{field} is {value!r}: use a culm.{kind.__name__}, or None")
        if not job.evaluate_every:
            raise JobError(f"Job.{field} is set but Job.evaluate_every is 0: set evaluate= and evaluate_every=")
        monitor = to_monitor(value)
        known = ("eval_loss", *(f"eval_{name}" for name in job.metrics))
        if monitor.name not in known:
            raise JobError(
                f"Job.{field} names {monitor.name!r}, which no evaluation has: use one of {', '.join(known)}"
            )


_MINIMUM = {"loaders": 0, "global_batch": 1, "micro_batch": 1, "steps": 0, "threads": 1, "seed": 0}
"""Fields that are whole numbers, with their smallest value."""


_SWITCHES = ("recompute", "exact", "evaluate_ema", "save_frozen")


def _check_whole_number(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < _MINIMUM[field]:
        raise JobError(f"Job.{field} is {value!r}: use a whole number of at least {_MINIMUM[field]}")


def _indivisible_message(batch: int, micro: int) -> str:
    fits = [m for m in range(1, batch + 1) if batch % m == 0]
    nearest = min(fits, key=lambda m: (abs(m - micro), m))
    return (
        f"Job.global_batch is {batch}, not divisible by Job.micro_batch {micro}: "
        f"use micro_batch={nearest}, or global_batch={max(1, round(batch / micro)) * micro}"
    )


def _layer_tuple(layers: object) -> tuple[Any, ...]:
    """The layers of any iterable, which is read once. Raises JobError for a module whose layers are not its items."""
    if _is_module(layers):
        _check_container(layers)
    if isinstance(layers, type):
        raise JobError(
            f"Job.layers is the class {layers.__name__}: make an object of it and list its layers, as in "
            "layers=[model.embed, *model.blocks, model.head]"
        )
    if not isinstance(layers, Iterable):
        raise JobError(
            f"Job.layers is a {type(layers).__name__}, which has no order of layers: list them, as in "
            "layers=[model.embed, *model.blocks, model.head]"
        )
    return tuple(layers)


def _check_container(module: Any) -> None:
    """A module is a list of layers if it only calls its items in order, as nn.Sequential and nn.ModuleList do."""
    from torch import nn  # imported already: there is a module

    if hasattr(module, "save_pretrained"):
        raise JobError(
            f"Job.layers is a {type(module).__name__} of transformers, and not its layers in order: use "
            "culm.Job(**culm.hf.parts(model), ...), which cuts it"
        )
    if not isinstance(module, nn.Sequential | nn.ModuleList):
        raise JobError(
            f"Job.layers is a {type(module).__name__}, and not its layers in order: list them, as in "
            "layers=[model.embed, *model.blocks, model.head], or pass an nn.Sequential"
        )
    own = type(module).forward not in (nn.Sequential.forward, nn.ModuleList.forward)
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if own or any(hooks) or module._parameters or module._buffers:
        raise JobError(
            f"Job.layers is a {type(module).__name__} with a forward, hooks or parameters of its own, which its layers "
            "lack: pass its layers, as in layers=list(model), and make the rest a layer"
        )


def _check_layers(layers: Sequence[Any]) -> None:
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


def _check_parameters(layers: Sequence[Any], tied: Sequence[Sequence[str]]) -> None:
    """Check layers that are modules. Nodes train copies of them: shared parameters and hooks are not copied."""
    groups = {name: number for number, group in enumerate(tied) for name in group}
    first: dict[int, str] = {}
    for index, layer in enumerate(layers):
        for own, parameter in layer.named_parameters() if _is_module(layer) else ():
            name = f"{index}.{own}"
            other = first.setdefault(id(parameter), name)
            if other != name and groups.get(other, other) != groups.get(name, name):
                raise JobError(
                    f"Job.layers has the same parameter as {other!r} and as {name!r}: "
                    f"add ({other!r}, {name!r}) to Job.tied"
                )
            if parameter.is_meta:
                raise JobError(
                    f"Job.layers[{index}] has its parameter {own!r} on the meta device, without values: load it first, "
                    "or pass a function that makes the layer"
                )
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise JobError(
                    f"Job.layers[{index}] has a hook on its parameter {own!r}, which copies of the module lack: "
                    "pass a function that makes the layer with its hook"
                )


def _is_iterable_only(data: object) -> bool:
    """Whether a data set has no items by index. torch's IterableDataset may have a length, and inherits [i]."""
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    iterable_class = any(cls.__name__ == "IterableDataset" for cls in type(data).__mro__)
    return hasattr(data, "__iter__") and (iterable_class or not indexed)


def _check_dataset(field: str, data: object) -> None:
    if isinstance(data, Stream):
        return
    if isinstance(data, str | bytes | Path):
        raise JobError(
            f"Job.{field} is {data!r}, a {type(data).__name__} and not a data set: use culm.data, as in "
            'culm.data.Jsonl("train.jsonl", to_item)'
        )
    if data is None:
        raise JobError(f"Job.{field} is None: pass a data set with len() and [i], or an iterable")
    if _is_iterable_only(data):
        raise JobError(
            f"Job.{field} is a {type(data).__name__}, which has no items by index: pass a list of some of its items"
        )
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise JobError(f"Job.{field} is a {type(data).__name__}: use a map-style data set with len() and [i]")
    if len(data) == 0:
        raise JobError(f"Job.{field} is empty: it needs at least one item")


def _check_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise JobError(f"Job.{field} is {value!r}: use one of {', '.join(allowed)}")


def _check_tied(groups: Sequence[Sequence[str]], layers: int) -> None:
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


JOB_MODULE_PREFIX = "culm_job_"
"""Prefix of the module names of job files."""


def load_job(reference: str, overrides: Mapping[str, str] | None = None) -> Job:
    """The job of `FILE[:function]`, with fields replaced as by `--set field=value`."""
    job = call_job_function(reference)
    return override_fields(job, overrides or {})


def call_job_function(reference: str) -> Job:
    """Import the file and call the function. Raises JobError unless it returns a Job."""
    path, _, name = reference.partition(":")
    name = name or "job"
    found = import_job_file(path)
    function = getattr(found, name, None)
    if function is None:
        raise JobError(f"{path} has no function {name!r}{_did_you_mean(name, _public_functions(found))}")
    returned = _call_function(f"{path}:{name}", function) if callable(function) else function
    if not isinstance(returned, Job):
        kind = type(returned).__name__
        raise JobError(f"{path}:{name} returned a value of type {kind}, not a culm.Job: return culm.Job(...)")
    return returned


def _public_functions(found: Any) -> list[str]:
    """Names of public functions that the file defines itself."""
    own = {n: v for n, v in vars(found).items() if callable(v) and getattr(v, "__module__", "") == found.__name__}
    return [name for name in own if not name.startswith("_")]


def _call_function(label: str, function: Callable[[], object]) -> object:
    try:
        return function()
    except JobError:
        raise
    except USER_EXCEPTIONS as error:
        raise JobError(f"{label} raised {type(error).__name__}{message_suffix(error)}") from error


def find_job_file(reference: str) -> Path:
    """The path of `FILE[:function]`. Raises JobError if there is no such file; nothing is imported."""
    path = reference.partition(":")[0]
    file = Path(path).resolve()
    if not file.is_file():
        raise JobError(f"there is no job file {path!r}: give a Python file, as in 'culm run examples/gpt.py'")
    return file


def absolute_reference(reference: str) -> str:
    """`FILE[:function]` with the absolute path of the file; empty if the reference is empty."""
    path, colon, function = reference.partition(":")
    return f"{Path(path).resolve()}{colon}{function}" if path else ""


def import_root(file: Path) -> Path:
    """The folder that has to be in sys.path for a file: above its outermost package, or its own if it is in none."""
    return next(folder for folder in file.parents if not (folder / "__init__.py").is_file())


def import_job_file(path: str) -> Any:
    """The module of a job file. It is imported once, so that its classes have one identity: under its name in its
    package if it is in one, else under its stem."""
    file = find_job_file(path)
    spec = _module_spec(file)
    if spec is None or spec.loader is None:
        raise JobError(f"{path!r} is not a Python file: a job file ends in .py")
    loaded = sys.modules.get(spec.name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(file):
        return loaded
    sys.path[:0] = dict.fromkeys((str(import_root(file)), str(file.parent)))
    try:
        if spec.parent:
            return importlib.import_module(spec.name)
        loaded = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    except USER_EXCEPTIONS as error:
        sys.modules.pop(spec.name, None)
        if isinstance(error, JobError):
            raise
        raise JobError(f"{path} could not be imported: {type(error).__name__}{message_suffix(error)}") from error
    return loaded


def _module_spec(file: Path) -> ModuleSpec | None:
    """The file as part of its package; as a module of its own if another package of that name is already imported."""
    *packages, name = file.relative_to(import_root(file)).with_suffix("").parts
    if packages and name != "__init__" and _is_importable_package(import_root(file) / packages[0]):
        return importlib.util.spec_from_file_location(".".join((*packages, name)), file)
    return importlib.util.spec_from_file_location(f"{JOB_MODULE_PREFIX}{file.stem}", file)


def _is_importable_package(package: Path) -> bool:
    known = sys.modules.get(package.name)
    return known is None or str(package) in map(str, getattr(known, "__path__", ()))


_NOT_SETTABLE = (
    *("layers", "loss", "optimizer", "data", "lr_schedule", "tied", "collate", "evaluate", "metrics"),
    *("files", "early_stop", "keep_best", "compile", *HOOKS),
)
_SETTABLE = {f.name: f.type for f in dataclasses.fields(Job) if f.name not in _NOT_SETTABLE}


def override_fields(job: Job, values: Mapping[str, str]) -> Job:
    """A copy of the job with fields replaced, each parsed by the type of the field."""
    changes = parse_overrides(values)
    return dataclasses.replace(job, **changes) if changes else job


def parse_overrides(values: Mapping[str, str]) -> dict[str, Any]:
    """The values of `--set field=value`. Raises JobError for an unknown field, a value of a wrong type or a number
    that is too small."""
    found = {name: _parse_value(name, text) for name, text in values.items()}
    for field in _MINIMUM.keys() & found.keys():
        _check_whole_number(field, found[field])
    return found


def override_texts(values: Mapping[str, object]) -> dict[str, str]:
    """Replaced fields as the texts of `--set field=value`, for a job that other processes import from its file.

    Raises JobError for a field that has no such text, such as a function.
    """
    for name, value in values.items():
        if name in _NOT_SETTABLE or not isinstance(value, bool | int | float | str | None):
            raise JobError(
                f"overrides has {name}={value!r}, which cannot be passed to a job that is imported from a file: use "
                f"numbers, strings or None for one of {', '.join(_SETTABLE)}, or pass a Job instead of its file"
            )
    texts = {name: str(value) for name, value in values.items()}
    parse_overrides(texts)
    return texts


def replace_fields(job: Job, values: Mapping[str, object]) -> Job:
    """A copy of the job with other values in these fields. Raises JobError for an unknown field or a wrong value."""
    known = [field.name for field in dataclasses.fields(Job)]
    for name in values:
        if name not in known:
            raise JobError(f"overrides has {name!r}: no such field of a Job{_did_you_mean(name, known)}")
    return dataclasses.replace(job, **values) if values else job  # type: ignore[arg-type]


_TYPE_DESCRIPTIONS = {"bool": "true or false", "int": "a whole number", "float": "a number"}


def _parse_value(name: str, text: str) -> Any:
    if name not in _SETTABLE:
        raise JobError(f"--set {name}={text}: no such field{_did_you_mean(name, _SETTABLE)}")
    kind = str(_SETTABLE[name])
    if text.lower() == "none" and "None" in kind:
        return None
    try:
        if kind.startswith("bool"):
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        if kind.startswith("int | str") and not text.isdecimal():
            return text
        if kind.startswith("int"):
            return int(text)
        if kind.startswith("float"):
            return float(text)
    except (KeyError, ValueError):
        words = _TYPE_DESCRIPTIONS[kind.partition(" ")[0]]
        raise JobError(f"--set {name}={text}: the field {name} takes {words}, not {text!r}") from None
    return text


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {close[0]!r}?" if close else f": it has {', '.join(names) or 'none'}"
