"""The simulated job: its shape, the costs of its actions, and the size of its state."""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from culm.errors import UsageError
from culm.plan import ActivationLimit, PlanCase
from culm.plan.rent.failure_free_step import ESTIMATED_SCHEDULES, failure_free_step_s, resolve_schedule
from culm.plan.replan.planned_schedule import PLANNED
from culm.plan.replan.two_range_schedule import TwoRanges
from culm.schedule import Costs, Kind
from culm.schedule.plan_timing import action_costs, send_costs
from culm.sim.model_layers import ModelLayers


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step and the shape it was planned for. Raises UsageError for invalid numbers."""

    name: str = "workload"
    pipelines: int
    """D: initial number of pipelines. Workers beyond D x P stand by, unless a strategy builds more pipelines."""
    stages: int
    """P."""
    micro_batches: int
    """M, over all pipelines; it never changes."""
    micro_batch: int = 1
    """Samples per micro-batch."""
    costs: Costs
    """Seconds, for one of P stages."""
    planning_costs: Costs | None = None
    """Costs used to plan around holes, if they differ from what actions actually take."""
    state_bytes: float = 0.0
    """Parameters and optimizer state of the whole model; a new node fetches its share."""
    workers_per_node: int = 1
    """Workers of a node, one for each accelerator: they are rented, billed and lost together."""
    least_stages: int = 0
    """Fewest stages whose state fits into the memory of a worker; 0: as many as planned."""
    layers: int = 0
    """Number of parts into which the model can be cut; 0: no limit."""
    model: ModelLayers | None = None
    """What steps in other shapes cost; None: estimated from the costs of the planned shape, with equal layers."""
    memory: ActivationLimit = None
    """Limit of live activations in plans around holes."""
    schedule: str = PLANNED
    """The schedule while every slot is filled, as in `culm run --schedule`. Steps with holes always use the planner's,
    as a run does."""
    planned_activations: tuple[int, ...] | None = None
    """By stage: the most activations that a worker may keep under `planned`; None: as many as 1F1B in its first stage,
    which is what a run allows if all stages are equal."""
    two_ranges: TwoRanges | None = None
    """The model cut into two segments per worker, for `planned`; None: not considered."""
    split: bool = True
    stagger: bool = True
    early_sends: bool = False
    """Whether 1F1B and GPipe split backwards that another stage waits for, at the cost of `costs.split`."""
    steps: int = 0
    """Steps of the whole run: shortly before its end a change of shape no longer pays; 0: as long as the trace."""
    instance: str = ""
    """Instance type of a node, for its price."""

    def __post_init__(self) -> None:
        for name in ("pipelines", "stages", "micro_batches", "micro_batch", "workers_per_node"):
            if getattr(self, name) < 1:
                raise UsageError(f"{self.name}: {name} is {getattr(self, name)}: use a whole number of at least 1")
        if self.pipelines > self.micro_batches:
            raise UsageError(
                f"{self.name}: pipelines is {self.pipelines}, but a step has {self.micro_batches} micro-batches: "
                f"use at most that many pipelines"
            )
        if self.schedule not in ESTIMATED_SCHEDULES:
            names = ", ".join(ESTIMATED_SCHEDULES)
            raise UsageError(f"{self.name}: schedule is {self.schedule!r}: use {names}, or leave it out")
        if not (math.isfinite(self.state_bytes) and self.state_bytes >= 0):
            raise UsageError(f"{self.name}: state_bytes is {self.state_bytes}: use a number of at least 0")
        if not self.micro_batch_s > 0:
            raise UsageError(f"{self.name}: a micro-batch takes no time: give forward, input and weight in seconds")

    @property
    def workers(self) -> int:
        """Workers with a slot in the planned shape."""
        return self.pipelines * self.stages

    @property
    def nodes(self) -> int:
        """Nodes to rent: the fewest that have a worker for every slot."""
        return -(-self.workers // self.workers_per_node)

    @property
    def spare_workers(self) -> int:
        """Workers of the rented nodes that the planned shape has no slot for."""
        return self.nodes * self.workers_per_node - self.workers

    def is_complete_fleet(self, workers: int) -> bool:
        """Whether enough workers are present to make up every planned node."""
        return self.workers <= workers <= self.workers + self.spare_workers

    @cached_property
    def ideal_samples_per_s(self) -> float:
        """An upper bound of the speed: every worker of the planned shape computes all the time, at an even share of the
        work. No bubble, no message, no reduce, no optimizer step, no loss."""
        return self.samples / (self.micro_batches * self.micro_batch_s / self.workers)

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.micro_batches * self.micro_batch

    @property
    def min_stages(self) -> int:
        """The fewest stages of a pipeline."""
        return self.least_stages or self.stages

    @cached_property
    def micro_batch_s(self) -> float:
        """Seconds of a micro-batch through all stages, forward and backward."""
        price = action_costs(self.costs, self.stages)
        return sum(sum(price[kind]) for kind in (Kind.F, Kind.B))

    @cached_property
    def stage_s(self) -> float:
        """Mean seconds of a micro-batch in a stage."""
        return self.micro_batch_s / self.stages

    @cached_property
    def forward_share(self) -> float:
        return sum(action_costs(self.costs, self.stages)[Kind.F]) / self.micro_batch_s

    @cached_property
    def send_s(self) -> float:
        """Mean seconds to send over a stage boundary."""
        costs = send_costs(self.costs, self.stages)
        return sum(costs) / len(costs) if costs else 0.0

    def with_schedule(self, schedule: str) -> Workload:
        """The same with another schedule; for "auto" the one with the shortest failure-free step."""
        case = self.planning_case(self.pipelines)
        return replace(self, schedule=resolve_schedule(case, schedule, self.planned_activations))

    def failure_free_step_s(self, schedule: str | None = None) -> float:
        """Seconds of a step of the planned shape with every slot filled, under its schedule or another one."""
        case = self.planning_case(self.pipelines)
        return failure_free_step_s(case, schedule or self.schedule, self.planned_activations)

    def planning_case(self, pipelines: int) -> PlanCase:
        """The step on this many pipelines with every slot filled."""
        return PlanCase(
            pipelines=pipelines,
            stages=self.stages,
            micro_batches=self.micro_batches,
            costs=self.costs,
            split=self.split,
            stagger=self.stagger,
            memory=self.memory,
            early_sends=self.early_sends,
            two_ranges=self.two_ranges,
        )


ACTION_TIMES = ("forward", "input", "weight", "reduce", "step", "send", "split")


def read_workload(path: str | Path, schedule: str = PLANNED) -> Workload:
    """Read a plan from a TOML file: the fields of `Workload`, and a table `times` with seconds for each kind of action.
    `schedule` is used where the file names none; "auto": the fastest.

    Raises UsageError if the file cannot be read or has an unknown field.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"the plan {str(path)!r} could not be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} is not valid TOML: {error}") from error
    workload = workload_from_table(table, path.name)
    return workload if "schedule" in table else workload.with_schedule(schedule)


