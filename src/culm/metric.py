"""Named values of a step that a job declares in `Job.metrics`, and `culm.record`. Imports no torch.

Every replica must agree on the layout of the vector that carries the values through the reduction, so all names are
declared in the Job: by a function of the output and target, or by a reduction alone for a value that the loss records.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from culm.errors import JobError

Reduction: TypeAlias = Literal["mean", "sum", "max"]
MetricFunction: TypeAlias = Callable[[Any, Any], Any]
RESERVED_NAMES = frozenset(
    ("step", "loss", "samples", "t", "norm", "eval_loss", "skipped", "samples_lost", "samples_duplicated", "values")
)
"""Keys that culm itself writes into a line of steps.jsonl: no named value may have one of them."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


@dataclass(frozen=True)
class Metric:
    """A named value: how it is computed for one micro-batch, and how the micro-batches of a step are combined."""

    function: MetricFunction | None
    """(output, target) -> a scalar, called on the last stage without autograd. None: Job.loss calls culm.record."""
    reduce: Reduction = "mean"
    """mean (weighted as the loss is: by its weights, else each micro-batch alike), sum or max."""
    transform: Callable[[float], float] | None = None
    """Applied to the reduced value: math.exp turns a mean loss into a perplexity."""

    def __post_init__(self) -> None:
        if self.function is not None and not callable(self.function):
            raise JobError(
                f"culm.Metric has function={self.function!r}, not callable: pass a function (output, target) -> scalar"
            )
        if self.transform is not None and not callable(self.transform):
            raise JobError(f"culm.Metric has transform={self.transform!r}, not callable: pass a function of one number")
        if self.reduce not in get_args(Reduction):
            raise JobError(f"culm.Metric has reduce={self.reduce!r}: use one of {', '.join(get_args(Reduction))}")


MetricDeclaration: TypeAlias = Metric | MetricFunction | Reduction
"""What Job.metrics holds: a Metric, a function (reduction mean), or the reduction of a value that the loss records."""


def declared_metrics(declarations: Mapping[str, MetricDeclaration]) -> dict[str, Metric]:
    """The metrics of a job by name, in the order in which they are declared.

    Raises JobError for a name that is malformed or reserved, and for a declaration of the wrong type.
    """
    if not isinstance(declarations, Mapping):
        raise JobError(
            f"Job.metrics is a {type(declarations).__name__}: pass a dict from names to functions, culm.Metric or "
            "reductions"
        )
    for name in declarations:
        check_name(name, "Job.metrics")
    return {name: _to_metric(name, declaration) for name, declaration in declarations.items()}


def check_name(name: object, where: str) -> None:
    """Raise JobError unless a value may have this name. `where` is the field or function that names it."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise JobError(
            f"{where} names a value {name!r}: use a string of letters, digits, '_', '.', '/' and '-' that begins with "
            "a letter"
        )
    if name in RESERVED_NAMES:
        raise JobError(f"{where} names a value {name!r}, which every step has already: use another, as 'my_{name}'")


def _to_metric(name: str, declaration: object) -> Metric:
    if isinstance(declaration, Metric):
        return declaration
    if declaration in get_args(Reduction):
        return Metric(None, declaration)  # type: ignore[arg-type]
    if callable(declaration):
        return Metric(declaration)
    raise JobError(
        f"Job.metrics[{name!r}] is {declaration!r}: use a function (output, target) -> scalar, culm.Metric(function, "
        f"reduce=...), or one of {', '.join(get_args(Reduction))} for a value that the loss records"
    )


class RecordedValues:
    """The values that the loss records for one micro-batch. `declared` are the names that it may and must record."""

    def __init__(self, declared: Sequence[str]) -> None:
        self.declared = declared
        self.values: dict[str, Any] = {}

    def add(self, name: str, value: object) -> None:
        """Raises JobError for a name that is not declared, or recorded already."""
        if name not in self.declared:
            raise JobError(
                f"the loss records {name!r}, which Job.metrics does not declare: add metrics={{{name!r}: 'mean'}} (or "
                "'sum' or 'max') to the Job"
            )
        if name in self.values:
            raise JobError(f"the loss records {name!r} twice for one micro-batch: call culm.record({name!r}, ...) once")
        self.values[name] = value

    def check_complete(self) -> None:
        """Raises JobError if a declared value is missing."""
        missing = [name for name in self.declared if name not in self.values]
        if missing:
            raise JobError(
                f"Job.metrics declares {missing[0]!r}, which the loss did not record: call culm.record({missing[0]!r}, "
                "value) in Job.loss for every micro-batch, or declare a function (output, target) -> scalar"
            )


class _LayersRecordNothing(RecordedValues):
    """Refuses values that a layer records: only the loss runs where the values are collected."""

    def add(self, name: str, value: object) -> None:  # noqa: ARG002 the signature of the parent
        raise JobError(
            f"a layer calls culm.record({name!r}, ...): call it in Job.loss, or return the value to the loss"
        )


_collector: RecordedValues | None = None


def record(name: str, value: Any) -> None:
    """Record a named value of the micro-batch whose loss is being computed. Call it in `Job.loss`.

    `value` is a number or a tensor with one element; it is detached. The name and its reduction must be declared, as
    in `Job(metrics={"z_loss": "mean"})`. Outside of a run (a test of the loss by itself) it does nothing.
    """
    if _collector is not None:
        _collector.add(name, value.detach() if hasattr(value, "detach") else value)


@contextlib.contextmanager
def collecting(declared: Sequence[str]) -> Iterator[RecordedValues]:
    """Collect what `record` is called with inside of this block."""
    with _collecting_into(RecordedValues(declared)) as recorded:
        yield recorded


@contextlib.contextmanager
def refusing_records() -> Iterator[None]:
    """Raise JobError if `record` is called inside of this block: while a job's layers are checked."""
    with _collecting_into(_LayersRecordNothing(())):
        yield


@contextlib.contextmanager
def _collecting_into(recorded: RecordedValues) -> Iterator[RecordedValues]:
    global _collector  # noqa: PLW0603 the loss is a function of the user: nothing can be passed to it
    before, _collector = _collector, recorded
    try:
        yield recorded
    finally:
        _collector = before
