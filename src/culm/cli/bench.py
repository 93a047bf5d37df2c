"""`culm bench`: the benchmarks of the source tree, from the command line."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group

import culm
from culm.cli.failing import failing
from culm.errors import CulmError, UsageError


def bench(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="pipeline, resilience, planner, simulator, observe, dropping, gnn, or all."
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: a first impression.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Measure culm on this machine. Needs the source tree, where the benchmarks are."""
    with failing(debug=debug):
        if name not in BENCHES:
            close = difflib.get_close_matches(name, BENCHES, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(BENCHES)}"
            raise UsageError(f"there is no bench {name!r}: {hint}")
        _reach(source_tree())
        result, table = BENCHES[name](quick)
        if json_:
            print(json.dumps(result))
        else:
            Console().print(table)


def source_tree() -> Path:
    """The folder that holds benchmarks/ beside the package. Raises UsageError where culm came without it."""
    root = Path(culm.__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__init__.py").is_file():
        raise UsageError(
            "culm was installed without its benchmarks: clone the repository and install it with 'pip install -e .'"
        )
    return root


def _reach(root: Path) -> None:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def _pipeline(quick: bool) -> tuple[Any, Any]:
    from benchmarks.ours import CulmPool
    from benchmarks.probes import probes

    from benchmarks import pipeline

    with CulmPool() as pool:
        result = pipeline.run(quick=quick, probes=probes(pool, quick=quick), progress=_progress)
    return result, pipeline.table(result)


def _module(name: str) -> Callable[[bool], tuple[Any, Any]]:
    """A bench that is a module with run(quick=, progress=) and table()."""

    def run(quick: bool) -> tuple[Any, Any]:
        module = importlib.import_module(f"benchmarks.{name}")
        result = module.run(quick=quick, progress=_progress)
        return result, module.table(result)

    return run


def _resilience(quick: bool) -> tuple[Any, Any]:
    from benchmarks.ours import CulmPool

    from benchmarks import resilience, resilience_result

    with CulmPool() as pool:
        result = resilience.run(pool, quick=quick, progress=_progress)
    return result, resilience_result.table(result)


def _observe(quick: bool) -> tuple[Any, Any]:
    from benchmarks.ours import CulmPool

    from benchmarks import observe

    with CulmPool() as pool:
        result = observe.run(pool, quick=quick, progress=_progress)
    return result, observe.table(result)


def _all(quick: bool) -> tuple[Any, Any]:
    """One after the other. What can not be had on this machine says why in its place."""
    results: dict[str, Any] = {}
    tables: list[Any] = []
    for name, run in BENCHES.items():
        if run is _all:
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
    "planner": _module("planner"),
    "simulator": _module("simulator"),
    "observe": _observe,
    "dropping": _module("dropping"),
    "gnn": _module("gnn"),
    "all": _all,
}
"""By name: what runs it, quickly or not, and gives the figures and a table of them."""
