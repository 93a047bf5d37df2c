"""`culm bench gnn`: culm.gnn compared with PyG on the whole graph and with sampled mini-batches, on the same cores.

rows      every case with every system: time per training epoch, accuracy, time and value to the same accuracy
latency   sync, pipe and async with distant workers
scaling   time per training epoch over cores
large     a million vertices: time per training epoch, and memory of all processes together
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, TypeAlias, TypedDict

from benchmarks.common.paired_rounds import median_interval
from benchmarks.gnn.isolated_training import SYSTEMS, train_isolated, train_with_peak_memory, usable_cores
from benchmarks.gnn.training_case import GRAPH_FOLDER, GraphCase, TrainingCurve, TrainingRequest
from rich.table import Table

from culm.gnn.plan.gnn_prices import compute_bill, prices_for_year, value

CULM_SYSTEM = "culm-async"
"""The system that all others are compared with."""
FULL_BATCH_SYSTEMS = ("pyg-edges", "pyg-sparse")
INSTANCE = "c5n.2xlarge"
"""Instance type whose vCPU price is used for cores."""
TARGET_SHARE = 0.99
"""Share of the validation accuracy of PyG on the whole graph that all systems have to reach."""
LATENCY_MODES = ("sync", "pipe", "async", "async-1")
"""No pipelining, pipelining, and asynchrony with staleness 0 and 1."""
INTERVALS_PER_WORKER = 4
"""Intervals per worker if workers are distant: some can be gathered while others are in transit."""

TrainFunction: TypeAlias = Callable[[TrainingRequest], TrainingCurve]
WatchedTrainFunction: TypeAlias = Callable[[TrainingRequest], tuple[TrainingCurve, float]]
ProgressFunction: TypeAlias = Callable[[str], object]


class GraphBenchRow(TypedDict):
    """A system on a case, over all rounds. `ratio` is its time per epoch divided by culm's, round by round."""

    graph: str
    model: str
    system: str
    s_per_epoch: float
    accuracy: float
    s_to_accuracy: float | None
    value: float | None
    ratio: float
    ci: list[float]
    rounds: int
    target: float


class LatencyRow(TypedDict):
    """A mode with latency added to every task; `against_pipe` is the time per epoch of pipe divided by that of this
    mode."""

    mode: str
    latency_ms: float
    s_per_epoch: float
    against_pipe: float


class ScalingRow(TypedDict):
    cores: int
    s_per_epoch: float
    speedup: float


class LargeGraphRow(TypedDict):
    graph: str
    s_per_epoch: float
    peak_gib: float


class GraphBenchResult(TypedDict):
    """The JSON of the benchmark."""

    rows: list[GraphBenchRow]
    latency: list[LatencyRow]
    scaling: list[ScalingRow]
    large: LargeGraphRow
    cores: int
    instance: str


@dataclass(frozen=True, kw_only=True)
class GraphBenchEffort:
    """The amount of work of the benchmark."""

    cases: tuple[GraphCase, ...]
    rounds: int
    latency_case: GraphCase
    latencies_ms: tuple[float, ...]
    scaling_case: GraphCase
    large_case: GraphCase


def _graph_file_case(name: str, **options: Any) -> GraphCase:
    return GraphCase(graph=str(GRAPH_FOLDER / f"{name}.npz"), **options)


FULL = GraphBenchEffort(
    cases=(
        _graph_file_case("cora", epochs=150),
        _graph_file_case("cora", model="gat", hidden=64, heads=8, epochs=100),
        _graph_file_case("amazon-computers", hidden=64, weight_decay=0.0, epochs=200),
        GraphCase(graph="gen:rmat,scale=15,degree=16,features=128", hidden=64, epochs=40),
        GraphCase(graph="gen:rmat,scale=14,degree=16", model="gat", hidden=32, heads=4, epochs=40),
    ),
    rounds=3,
    latency_case=GraphCase(graph="gen:rmat,scale=15,degree=16,features=128", hidden=64, epochs=16),
    latencies_ms=(0.0, 20.0, 100.0),
    scaling_case=GraphCase(graph="gen:rmat,scale=17,degree=16,features=128", hidden=64, epochs=20),
    large_case=GraphCase(graph="gen:rmat,scale=20,degree=16,features=64", hidden=64, epochs=5),
)
QUICK = GraphBenchEffort(
    cases=(_graph_file_case("cora", epochs=100), GraphCase(graph="gen:rmat,scale=12,degree=16", hidden=32, epochs=40)),
    rounds=1,
    latency_case=GraphCase(graph="gen:rmat,scale=15,degree=16", hidden=64, epochs=6),
    latencies_ms=(0.0, 20.0, 100.0),
    scaling_case=GraphCase(graph="gen:rmat,scale=14,degree=16", hidden=32, epochs=10),
    large_case=GraphCase(graph="gen:rmat,scale=17,degree=16,features=64", hidden=64, epochs=4),
)


