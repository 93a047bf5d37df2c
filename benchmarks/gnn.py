"""`culm bench gnn`: culm.gnn beside PyG on the whole graph and beside sampled mini-batches, on the same cores.

rows      every case under every system: time per epoch, accuracy, time and value to the same accuracy
latency   no pipelining, pipe and async with far workers
scaling   time per epoch over cores
large     a million vertices: time per epoch, and memory of all processes together
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, TypeAlias, TypedDict

from rich.table import Table

from benchmarks.gnn_case import GRAPHS, Case, Curve, Request
from benchmarks.gnn_sides import SYSTEMS, available, train, train_watched
from benchmarks.paired import interval
from culm.gnn.price import bill, prices_of, value

OURS = "culm-async"
"""What others are compared with."""
FULL_BATCH = ("pyg-edges", "pyg-sparse")
INSTANCE = "c5n.2xlarge"
"""Cores are priced as its vCPUs."""
TARGET = 0.99
"""Of the validation accuracy that PyG on the whole graph reaches: what everyone has to reach."""
FAR_MODES = ("sync", "pipe", "async", "async-1")
"""No pipelining, pipelining, and asynchrony with staleness 0 and 1."""
FAR_INTERVALS = 4
"""Per worker, where workers are far: enough that one can be gathered while others are away."""

Train: TypeAlias = Callable[[Request], Curve]
Watched: TypeAlias = Callable[[Request], tuple[Curve, float]]
Told: TypeAlias = Callable[[str], object]


class Row(TypedDict):
    """A system on a case, over all rounds. `ratio` is its time per epoch over culm's, round by round."""

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


class Far(TypedDict):
    """A mode with latency injected into every task; `against_pipe` is pipe's time per epoch over this one's."""

    mode: str
    latency_ms: float
    s_per_epoch: float
    against_pipe: float


class Scale(TypedDict):
    cores: int
    s_per_epoch: float
    speedup: float


class Large(TypedDict):
    graph: str
    s_per_epoch: float
    peak_gib: float


