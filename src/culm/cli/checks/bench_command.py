"""`culm bench`: run the benchmarks of the source tree."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group

import culm
from culm.cli.error_reporting import report_errors
from culm.errors import CulmError, UsageError


def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="pipeline, resilience, planner, memory, simulator, scale, observe, dropping, models, gpu, gnn, "
            "or all.",
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, for a first impression.")] = False,
    stages: Annotated[
        str, typer.Option(metavar="P,...", help="pipeline: depths to measure. Default: 2,4,8; planned: 4,8.")
    ] = "",
    schedules: Annotated[
        str, typer.Option(metavar="NAME,...", help="pipeline: gpipe, 1f1b, zb (the default), planned.")
    ] = "",
    micro_batches: Annotated[
        str, typer.Option(metavar="M,...", help="pipeline with planned: micro-batches of a step. Default: 8,16,32.")
    ] = "",
    rounds: Annotated[int | None, typer.Option(metavar="N", help="pipeline, gpu: rounds of each row.")] = None,
    rows: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="gpu: rows to measure, as plain,1f1b-4,2x2,shadow. Default: all. models: speed (the default), memory.",
        ),
    ] = "",
    combine: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="gpu: add the rows of an earlier --json; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="gpu: cuda (the default), or cpu to try the bench itself.")] = "",
    json_: Annotated[bool, typer.Option("--json", help="Print the figures as JSON; all else goes to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure culm on this machine. Needs the source tree, which contains the benchmarks."""
    with report_errors(debug=debug):
        if name not in BENCHES:
            close = difflib.get_close_matches(name, BENCHES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(BENCHES)}"
            raise UsageError(f"there is no bench {name!r}: {hint}")
        _add_to_path(source_tree())
        options = PipelineRows(
            _parse_numbers("--stages", stages),
            _parse_names(schedules),
            _parse_numbers("--micro-batches", micro_batches),
            rounds,
        )
        gpu = {"rows": _parse_names(rows), "combine": combine or [], "device": device or None}
        if (combine or device or (rows and name != "models")) and name != "gpu":
            raise UsageError(f"--rows is for gpu and models, --combine and --device for gpu: not {name}")
        if name == "gpu" and replace(options, rounds=None) == PipelineRows():
            result, table = _gpu(quick, rounds=rounds, **gpu)
        elif name == "models" and rows and options == PipelineRows():
            result, table = _models(quick, _parse_names(rows))
        elif options == PipelineRows():
            result, table = BENCHES[name](quick)
        elif name == "pipeline":
            result, table = _pipeline(quick, options)
        else:
            raise UsageError(
                f"--stages, --schedules and --micro-batches are for pipeline, --rounds for pipeline and gpu: not {name}"
            )
        if json_:
            print(json.dumps(result))
        else:
            Console().print(table)


@dataclass(frozen=True)
class PipelineRows:
    """The rows of the bench `pipeline` that are measured; empty: the defaults."""

    stages: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    rounds: int | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 1:
            raise UsageError(f"--rounds is {self.rounds}: use a whole number of at least 1")
        known = ("gpipe", "1f1b", "zb", "interleaved", "planned")
        for name in self.schedules:
            if name not in known:
                raise UsageError(f"--schedules has {name!r}: use some of {', '.join(known)}")
        if self.micro_batches and "planned" not in self.schedules:
            raise UsageError("--micro-batches is for the rows of planned: add --schedules planned")


