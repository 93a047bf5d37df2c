"""StepMetrics: the one value that describes a committed step, from the ledger to writers, hooks and pages. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from culm.errors import JobError
from culm.job import STOP
from culm.metric import check_name


class StepMetrics(msgspec.Struct, frozen=True):
    """A committed step: what every replica agrees on after the reduction.

    It reads like a mapping, too: `metrics["loss"]`, `metrics.get("norm")`, `dict(metrics)` and `"z_loss" in metrics`
    see the keys of a line of steps.jsonl, named values included.

    A new figure of culm itself is a named value, too: compute it in `build_step_report` (runtime/worker_reports.py) and
    add its name to `culm.metric.RESERVED_NAMES`. Files, pages and writers show every value in `values`.
    """

    step: int
    t: float = 0.0
    """Seconds from the start of the run to the commit."""
    loss: float | None = None
    samples: int = 0
    """Samples that were counted in this step."""
    norm: float | None = None
    """Norm of the gradient over all layers; None: the job neither clips nor skips."""
    eval_loss: float | None = None
    """Mean loss of the evaluation after this step; None: there was none."""
    skipped: bool = False
    """Whether the weights did not move, because the loss or a gradient was not finite."""
    samples_lost: int = 0
    samples_duplicated: int = 0
    values: dict[str, float] = {}
    """Named values: those of Job.metrics, and those that the on_step hook returned."""

    def to_fields(self) -> dict[str, Any]:
        """The step as a flat mapping: a line of steps.jsonl. Optional fields are left out at their defaults."""
        fields = {"step": self.step, "loss": self.loss, "samples": self.samples, "t": self.t}
        if self.norm is not None:
            fields["norm"] = self.norm
        if self.eval_loss is not None:
            fields["eval_loss"] = self.eval_loss
        for name in _RARE_FIELDS if self.skipped or self.samples_lost or self.samples_duplicated else ():
            if value := getattr(self, name):
                fields[name] = value
        return fields | self.values if self.values else fields

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> StepMetrics:
        """The step of a flat mapping. Numbers under other keys are named values; anything else there is ignored.

        Raises msgspec.ValidationError if a field has the wrong type.
        """
        known: dict[str, Any] = {}
        values: dict[str, float] = {}
        for name, value in fields.items():
            if name in _FLOAT_FIELDS:
                known[name] = _to_float(value)
            elif name in _FIELDS:
                known[name] = value
            elif (number := _to_float(value)) is not None:
                values[name] = number
        if values:
            known["values"] = values
        return msgspec.convert(known, cls)

    def with_values(self, values: Mapping[str, float]) -> StepMetrics:
        """A copy with more named values."""
        return msgspec.structs.replace(self, values={**self.values, **values}) if values else self

    def keys(self) -> Iterator[str]:
        return iter(self.to_fields())

    __iter__ = keys

    def __contains__(self, name: object) -> bool:
        return name in self.to_fields()

    def __getitem__(self, name: str) -> Any:
        return self.to_fields()[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.to_fields().get(name, default)


_FIELDS = frozenset(StepMetrics.__struct_fields__) - {"values"}
_FLOAT_FIELDS = {"loss", "norm", "eval_loss"}
_RARE_FIELDS = ("skipped", "samples_lost", "samples_duplicated")
"""Left out of a line while they are false or zero."""


def _to_float(value: object) -> Any:
    """A number of a line: "nan", "inf" and "-inf" stand for what JSON has no number for. None: it is not a number."""
    if type(value) is float or type(value) is int:
        return value
    return float(value) if value in ("nan", "inf", "-inf") else None


def read_hook_result(result: object, metrics: StepMetrics) -> tuple[dict[str, float], bool]:
    """What an on_step hook asks for: named values to add to the step, and whether the run ends after it.

    The hook returns STOP, a mapping of numbers, or (mapping, STOP); anything else means neither. Raises JobError for
    a value that is not a number, and for a name that the step has already.
    """
    parts = result if isinstance(result, tuple) and len(result) == 2 and result[1] is STOP else (result,)
    values: dict[str, float] = {}
    for name, value in parts[0].items() if isinstance(parts[0], Mapping) else ():
        check_name(name, "Job.on_step")
        if name in metrics.values:
            raise JobError(
                f"Job.on_step returned {name!r}, which Job.metrics declares: use another name for one of them"
            )
        values[name] = _hook_number(name, value)
    return values, parts[-1] is STOP


def _hook_number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise JobError(f"Job.on_step returned a {type(value).__name__} for {name!r}: return one number for each name")