def run(
    *,
    quick: bool = False,
    effort: GraphBenchEffort | None = None,
    systems: Sequence[str] = SYSTEMS,
    train_function: TrainFunction = train_isolated,
    watched_train_function: WatchedTrainFunction = train_with_peak_memory,
    progress: ProgressFunction = lambda _: None,
) -> GraphBenchResult:
    """Run all measurements. Raises RunError if a system fails. Cases without their file are skipped with a message."""
    effort = effort or (QUICK if quick else FULL)
    cores = usable_cores()
    progress(f"{cores} cores for every system; cores priced as vCPUs of {INSTANCE}, {prices_for_year().as_of}")
    rows = []
    for case in effort.cases:
        if case.is_available:
            rows += compare_systems(
                case, systems, cores=cores, rounds=effort.rounds, train_function=train_function, progress=progress
            )
        else:
            progress(f"{case.name} is not available: skipped")
    return GraphBenchResult(
        rows=rows,
        latency=_announce_rows(measure_latency(effort, cores, train_function), progress),
        scaling=_announce_rows(measure_scaling(effort.scaling_case, cores, train_function), progress),
        large=_announce_rows([measure_large_graph(effort.large_case, cores, watched_train_function)], progress)[0],
        cores=cores,
        instance=INSTANCE,
    )


def compare_systems(
    case: GraphCase,
    systems: Sequence[str],
    *,
    cores: int,
    rounds: int,
    train_function: TrainFunction,
    progress: ProgressFunction = lambda _: None,
) -> list[GraphBenchRow]:
    """Train every system once per round, with another seed and in another order each time."""
    curves: dict[str, list[TrainingCurve]] = {system: [] for system in systems}
    for number in range(rounds):
        for system in system_order(systems, number):
            curves[system].append(train_function(TrainingRequest(system=system, case=case, cores=cores, seed=number)))
    target = TARGET_SHARE * max(
        mean(max(curve.val) for curve in curves[peer]) for peer in FULL_BATCH_SYSTEMS if peer in curves
    )
    return _announce_rows([system_row(case, system, curves, target, cores) for system in systems], progress)


def system_order(systems: Sequence[str], number: int) -> list[str]:
    """Return the order of a round, rotated by one each time, so that no system is always first."""
    start = number % len(systems)
    return [*systems[start:], *systems[:start]]


def system_row(
    case: GraphCase, system: str, curves: dict[str, list[TrainingCurve]], target: float, cores: int
) -> GraphBenchRow:
    """Aggregate the rounds of a system."""
    system_curves = curves[system]
    ratios = [
        theirs.s_per_epoch / ours.s_per_epoch for theirs, ours in zip(system_curves, curves[CULM_SYSTEM], strict=True)
    ]
    seconds = median_or_none([curve.seconds_to(target) for curve in system_curves])
    return GraphBenchRow(
        graph=case.name,
        model=case.model,
        system=system,
        s_per_epoch=median(curve.s_per_epoch for curve in system_curves),
        accuracy=mean(curve.accuracy for curve in system_curves),
        s_to_accuracy=seconds,
        value=None if seconds is None else value(seconds, training_cost(cores, seconds)),
        ratio=median(ratios),
        ci=list(median_interval(ratios)),
        rounds=len(system_curves),
        target=target,
    )


def median_or_none(reached: Sequence[float | None]) -> float | None:
    """Return the median, counting None (target not reached) as infinite; None if the median is infinite."""
    result = median(math.inf if seconds is None else seconds for seconds in reached)
    return None if math.isinf(result) else result


def training_cost(cores: int, seconds: float) -> float:
    """Return the cost in dollars of these cores."""
    prices = prices_for_year()
    return compute_bill(prices, instance=INSTANCE, server_s=seconds * cores / prices.machine(INSTANCE).vcpus).usd


