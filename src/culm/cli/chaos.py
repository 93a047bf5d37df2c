"""`culm chaos`: random runs that go wrong in random ways, each out of one seed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from culm.cli.failing import failing, say
from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.testing.chaos import Outcome, Scenario


def chaos(
    seeds: Annotated[int | None, typer.Option(help="How many seeds to try: 200 unless told.")] = None,
    first: Annotated[int | None, typer.Option(help="The first of them: 0 unless told.")] = None,
    seed: Annotated[int | None, typer.Option(help="Replay one seed, and print what happened.")] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="Draw from these only; may be given again.")] = None,
    changing: Annotated[bool, typer.Option("--changing", help="Only runs whose shape changes on the way.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Hurt simulated clusters at random, and check that each run learns what one process would."""
    with failing(debug=debug):
        numbers = _numbers(seeds, seed, first)
        from culm.testing.chaos import covered, draw, known

        strategies = known(strategy or ())
        began = time.monotonic()
        outcomes = _face([draw(number, strategies, changing=changing) for number in numbers])
        result = _result(outcomes, covered(o for o in outcomes if not o.failure), time.monotonic() - began)
        if json_:
            print(json.dumps(result))
        elif seed is not None:
            print(_replayed(outcomes[0]))
        else:
            Console().print(_table(result))
        _end(outcomes, [*(f"--strategy {name}" for name in strategy or ()), *["--changing"] * changing])


def _numbers(seeds: int | None, seed: int | None, first: int | None) -> Sequence[int]:
    for name, value in (("seeds", seeds), ("first", first)):
        if seed is not None and value is not None:
            raise UsageError(f"--seed {seed} replays one and --{name} {value} tries many: give one of them")
    for name, value, least in (("seed", seed, 0), ("seeds", seeds, 1), ("first", first, 0)):
        if value is not None and value < least:
            raise UsageError(f"--{name} is {value}: use a whole number of at least {least}")
    begin, count = first or 0, 200 if seeds is None else seeds
    return range(begin, begin + count) if seed is None else (seed,)


def _face(scenarios: Sequence[Scenario]) -> list[Outcome]:
    from culm.testing.chaos import face

    with _progress(len(scenarios)) as progress:
        return [progress(face(scenario)) for scenario in scenarios]


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on a terminal; in a log a line for each failure as it comes, and one every hundred."""
    console, seen = Console(stderr=True), [0, 0]
    columns = (TextColumn("survived"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, failed="")

        def note(outcome: Outcome) -> Outcome:
            seen[0] += not outcome.failure
            seen[1] += bool(outcome.failure)
            if outcome.failure:
                told = f"seed {outcome.scenario.seed}: {outcome.failure.splitlines()[0]}"
                bar.console.print(told, markup=False, highlight=False, soft_wrap=True)
            elif not console.is_terminal and sum(seen) % 100 == 0:
                console.print(f"{sum(seen)} of {total}, {seen[1]} failed")
            bar.update(task, completed=sum(seen), failed=f"{seen[1]} failed" if seen[1] else "")
            return outcome

        yield note


def _result(outcomes: Sequence[Outcome], covered: Mapping[str, Any], wall_s: float) -> dict[str, Any]:
    failed = [outcome for outcome in outcomes if outcome.failure]
    return {
        "seeds": len(outcomes),
        "survived": len(outcomes) - len(failed),
        "failed": [{"seed": o.scenario.seed, "scenario": str(o.scenario), "failure": o.failure} for o in failed],
        "covered": dict(covered),
        "wall_s": round(wall_s, 3),
    }


def _table(result: Mapping[str, Any]) -> Table:
    """What was covered, a line for each kind of thing."""
    title = f"{result['survived']} of {result['seeds']} seeds survived, in {result['wall_s']:.1f} s"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, counts in result["covered"].items():
        table.add_row(name, ", ".join(f"{what} {count}" for what, count in counts.items()))
    return table


def _replayed(outcome: Outcome) -> str:
    verdict = outcome.failure or f"survived, with {len(outcome.recoveries)} recoveries\n{outcome.history}"
    return f"{outcome.scenario}\n{verdict}"


def _end(outcomes: Sequence[Outcome], options: Sequence[str]) -> None:
    """Exit with 1 if a seed failed, and say how to see it again."""
    failed = [str(outcome.scenario.seed) for outcome in outcomes if outcome.failure]
    if not failed:
        return
    shown = ", ".join(failed[:10]) + (", ..." if len(failed) > 10 else "")
    again = " ".join(("culm chaos --seed", failed[0], *options))
    say(f"{len(failed)} of {len(outcomes)} seeds failed ({shown}): replay with {again}")
    raise typer.Exit(1)