class Result(TypedDict):
    """The JSON of the bench."""

    rows: list[Row]
    latency: list[Far]
    scaling: list[Scale]
    large: Large
    cores: int
    instance: str


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much the bench looks at."""

    cases: tuple[Case, ...]
    rounds: int
    far: Case
    latencies_ms: tuple[float, ...]
    scaled: Case
    large: Case


def _file(name: str, **options: Any) -> Case:
    return Case(graph=str(GRAPHS / f"{name}.npz"), **options)


FULL = Effort(
    cases=(
        _file("cora", epochs=150),
        _file("cora", model="gat", hidden=64, heads=8, epochs=100),
        _file("amazon-computers", hidden=64, weight_decay=0.0, epochs=200),
        Case(graph="gen:rmat,scale=15,degree=16,features=128", hidden=64, epochs=40),
        Case(graph="gen:rmat,scale=14,degree=16", model="gat", hidden=32, heads=4, epochs=40),
    ),
    rounds=3,
    far=Case(graph="gen:rmat,scale=15,degree=16,features=128", hidden=64, epochs=16),
    latencies_ms=(0.0, 20.0, 100.0),
    scaled=Case(graph="gen:rmat,scale=17,degree=16,features=128", hidden=64, epochs=20),
    large=Case(graph="gen:rmat,scale=20,degree=16,features=64", hidden=64, epochs=5),
)
QUICK = Effort(
    cases=(_file("cora", epochs=100), Case(graph="gen:rmat,scale=12,degree=16", hidden=32, epochs=40)),
    rounds=1,
    far=Case(graph="gen:rmat,scale=15,degree=16", hidden=64, epochs=6),
    latencies_ms=(0.0, 20.0, 100.0),
    scaled=Case(graph="gen:rmat,scale=14,degree=16", hidden=32, epochs=10),
    large=Case(graph="gen:rmat,scale=17,degree=16,features=64", hidden=64, epochs=4),
)


def run(
    *,
    quick: bool = False,
    effort: Effort | None = None,
    systems: Sequence[str] = SYSTEMS,
    side: Train = train,
    watched: Watched = train_watched,
    progress: Told = lambda _: None,
) -> Result:
    """Measure everything. Raises RunError when a system fails. Cases whose file is not there are left out, and said."""
    effort = effort or (QUICK if quick else FULL)
    cores = available()
    progress(f"{cores} cores for every system; cores priced as vCPUs of {INSTANCE}, {prices_of().as_of}")
    rows = []
    for case in effort.cases:
        if case.there:
            rows += compared(case, systems, cores=cores, rounds=effort.rounds, side=side, progress=progress)
        else:
            progress(f"{case.name} is not beside this checkout: left out")
    return Result(
        rows=rows,
        latency=_announced(far(effort, cores, side), progress),
        scaling=_announced(scaling(effort.scaled, cores, side), progress),
        large=_announced([large(effort.large, cores, watched)], progress)[0],
        cores=cores,
        instance=INSTANCE,
    )


def compared(
    case: Case, systems: Sequence[str], *, cores: int, rounds: int, side: Train, progress: Told = lambda _: None
) -> list[Row]:
    """Rounds in which every system trains once, from another seed and in another order each."""
    curves: dict[str, list[Curve]] = {system: [] for system in systems}
    for number in range(rounds):
        for system in turn(systems, number):
            curves[system].append(side(Request(system=system, case=case, cores=cores, seed=number)))
    target = TARGET * max(mean(max(curve.val) for curve in curves[peer]) for peer in FULL_BATCH if peer in curves)
    return _announced([row(case, system, curves, target, cores) for system in systems], progress)


def turn(systems: Sequence[str], number: int) -> list[str]:
    """The order of a round: one further each time, so that nobody is always first."""
    start = number % len(systems)
    return [*systems[start:], *systems[:start]]


def row(case: Case, system: str, curves: dict[str, list[Curve]], target: float, cores: int) -> Row:
    """What the rounds of a system came to."""
    own = curves[system]
    ratios = [theirs.s_per_epoch / ours.s_per_epoch for theirs, ours in zip(own, curves[OURS], strict=True)]
    seconds = middle([curve.s_to(target) for curve in own])
    return Row(
        graph=case.name,
        model=case.model,
        system=system,
        s_per_epoch=median(curve.s_per_epoch for curve in own),
        accuracy=mean(curve.accuracy for curve in own),
        s_to_accuracy=seconds,
        value=None if seconds is None else value(seconds, cost(cores, seconds)),
        ratio=median(ratios),
        ci=list(interval(ratios)),
        rounds=len(own),
        target=target,
    )


def middle(reached: Sequence[float | None]) -> float | None:
    """The median where a round that never got there took forever; None if that is what it comes to."""
    found = median(math.inf if seconds is None else seconds for seconds in reached)
    return None if math.isinf(found) else found


def cost(cores: int, seconds: float) -> float:
    """Dollars for so many cores."""
    prices = prices_of()
    return bill(prices, instance=INSTANCE, server_s=seconds * cores / prices.machine(INSTANCE).vcpus).usd


def far(effort: Effort, cores: int, side: Train) -> list[Far]:
    """Time per epoch of each mode, for each latency; the median over as many rounds as the rows have."""
    found = []
    for latency in effort.latencies_ms:
        times = {
            mode: median(
                side(far_request(effort.far, mode, cores, seed, latency)).s_per_epoch for seed in range(effort.rounds)
            )
            for mode in FAR_MODES
        }
        found += beside_pipe(latency, times)
    return found


def beside_pipe(latency_ms: float, times: Mapping[str, float]) -> list[Far]:
    """What the modes came to at one latency."""
    return [
        Far(mode=mode, latency_ms=latency_ms, s_per_epoch=seconds, against_pipe=times["pipe"] / seconds)
        for mode, seconds in times.items()
    ]


def far_request(case: Case, mode: str, cores: int, seed: int, latency_ms: float) -> Request:
    """The same intervals for every mode: left to itself, each would take as many as suit it. Evaluated at the end: what
    pipelining gains goes over the end of an epoch, and an evaluation would stand in between."""
    return Request(
        system=f"culm-{mode}",
        case=case,
        cores=cores,
        seed=seed,
        latency_s=latency_ms / 1000,
        intervals=FAR_INTERVALS * cores,
        every=case.epochs,
    )


def scaling(case: Case, cores: int, side: Train) -> list[Scale]:
    """Powers of two up to all cores there are, sixteen at most."""
    counts = [count for count in (1, 2, 4, 8, 16) if count <= cores]
    times = {count: side(Request(system=OURS, case=case, cores=count)).s_per_epoch for count in counts}
    return [Scale(cores=count, s_per_epoch=s, speedup=times[1] / s) for count, s in times.items()]


def large(case: Case, cores: int, watched: Watched) -> Large:
    curve, peak = watched(Request(system=OURS, case=case, cores=cores))
    return Large(graph=case.name, s_per_epoch=curve.s_per_epoch, peak_gib=peak)


def table(result: Result) -> Table:
    """The rows for people."""
    made = Table(title="culm.gnn beside others", caption=_caption(result))
    for name in ("graph", "model", "system"):
        made.add_column(name)
    for name in ("ms per epoch", "x culm-async", "95 %", "accuracy", "s to accuracy", "value"):
        made.add_column(name, justify="right")
    for found in result["rows"]:
        made.add_row(*_cells(found))
    return made


def _cells(found: Row) -> list[str]:
    reached, worth = found["s_to_accuracy"], found["value"]
    return [
        found["graph"],
        found["model"],
        found["system"],
        f"{found['s_per_epoch'] * 1000:.1f}",
        f"{found['ratio']:.2f}",
        "{:.2f} to {:.2f}".format(*found["ci"]),
        f"{found['accuracy']:.3f}",
        "never" if reached is None else f"{reached:.2f}",
        "-" if worth is None else f"{worth:.3g}",
    ]


def _caption(result: Result) -> str:
    lines = [f"{result['cores']} cores; no pipelining is culm-sync"]
    lines += [
        f"latency {one['latency_ms']:g} ms, {one['mode']}: {one['s_per_epoch'] * 1000:.1f} ms per epoch, "
        f"{one['against_pipe']:.2f} times as fast as pipe"
        for one in result["latency"]
    ]
    lines += [
        f"{one['cores']} cores: {one['s_per_epoch'] * 1000:.0f} ms, {one['speedup']:.2f}x" for one in result["scaling"]
    ]
    big = result["large"]
    return "\n".join([*lines, f"{big['graph']}: {big['s_per_epoch']:.2f} s per epoch, {big['peak_gib']:.1f} GiB"])


def _announced(found: list[Any], progress: Told) -> list[Any]:
    for one in found:
        progress(", ".join(f"{key} {_short(value)}" for key, value in one.items()))
    return found


def _short(found: object) -> str:
    return f"{found:.4g}" if isinstance(found, float) else str(found)