def measure_latency(effort: GraphBenchEffort, cores: int, train_function: TrainFunction) -> list[LatencyRow]:
    """Return the time per epoch of each mode and latency, as the median over the rounds."""
    rows = []
    for latency in effort.latencies_ms:
        times = {
            mode: median(
                train_function(latency_request(effort.latency_case, mode, cores, seed, latency)).s_per_epoch
                for seed in range(effort.rounds)
            )
            for mode in LATENCY_MODES
        }
        rows += compare_with_pipe(latency, times)
    return rows


def compare_with_pipe(latency_ms: float, times: Mapping[str, float]) -> list[LatencyRow]:
    """Return the rows of one latency."""
    return [
        LatencyRow(mode=mode, latency_ms=latency_ms, s_per_epoch=seconds, against_pipe=times["pipe"] / seconds)
        for mode, seconds in times.items()
    ]


def latency_request(case: GraphCase, mode: str, cores: int, seed: int, latency_ms: float) -> TrainingRequest:
    """Return a training with the same intervals for every mode; by default, each mode would choose its own. It is
    evaluated only at the end: pipelining overlaps training epochs, and an evaluation would separate them."""
    return TrainingRequest(
        system=f"culm-{mode}",
        case=case,
        cores=cores,
        seed=seed,
        latency_s=latency_ms / 1000,
        intervals=INTERVALS_PER_WORKER * cores,
        evaluate_every=case.epochs,
    )


def measure_scaling(case: GraphCase, cores: int, train_function: TrainFunction) -> list[ScalingRow]:
    """Measure powers of two up to the available cores, at most sixteen."""
    counts = [count for count in (1, 2, 4, 8, 16) if count <= cores]
    times = {
        count: train_function(TrainingRequest(system=CULM_SYSTEM, case=case, cores=count)).s_per_epoch
        for count in counts
    }
    return [ScalingRow(cores=count, s_per_epoch=s, speedup=times[1] / s) for count, s in times.items()]


def measure_large_graph(case: GraphCase, cores: int, watched_train_function: WatchedTrainFunction) -> LargeGraphRow:
    curve, peak = watched_train_function(TrainingRequest(system=CULM_SYSTEM, case=case, cores=cores))
    return LargeGraphRow(graph=case.name, s_per_epoch=curve.s_per_epoch, peak_gib=peak)


def render_table(result: GraphBenchResult) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table(title="culm.gnn compared with other systems", caption=_caption(result))
    for name in ("graph", "model", "system"):
        table.add_column(name)
    for name in ("ms per epoch", "x culm-async", "95 %", "accuracy", "s to accuracy", "value"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        table.add_row(*_row_cells(row))
    return table


def _row_cells(row: GraphBenchRow) -> list[str]:
    seconds, row_value = row["s_to_accuracy"], row["value"]
    return [
        row["graph"],
        row["model"],
        row["system"],
        f"{row['s_per_epoch'] * 1000:.1f}",
        f"{row['ratio']:.2f}",
        "{:.2f} to {:.2f}".format(*row["ci"]),
        f"{row['accuracy']:.3f}",
        "never" if seconds is None else f"{seconds:.2f}",
        "-" if row_value is None else f"{row_value:.3g}",
    ]


def _caption(result: GraphBenchResult) -> str:
    lines = [f"{result['cores']} cores; no pipelining is culm-sync"]
    lines += [
        f"latency {row['latency_ms']:g} ms, {row['mode']}: {row['s_per_epoch'] * 1000:.1f} ms per epoch, "
        f"{row['against_pipe']:.2f} times as fast as pipe"
        for row in result["latency"]
    ]
    lines += [
        f"{row['cores']} cores: {row['s_per_epoch'] * 1000:.0f} ms, {row['speedup']:.2f}x" for row in result["scaling"]
    ]
    large = result["large"]
    return "\n".join([*lines, f"{large['graph']}: {large['s_per_epoch']:.2f} s per epoch, {large['peak_gib']:.1f} GiB"])


def _announce_rows(rows: list[Any], progress: ProgressFunction) -> list[Any]:
    for row in rows:
        progress(", ".join(f"{key} {_format_value(value)}" for key, value in row.items()))
    return rows


def _format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
