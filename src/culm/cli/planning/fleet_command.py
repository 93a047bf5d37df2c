"""`culm plan --model NAME` without an instance: which fleet to rent for a deadline and a budget."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from culm.cli.planning import fleet_output, plan_output
from culm.cli.progress_display import make_console
from culm.errors import UsageError
from culm.estimates import plan_inputs
from culm.estimates.fleet_estimate import FleetRequest, search_fleets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from culm.plan.rent.fleet_search import FleetAnswer

_COUNT_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_TIME_UNITS = {"m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}


def print_fleets(request: FleetRequest, *, out: str | None, plot: str | None, json_: bool) -> None:
    """Search, simulate the answers and print them. Raises PlanError if no fleet is within the limits."""

    def write_plot(answer: FleetAnswer) -> None:
        if plot is not None:
            name = plan_inputs.load_model(request.model).name
            plan_output.write_text_file(plot, fleet_output.plot_html(answer, name))

    found = search_fleets(request, show_progress, write_plot)
    best = found.answer.cheapest
    assert best is not None
    if out is not None:
        plan_output.write_text_file(out, plan_output.plan_toml(best.option, found.model, best.query, best.source.offer))
    if json_:
        print(json.dumps(fleet_output.answer_json(found.answer, found.spreads, list(found.notes))))
    else:
        console = make_console(stderr=False)
        fleet_output.print_answer(console, found.answer, found.spreads, found.model, list(found.notes))


def parse_count(text: str) -> float:
    """Parse `--tokens 2B`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbgt]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UsageError(f"--tokens {text!r} is not a number of tokens: write it as in --tokens 2B")
    return float(match[1]) * _COUNT_UNITS[match[2]]


def parse_deadline(text: str | None) -> float:
    """Parse `--deadline 3d` to hours; infinite without it. Raises UsageError."""
    if text is None:
        return math.inf
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(min|m|h|d|w)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UsageError(f"--deadline {text!r} is not a time: write it as in --deadline 3d or --deadline 36h")
    return float(match[1]) * _TIME_UNITS[match[2]]


@contextmanager
def show_progress(text: str, *, after_s: float = 2.0) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr that disappears at the end; without a terminal a line every `after_s` seconds."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.fields[label]}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    printed_at = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", label=text, total=None)

        def show(done: int, total: int, name: str) -> None:
            nonlocal printed_at
            bar.update(task, completed=done, total=total, description=name)
            if not console.is_terminal and done < total and time.monotonic() - printed_at >= after_s:
                printed_at = time.monotonic()
                console.print(f"{text}: {done} of {total} ({name})", markup=False, highlight=False)

        yield show