def workload_from_table(table: dict[str, Any], source: str) -> Workload:
    """The workload that a table describes. Raises UsageError for unknown, missing or invalid fields."""
    times = table.pop("times", None)
    if not isinstance(times, dict):
        raise UsageError(f"{source} has no table [times]: give forward, input and weight in seconds")
    _check_names(times, ACTION_TIMES, f"{source}, [times]")
    known = [f.name for f in fields(Workload) if f.name not in ("costs", "planning_costs")]
    if isinstance(table.get("model"), dict):
        table["model"] = ModelLayers.from_table(table["model"], table.get("workers_per_node", 1), source)
    _check_names(table, known, source)
    for name in ("pipelines", "stages", "micro_batches"):
        if name not in table:
            raise UsageError(f"{source} has no {name}: add it")
    costs = _read_times(times)
    if isinstance(table.get("two_ranges"), dict):
        table["two_ranges"] = _read_two_ranges(table["two_ranges"], source)
    if isinstance(table.get("planned_activations"), list):
        table["planned_activations"] = tuple(table["planned_activations"])
    try:
        return Workload(**{"name": Path(source).stem, **table, "costs": costs})
    except TypeError as error:
        raise UsageError(f"{source} has a field of the wrong type: {error}") from error


def _read_times(times: dict[str, Any]) -> Costs:
    return Costs(**{name: tuple(value) if isinstance(value, list) else value for name, value in times.items()})


def _read_two_ranges(table: dict[str, Any], source: str) -> TwoRanges:
    where = f"{source}, [two_ranges]"
    _check_names(table, ("activation", "room", *ACTION_TIMES), where)
    try:
        activation, room = (tuple(map(int, table.pop(name))) for name in ("activation", "room"))
        return TwoRanges(costs=_read_times(table), activation=activation, room=room)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where}, could not be read ({error}): write it again with culm plan") from error


def _check_names(table: dict[str, Any], known: list[str] | tuple[str, ...], where: str) -> None:
    for name in table:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
            raise UsageError(f"{where} has {name!r}: {hint}")
