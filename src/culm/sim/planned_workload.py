"""The workload of a row in the table of `culm plan`, and its plan file: what was planned is what is simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from culm.sim.model_layers import ModelLayers
from culm.sim.workload import ACTION_TIMES, Workload

if TYPE_CHECKING:
    from culm.plan.rent.rental_options import InstanceOffer, RentalOption, RentalQuery

_TOML_FIELDS = (
    "name", "pipelines", "stages", "micro_batches", "micro_batch", "schedule", "workers_per_node", "state_bytes",
    "least_stages", "layers", "instance",
)  # fmt: skip


def planned_workload(row: RentalOption, name: str, query: RentalQuery, offer: InstanceOffer) -> Workload:
    """The workload with the shape, the schedule and the costs of a row."""
    case = row.case
    layers = query.profiles[row.micro_batch].layers
    return Workload(
        name=name,
        pipelines=case.pipelines,
        stages=case.stages,
        micro_batches=case.micro_batches,
        micro_batch=row.micro_batch,
        costs=case.costs,
        state_bytes=float(sum(layer.parameter_bytes + layer.state_bytes for layer in layers) * 3 // 4),
        workers_per_node=offer.workers,
        least_stages=row.least_stages,
        layers=len(layers),
        model=ModelLayers(tuple(layers), offer.links),
        memory=case.memory,
        planned_activations=row.limits,
        two_ranges=case.two_ranges,
        schedule=row.schedule,
        split=case.split,
        stagger=case.stagger,
        early_sends=case.early_sends,
        instance=offer.instance,
    )


def workload_toml(workload: Workload) -> str:
    """The workload as a plan file for `culm simulate --plan`."""
    head = {name: getattr(workload, name) for name in _TOML_FIELDS}
    optional = {"memory": workload.memory} if workload.memory is not None else {}
    optional |= {"planned_activations": workload.planned_activations} if workload.planned_activations else {}
    optional |= {name: False for name in ("split", "stagger") if not getattr(workload, name)}
    optional |= {"early_sends": True} if workload.early_sends else {}
    times = {name: getattr(workload.costs, name) for name in ACTION_TIMES}
    lines = [f"{key} = {_toml_value(value)}" for key, value in {**head, **optional}.items()]
    tables: dict[str, dict[str, Any]] = {"times": times}
    if (two := workload.two_ranges) is not None:
        each = {name: getattr(two.costs, name) for name in ACTION_TIMES}
        tables["two_ranges"] = {"activation": two.activation, "room": two.room, **each}
    tables |= {"model": workload.model.as_table()} if workload.model is not None else {}
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)
