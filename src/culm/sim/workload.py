"""What is trained, as far as time and money are concerned: a shape, what its actions cost, how much state there is."""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from culm.errors import UsageError
from culm.plan import Case, Memory
from culm.schedule import Costs, Kind
from culm.schedule.timing import prices, sends


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step and the shape that it was planned for. Raises UsageError for numbers that make no sense."""

    name: str = "workload"
    pipelines: int
    """D: so many there are to begin with. Nodes beyond D x P stand by, unless a strategy makes more of them."""
    stages: int
    """P."""
    micro_batches: int
    """M: over all pipelines, whatever happens."""
    micro_batch: int = 1
    """Samples in each."""
    costs: Costs
    """Seconds, for one of P stages."""
    expected: Costs | None = None
    """What plans around holes are made with, where that is not what actions turn out to take."""
    state_bytes: float = 0.0
    """Parameters and optimizer state of the whole model: what a newcomer fetches its share of."""
    least_stages: int = 0
    """Fewer stages do not fit into the memory of a node; 0: as many as planned."""
    layers: int = 0
    """A model can be cut into so many equal parts; 0: anywhere."""
    memory: Memory = None
    schedule: str = ""
    """What is run while every slot is filled: 1f1b, zb or gpipe, as `culm run --schedule`; "": what the planner makes,
    with `split`, `stagger` and `memory`. Steps with holes are always the planner's."""
    split: bool = True
    stagger: bool = True
    steps: int = 0
    """Of the whole run: short before its end no change of shape pays any more; 0: it lasts as long as the trace."""
    instance: str = ""
    """What a node is, for its price."""

    def __post_init__(self) -> None:
        for name in ("pipelines", "stages", "micro_batches", "micro_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{self.name}: {name} is {getattr(self, name)}: use a whole number of at least 1")
        if self.pipelines > self.micro_batches:
            raise UsageError(
                f"{self.name}: pipelines is {self.pipelines}, but a step has {self.micro_batches} micro-batches: "
                f"use at most that many pipelines"
            )
        if self.schedule not in ("", "gpipe", "1f1b", "zb"):
            raise UsageError(f"{self.name}: schedule is {self.schedule!r}: use 1f1b, zb or gpipe, or leave it out")
        if not (math.isfinite(self.state_bytes) and self.state_bytes >= 0):
            raise UsageError(f"{self.name}: state_bytes is {self.state_bytes}: use a number of at least 0")
        if not self.total_s > 0:
            raise UsageError(f"{self.name}: a micro-batch takes no time: give forward, input and weight in seconds")

    @property
    def nodes(self) -> int:
        return self.pipelines * self.stages

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.micro_batches * self.micro_batch

    @property
    def fewest(self) -> int:
        """The fewest stages of a pipeline."""
        return self.least_stages or self.stages

    @cached_property
    def total_s(self) -> float:
        """One micro-batch through all stages, there and back."""
        price = prices(self.costs, self.stages)
        return sum(sum(price[kind]) for kind in (Kind.F, Kind.I, Kind.W))

    @cached_property
    def stage_s(self) -> float:
        """One micro-batch in a stage, on average."""
        return self.total_s / self.stages

    @cached_property
    def forward_share(self) -> float:
        return sum(prices(self.costs, self.stages)[Kind.F]) / self.total_s

    @cached_property
    def send_s(self) -> float:
        """Over a boundary between stages, on average."""
        each = sends(self.costs, self.stages)
        return sum(each) / len(each) if each else 0.0

    @cached_property
    def finish_s(self) -> float:
        """R and S of the slowest stage."""
        price = prices(self.costs, self.stages)
        return max(r + s for r, s in zip(price[Kind.R], price[Kind.S], strict=True))

    def case(self, pipelines: int) -> Case:
        """The step on so many pipelines, every slot filled."""
        return Case(
            pipelines=pipelines,
            stages=self.stages,
            micro_batches=self.micro_batches,
            costs=self.costs,
            split=self.split,
            stagger=self.stagger,
            memory=self.memory,
        )


_TIMES = ("forward", "input", "weight", "reduce", "step", "send")


def read_workload(path: str | Path) -> Workload:
    """A plan as a TOML file: the fields of `Workload`, and a table `times` with seconds for each kind of action.

    Raises UsageError, one sentence, for a file that can not be read or has a field that is not there.
    """
    path = Path(path)
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"the plan {str(path)!r} could not be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} is no TOML: {error}") from error
    return workload_of(found, path.name)


def workload_of(found: dict[str, Any], source: str) -> Workload:
    """The workload that a table describes."""
    times = found.pop("times", None)
    if not isinstance(times, dict):
        raise UsageError(f"{source} has no table [times]: give forward, input and weight in seconds")
    _check_names(times, _TIMES, f"{source}, [times]")
    known = [f.name for f in fields(Workload) if f.name not in ("costs", "expected")]
    _check_names(found, known, source)
    for name in ("pipelines", "stages", "micro_batches"):
        if name not in found:
            raise UsageError(f"{source} has no {name}: add it")
    costs = Costs(**{name: tuple(value) if isinstance(value, list) else value for name, value in times.items()})
    try:
        return Workload(**{"name": Path(source).stem, **found, "costs": costs})
    except TypeError as error:
        raise UsageError(f"{source} has a field of the wrong kind: {error}") from error


def _check_names(found: dict[str, Any], known: list[str] | tuple[str, ...], where: str) -> None:
    for name in found:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(known)}"
            raise UsageError(f"{where} has {name!r}: {hint}")
