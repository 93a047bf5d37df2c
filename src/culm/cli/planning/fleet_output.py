"""Output of a search over instances: the answers, a table, a plot of cost against time in text and HTML, JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from culm.cli.planning.plan_output import choice_json, fleet_json
from culm.estimates.fleet_estimate import fleets_to_show
from culm.market.catalogue import MAX_AGE_DAYS
from culm.plan.rent.fleet_search import Fleet, FleetAnswer, explain_fleet
from culm.text_format import format_hours

if TYPE_CHECKING:
    from rich.console import Console

    from culm.sim.fleet_spread import FleetSpread

_PLOT_ROWS = 16
_MAX_TABLE_WIDTH = 500


def print_answer(
    console: Console, answer: FleetAnswer, spreads: Mapping[int, FleetSpread], name: str, notes: Sequence[str]
) -> None:
    """Print the two answers with their reasons, the table and the plot."""
    cheapest, fastest = answer.cheapest, answer.fastest
    assert cheapest is not None and fastest is not None, "there is an answer"
    console.print(f"[bold]{name}[/bold]: {answer.goal.samples:,.0f} samples{_limits(answer)}")
    for label, fleet in (("cheapest", cheapest), ("fastest", fastest)):
        if label == "fastest" and fleet is cheapest:
            console.print("[bold]fastest[/bold]   the same")
            continue
        console.print(f"[bold]{label:<9}[/bold] [green]{fleet.title}[/green]: {_summary(fleet, spreads)}")
        for reason in explain_fleet(fleet, answer):
            console.print(f"          {reason}", highlight=False, style="dim")
    if (old := answer.cheapest_by_old_price) is not None:
        console.print(
            f"[bold]old price[/bold] {old.title}: {_summary(old, spreads)}. Its price is more than {MAX_AGE_DAYS} days "
            "old: compare today's before you choose it",
            highlight=False,
        )
    _print_uncut(console, _fleet_table(answer, spreads))
    console.print(_text_plot(answer, console.width))
    for note in notes:
        console.print(f"note: {note}", highlight=False)


def _print_uncut(console: Console, table: Table) -> None:
    """Print a table at least as wide as its columns need: a wrapped line is better than a number that is cut off."""
    width = console.width
    needed = Measurement.get(console, console.options.update_width(_MAX_TABLE_WIDTH), table).maximum
    console.width = max(width, needed)
    console.print(table)
    console.width = width


def _limits(answer: FleetAnswer) -> str:
    goal = answer.goal
    deadline = f" within {format_hours(goal.deadline_h)}" if math.isfinite(goal.deadline_h) else ""
    budget = f" for at most {goal.budget_usd_per_h:g} $/h" if math.isfinite(goal.budget_usd_per_h) else ""
    budget += f" and {goal.max_usd:,.0f} $ in all" if math.isfinite(goal.max_usd) else ""
    count = f"{answer.within_limits} of {len(answer.fleets)} fleets are within the limits"
    return f"{deadline}{budget}; {count}" if deadline or budget else f"; {len(answer.fleets)} fleets were compared"


def _summary(fleet: Fleet, spreads: Mapping[int, FleetSpread]) -> str:
    spread = spreads.get(id(fleet))
    usd = f" ({spread.usd[0]:,.0f} to {spread.usd[2]:,.0f})" if spread else ""
    hours = f" ({format_hours(spread.hours[0])} to {format_hours(spread.hours[2])})" if spread else ""
    odds = ""
    if spread is not None and spread.kept is not None:
        odds = f"; within the limits in {spread.kept:.0%} of {spread.runs} markets"
    return (
        f"{fleet.usd:,.0f} ${usd}, done in {format_hours(fleet.hours)}{hours}, {fleet.option.usd_per_h:,.2f} $/h{odds}"
    )


def _fleet_table(answer: FleetAnswer, spreads: Mapping[int, FleetSpread]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "fleet", "market"):
        table.add_column(column, no_wrap=True)
    table.add_column("D x P", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    with_odds = any(spread.kept is not None for spread in spreads.values())
    for column in ("$/h", "done in", "10-90 %", "cost $", "10-90 %", *(["odds"] if with_odds else [])):
        table.add_column(column, justify="right", no_wrap=True)
    frontier = {id(fleet) for fleet in answer.frontier()}
    for fleet in fleets_to_show(answer):
        marks = {id(answer.cheapest): "$", id(answer.fastest): ">"}
        spread = spreads.get(id(fleet))
        mark = marks.get(id(fleet), "*" if id(fleet) in frontier else "")
        table.add_row(
            mark,
            f"{fleet.nodes} x {fleet.source.offer.instance}",
            f"{fleet.source.market}{' (old)' if fleet.source.is_old else ''}",
            fleet.option.shape,
            fleet.option.strategy,
            f"{fleet.option.usd_per_h:,.2f}",
            format_hours(fleet.hours),
            _hour_range(spread) if spread else "-",
            f"{fleet.usd:,.0f}",
            f"{spread.usd[0]:,.0f}-{spread.usd[2]:,.0f}" if spread else "-",
            *([f"{spread.kept:.0%}" if spread and spread.kept is not None else "-"] if with_odds else []),
            style="" if mark else "dim",
        )
    odds = "odds: share of these markets within --deadline and --max-cost; " if with_odds else ""
    old = f"; (old): a price of more than {MAX_AGE_DAYS} days ago, not among the answers"
    table.caption = (
        "$ cheapest, > fastest, * no other is both faster and cheaper; D x P: pipelines x stages; $/h: with every node "
        f"present; done in, cost: on spot the median and the 10-90 % range of simulated markets; {odds}"
        f"fleet: nodes x instance{old if any(fleet.source.is_old for fleet in fleets_to_show(answer)) else ''}"
    )
    table.caption_justify = "left"
    return table


def _hour_range(spread: FleetSpread) -> str:
    low, _, high = spread.hours
    if math.isinf(high):
        return f"{format_hours(low)}-never"
    (first, unit), (last, other) = (format_hours(hours).split(" ") for hours in (low, high))
    return f"{first}-{last} {unit}" if unit == other else f"{first} {unit}-{last} {other}"


def _text_plot(answer: FleetAnswer, width: int) -> Text:
    """Cost (upwards) against time (to the right), both logarithmic; one mark for each fleet."""
    columns = max(40, min(width, 100) - 12)
    estimated = [*answer.fleets, *(answer.finalists or ())]
    fleets = [fleet for fleet in estimated if 0 < fleet.usd < math.inf and 0 < fleet.hours < math.inf]
    xs, ys = [math.log(fleet.hours) for fleet in fleets], [math.log(fleet.usd) for fleet in fleets]
    grid = [[(" ", "")] * columns for _ in range(_PLOT_ROWS)]
    frontier = {id(fleet) for fleet in answer.frontier()}
    ranked = sorted(zip(fleets, xs, ys, strict=True), key=lambda item: _rank(item[0], answer, frontier))
    for fleet, x, y in ranked:
        row = _PLOT_ROWS - 1 - _cell(y, ys, _PLOT_ROWS)
        grid[row][_cell(x, xs, columns)] = _mark(fleet, answer, frontier)
    plot = Text("cost $\n")
    for index, line in enumerate(grid):
        at = math.exp(max(ys) - (max(ys) - min(ys)) * index / (_PLOT_ROWS - 1))
        plot.append(f"{at:>9,.0f} |" if index % 5 == 0 else " " * 10 + "|", style="dim")
        for mark, style in line:
            plot.append(mark, style=style)
        plot.append("\n")
    plot.append(" " * 10 + "+" + "-" * columns + "\n", style="dim")
    plot.append(" " * 11 + _time_labels(xs, columns) + "\n", style="dim")
    plot.append(
        " " * 11
        + "done in; both axes are logarithmic. $ cheapest  > fastest  o spot  + on demand  . outside the limits",
        style="dim",
    )
    return plot


def _time_labels(logarithms: Sequence[float], columns: int) -> str:
    """Times under an axis of so many columns: both ends and the quarters between."""
    low, high = min(logarithms), max(logarithms)
    labels = [format_hours(math.exp(low + (high - low) * quarter / 4)) for quarter in range(5)]
    line = labels[0]
    for quarter, label in enumerate(labels[1:], 1):
        line = f"{line:<{columns * quarter // 4 - (len(label) if quarter == 4 else len(label) // 2)}}{label}"
    return line


def _cell(value: float, values: Sequence[float], cells: int) -> int:
    low, high = min(values), max(values)
    return round((value - low) / (high - low) * (cells - 1)) if high > low else 0


def _rank(fleet: Fleet, answer: FleetAnswer, frontier: set[int]) -> int:
    """Marks that are drawn later cover earlier ones."""
    return 2 * (id(fleet) in frontier or fleet is answer.cheapest) + fleet.meets(answer.goal)


def _mark(fleet: Fleet, answer: FleetAnswer, frontier: set[int]) -> tuple[str, str]:
    if fleet is answer.cheapest:
        return "$", "bold green"
    if fleet is answer.fastest:
        return ">", "bold yellow"
    if not fleet.meets(answer.goal):
        return ".", "dim"
    return ("o" if fleet.source.spot else "+"), ("bold cyan" if id(fleet) in frontier else "")


def plot_html(answer: FleetAnswer, name: str) -> str:
    """An HTML page with every fleet as a point; the details of a fleet appear when it is pointed at."""
    import plotly.graph_objects as go  # type: ignore[import-untyped]

    figure = go.Figure()
    groups: dict[tuple[str, str], list[Fleet]] = {}
    for fleet in answer.fleets:
        groups.setdefault((fleet.source.cloud, fleet.source.market), []).append(fleet)
    for (cloud, market), fleets in sorted(groups.items()):
        figure.add_scatter(
            x=[fleet.hours for fleet in fleets],
            y=[fleet.usd for fleet in fleets],
            mode="markers",
            name=f"{cloud}, {market}",
            marker={
                "symbol": "circle" if market == "spot" else "x",
                "opacity": [1.0 if fleet.meets(answer.goal) else 0.25 for fleet in fleets],
            },
            text=[_hover_text(fleet) for fleet in fleets],
            hovertemplate="%{text}<br>%{x:.3g} h, %{y:,.0f} $<extra></extra>",
        )
    frontier = answer.frontier()
    figure.add_scatter(
        x=[fleet.hours for fleet in frontier],
        y=[fleet.usd for fleet in frontier],
        mode="lines",
        name="no other is faster and cheaper",
        line={"dash": "dot", "color": "gray"},
    )
    if math.isfinite(answer.goal.deadline_h):
        figure.add_vline(x=answer.goal.deadline_h, annotation_text="deadline", line_dash="dash")
    figure.update_layout(
        title=f"{name}: cost against time, {answer.goal.samples:,.0f} samples",
        xaxis={"type": "log", "title": "hours"},
        yaxis={"type": "log", "title": "dollars"},
    )
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def _hover_text(fleet: Fleet) -> str:
    option = fleet.option
    return f"{fleet.title}<br>{option.shape}, {option.strategy}<br>{option.usd_per_h:.2f} $/h"


def answer_json(answer: FleetAnswer, spreads: Mapping[int, FleetSpread], notes: Sequence[str]) -> dict[str, Any]:
    """Scripts rely on the keys; `nodes`, `workers` and `cost_per_h` are those of the cheapest fleet."""
    cheapest, fastest, goal = answer.cheapest, answer.fastest, answer.goal
    assert cheapest is not None and fastest is not None, "there is an answer"
    return {
        "goal": {
            "samples": goal.samples,
            "deadline_h": goal.deadline_h if math.isfinite(goal.deadline_h) else None,
            "max_usd": goal.max_usd if math.isfinite(goal.max_usd) else None,
            "budget_usd_per_h": goal.budget_usd_per_h if math.isfinite(goal.budget_usd_per_h) else None,
        },
        **fleet_json(cheapest.option),
        "cheapest": _fleet_details(cheapest, spreads) | {"why": explain_fleet(cheapest, answer)},
        "fastest": _fleet_details(fastest, spreads) | {"why": explain_fleet(fastest, answer)},
        "fleets": [_fleet_details(fleet, spreads) for fleet in fleets_to_show(answer)],
        "compared": len(answer.fleets),
        "feasible": answer.within_limits,
        "notes": list(notes),
    }


def _fleet_details(fleet: Fleet, spreads: Mapping[int, FleetSpread]) -> dict[str, Any]:
    spread = spreads.get(id(fleet))
    return {
        "cloud": fleet.source.cloud,
        "instance": fleet.source.offer.instance,
        "market": fleet.source.market,
        "hours": fleet.hours,
        "usd": fleet.usd,
        "spread": spread.as_json() if spread else None,
        **choice_json(fleet.option),
    }