def _parse_numbers(option: str, text: str) -> tuple[int, ...]:
    numbers = _parse_names(text)
    for number in numbers:
        if not number.isdecimal() or int(number) < 1:
            raise UsageError(f"{option} is {text!r}: use whole numbers of at least 1, as in 4,8")
    return tuple(map(int, numbers))


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def source_tree() -> Path:
    """The folder that contains benchmarks/ and the package. Raises UsageError if culm was installed without it."""
    root = Path(culm.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__init__.py").is_file():
        raise UsageError(
            "culm was installed without its benchmarks: clone the repository and install it with 'pip install -e .'"
        )
    return root


def _add_to_path(root: Path) -> None:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def _pipeline(quick: bool, rows: PipelineRows | None = None) -> tuple[Any, Any]:
    """All default rows with the probes, or the chosen rows without them. `planned` has a table of its own."""
    from benchmarks.pipeline.culm_pipeline import CulmPool
    from benchmarks.pipeline.pipeline_probes import list_probes

    from benchmarks.pipeline import pipeline_bench, planned_bench

    if rows is None:
        with CulmPool() as pool:
            result = pipeline_bench.run(quick=quick, probes=list_probes(pool, quick=quick), progress=_progress)
        return result, pipeline_bench.render_table(result)
    chosen: dict[str, Any] = {"stages": rows.stages} if rows.stages else {}
    same = tuple(name for name in rows.schedules if name != "planned")
    figures: dict[str, Any] = {}
    tables: list[Any] = []
    if same or not rows.schedules:
        named: dict[str, Any] = {"schedules": same} if same else {}
        found = pipeline_bench.run(quick=quick, **chosen, **named, rounds=rows.rounds, progress=_progress)
        figures |= found
        tables.append(pipeline_bench.render_table(found))
    if "planned" in rows.schedules:
        many: dict[str, Any] = {"micro_batches": rows.micro_batches} if rows.micro_batches else {}
        cells = planned_bench.run(quick=quick, **chosen, **many, rounds=rows.rounds, progress=_progress)
        figures |= cells
        tables.append(planned_bench.render_table(cells))
    return figures, Group(*tables)


def _bench_of_module(name: str) -> Callable[[bool], tuple[Any, Any]]:
    """A benchmark in a module with run(quick=, progress=) and render_table()."""

    def run(quick: bool) -> tuple[Any, Any]:
        module = importlib.import_module(f"benchmarks.{name}")
        result = module.run(quick=quick, progress=_progress)
        return result, module.render_table(result)

    return run


def _models(quick: bool, rows: Sequence[str]) -> tuple[Any, Any]:
    """`speed`: against others; `memory`: of the nodes of a large model."""
    from benchmarks.models import models_bench, node_memory_bench

    modules: dict[str, Any] = {"speed": models_bench, "memory": node_memory_bench}
    for name in rows:
        if name not in modules:
            raise UsageError(f"--rows has {name!r}: use some of {', '.join(modules)}")
    results: dict[str, Any] = {}
    tables = []
    for name in rows:
        results[name] = modules[name].run(quick=quick, progress=_progress)
        tables.append(modules[name].render_table(results[name]))
    return results, Group(*tables)


def _gpu(quick: bool, **options: Any) -> tuple[Any, Any]:
    from benchmarks.gpu import gpu_bench

    result = gpu_bench.run(quick=quick, progress=_progress, **options)
    return result, gpu_bench.render_table(result)


def _resilience(quick: bool) -> tuple[Any, Any]:
    from benchmarks.pipeline.culm_pipeline import CulmPool

    from benchmarks.resilience import resilience_bench, resilience_result

    with CulmPool() as pool:
        result = resilience_bench.run(pool, quick=quick, progress=_progress)
    return result, resilience_result.render_table(result)


def _observe(quick: bool) -> tuple[Any, Any]:
    from benchmarks.pipeline.culm_pipeline import CulmPool

    from benchmarks.observe import observe_bench

    with CulmPool() as pool:
        result = observe_bench.run(pool, quick=quick, progress=_progress)
    return result, observe_bench.render_table(result)


def _run_all(quick: bool) -> tuple[Any, Any]:
    """Run all benchmarks one after the other. One that this machine cannot run is reported with the reason."""
    results: dict[str, Any] = {}
    tables: list[Any] = []
    for name, run in BENCHES.items():
        if run is _run_all:
            continue
        _progress(f"bench {name}")
        try:
            results[name], table = run(quick)
        except CulmError as error:
            results[name], table = {"unavailable": str(error)}, f"{name}: {error}"
        tables.append(table)
    return results, Group(*tables)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


BENCHES: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    "pipeline": _pipeline,
    "resilience": _resilience,
    "planner": _bench_of_module("planner.planner_bench"),
    "memory": _bench_of_module("planner.memory_bench"),
    "simulator": _bench_of_module("simulator.simulator_bench"),
    "scale": _bench_of_module("scale.scale_bench"),
    "observe": _observe,
    "dropping": _bench_of_module("resilience.dropping_bench"),
    "models": _bench_of_module("models.models_bench"),
    "gpu": _gpu,
    "gnn": _bench_of_module("gnn.gnn_bench"),
    "all": _run_all,
}
"""By name: a function that runs the benchmark, quickly or not, and returns the figures and a table."""
