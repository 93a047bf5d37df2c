"""`culm chaos`: random simulated runs with random faults, each from one seed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from culm.cli.error_reporting import print_error, report_errors
from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.testing.chaos import ChaosResult, Scenario


def chaos(
    seeds: Annotated[int | None, typer.Option(help="How many seeds to try; default: 200.")] = None,
    first: Annotated[int | None, typer.Option(help="The first of them; default: 0.")] = None,
    seed: Annotated[int | None, typer.Option(help="Replay one seed and print its history.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Use only this strategy; repeatable.")
    ] = None,
    changing: Annotated[bool, typer.Option("--changing", help="Only runs whose shape changes on the way.")] = False,
    workers_per_node: Annotated[
        int | None,
        typer.Option(help="Workers of each node, which are lost together: 1, 2 or 3; default: drawn, mostly 1."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="With --seed: keep the run's files in this folder, as for culm replay."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON; all else goes to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Inject random faults into simulated clusters, and check that each run learns what one process would."""
    with report_errors(debug=debug):
        numbers = _seeds_to_run(seeds, seed, first)
        if out is not None:
            _check_folder(out, seed)
        from culm.testing.chaos import check_strategies, coverage

        strategies = check_strategies(strategy or ())
        began = time.monotonic()
        scenarios = [_scenario(number, strategies, changing, workers_per_node) for number in numbers]
        outcomes = _run_scenarios(scenarios, out)
        result = _result(outcomes, coverage(o for o in outcomes if not o.failure), time.monotonic() - began)
        if json_:
            print(json.dumps(result))
        elif seed is not None:
            print(_replay_text(outcomes[0]))
        else:
            Console().print(_table(result))
        given = [f"--strategy {name}" for name in strategy or ()] + ["--changing"] * changing
        given += [] if workers_per_node is None else [f"--workers-per-node {workers_per_node}"]
        _exit_on_failure(outcomes, given)


def _seeds_to_run(seeds: int | None, seed: int | None, first: int | None) -> Sequence[int]:
    for name, value in (("seeds", seeds), ("first", first)):
        if seed is not None and value is not None:
            raise UsageError(f"--seed {seed} replays one and --{name} {value} tries many: give one of them")
    for name, value, least in (("seed", seed, 0), ("seeds", seeds, 1), ("first", first, 0)):
        if value is not None and value < least:
            raise UsageError(f"--{name} is {value}: use a whole number of at least {least}")
    begin, count = first or 0, 200 if seeds is None else seeds
    return range(begin, begin + count) if seed is None else (seed,)


def _scenario(seed: int, strategies: Sequence[str], reshaping: bool, workers_per_node: int | None) -> Scenario:
    """The scenario of a seed; without `workers_per_node`, with as many as the seed draws."""
    from culm.testing.chaos import random_scenario, random_workers_per_node

    K = workers_per_node
    if K is None:
        K = random_workers_per_node(seed, strategies, reshaping=reshaping)
    return random_scenario(seed, strategies, reshaping=reshaping, workers_per_node=K)


def _check_folder(out: str, seed: int | None) -> None:
    if seed is None:
        raise UsageError("--out keeps the files of one run: name its seed with --seed")
    if Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise UsageError(f"--out {out} is not an empty folder: name another one")


def _run_scenarios(scenarios: Sequence[Scenario], out: str | None) -> list[ChaosResult]:
    from culm.testing.chaos import run_scenario

    with _progress(len(scenarios)) as progress:
        return [progress(run_scenario(scenario, out)) for scenario in scenarios]


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on a terminal; in a log, one line for each failure and one for every hundred seeds."""
    console, seen = Console(stderr=True), [0, 0]
    columns = (TextColumn("survived"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, failed="")

        def record(outcome: ChaosResult) -> ChaosResult:
            seen[0] += not outcome.failure
            seen[1] += bool(outcome.failure)
            if outcome.failure:
                line = f"seed {outcome.scenario.seed}: {outcome.failure.splitlines()[0]}"
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            elif not console.is_terminal and sum(seen) % 100 == 0:
                console.print(f"{sum(seen)} of {total}, {seen[1]} failed")
            bar.update(task, completed=sum(seen), failed=f"{seen[1]} failed" if seen[1] else "")
            return outcome

        yield record


def _result(outcomes: Sequence[ChaosResult], covered: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
    failed = [outcome for outcome in outcomes if outcome.failure]
    return {
        "seeds": len(outcomes),
        "survived": len(outcomes) - len(failed),
        "failed": [{"seed": o.scenario.seed, "scenario": str(o.scenario), "failure": o.failure} for o in failed],
        "covered": dict(covered),
        "wall_s": round(wall_s, 3),
    }


def _table(result: Mapping[str, Any]) -> Table:
    """What was covered, one row for each category."""
    title = f"{result['survived']} of {result['seeds']} seeds survived, in {result['wall_s']:.1f} s"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, counts in result["covered"].items():
        table.add_row(name, ", ".join(f"{what}: {count}" for what, count in counts.items()))
    return table


def _replay_text(outcome: ChaosResult) -> str:
    verdict = outcome.failure or f"survived, with {len(outcome.recoveries)} recoveries\n{outcome.history}"
    return f"{outcome.scenario}\n{verdict}"


def _exit_on_failure(outcomes: Sequence[ChaosResult], options: Sequence[str]) -> None:
    """Exit with code 1 if a seed failed, and print how to replay it."""
    failed = [str(outcome.scenario.seed) for outcome in outcomes if outcome.failure]
    if not failed:
        return
    shown = ", ".join(failed[:10]) + (", ..." if len(failed) > 10 else "")
    again = " ".join(("culm chaos --seed", failed[0], *options))
    print_error(f"{len(failed)} of {len(outcomes)} seeds failed ({shown}): replay with {again}")
    raise typer.Exit(1)
