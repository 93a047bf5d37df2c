"""`culm trace`: how machines came and went, from files or out of a seed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich import box
from rich.table import Table

from culm.cli.display import console_on
from culm.cli.failing import failing
from culm.cli.tables import facts
from culm.errors import UsageError
from culm.market.chart import Panel, bars, svg
from culm.market.fit import fit as fit_market
from culm.market.generate import Market
from culm.market.generate import generate as generate_trace
from culm.market.reading import Unit, read_trace
from culm.market.statistics import Statistics, statistics
from culm.market.trace import HOUR, Trace
from culm.market.writing import FORMS, written

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Traces of machines that come and go.")

_File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace of any known form.")]
_UnitOf = Annotated[str | None, typer.Option("--unit", help="What times are in, where the guess is wrong: ms, s or h.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Debug = Annotated[bool, typer.Option("--debug", help="Show where an error came from.")]
_Out = Annotated[Path | None, typer.Option("--out", help="Write it there instead of printing it.")]


@app.command()
def show(
    file: _File,
    unit: _UnitOf = None,
    picture: Annotated[Path | None, typer.Option("--svg", help="Draw it into this file too.")] = None,
    json_: _Json = False,
    debug: _Debug = False,
) -> None:
    """Draw a trace, and say what it comes to."""
    with failing(debug=debug):
        trace = read_trace(file, unit=_unit(unit))
        if picture is not None:
            write(picture, svg(trace.source, [Panel("nodes alive", {"nodes": _hours(trace)})], trace.span_s / HOUR))
        if json_:
            print(json.dumps(_described(trace)))
        else:
            console_on(stderr=False).print(facts(_rows(statistics(trace)) | _notes(trace)))
            print(bars(_hours(trace), trace.span_s / HOUR), end="")


@app.command()
def convert(
    file: _File,
    to: Annotated[str, typer.Option("--to", help=f"{', '.join(FORMS)}.")] = "culm",
    unit: _UnitOf = None,
    gap: Annotated[float, typer.Option(help="Seconds between two ticks of the form skypilot.")] = 60.0,
    out: _Out = None,
    debug: _Debug = False,
) -> None:
    """Write a trace in another form."""
    with failing(debug=debug):
        put(written(read_trace(file, unit=_unit(unit)), to, gap_s=gap), out)


@app.command()
def generate(
    market: Annotated[str, typer.Option(help="As in nodes=48,hours=24,rate=0.10,group=2.1,zones=3.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same trace.")] = 0,
    to: Annotated[str, typer.Option("--to", help=f"{', '.join(FORMS)}.")] = "culm",
    out: _Out = None,
    debug: _Debug = False,
) -> None:
    """Make a trace out of a seed: losses in groups per zone, lives with a heavy tail."""
    with failing(debug=debug):
        put(written(generate_trace(Market.parse(market), seed), to), out)


@app.command()
def fit(
    file: _File,
    zones: Annotated[int | None, typer.Option(min=1, help="Zones of the market, where the trace names none.")] = None,
    unit: _UnitOf = None,
    json_: _Json = False,
    debug: _Debug = False,
) -> None:
    """Find a market whose traces are like this one."""
    with failing(debug=debug):
        found = fit_market(read_trace(file, unit=_unit(unit)), zones=zones)
        text = market_text(found.market)
        if json_:
            numbers = {"given": _numbers(found.given), "generated": _numbers(found.generated)}
            print(json.dumps({"market": asdict(found.market), **numbers, "option": text}))
            return
        table = Table("", "trace", "generated", box=box.SIMPLE, pad_edge=False)
        given, generated = _rows(found.given), _rows(found.generated)
        for name in given:
            table.add_row(name, given[name], generated[name])
        console_on(stderr=False).print(table)
        print(f"--market {text}")


def market_text(market: Market) -> str:
    """A market as `--market` takes it."""
    return ",".join(f"{f.name}={getattr(market, f.name):.6g}" for f in fields(Market))


def put(text: str, out: Path | None) -> None:
    """To the file, or to stdout."""
    if out is None:
        print(text, end="")
    else:
        write(out, text)


def write(path: Path, text: str) -> None:
    """Raises UsageError where the place can not be written."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} could not be written: {error.strerror}") from error


def _unit(text: str | None) -> Unit | None:
    if text is None or text in get_args(Unit):
        return cast("Unit | None", text)
    raise UsageError(f"--unit is {text!r}: use ms, s or h")


def _hours(trace: Trace) -> list[tuple[float, float]]:
    return [(0.0, 0.0), *((count.t / HOUR, float(count.alive)) for count in trace.counts)]


def _described(trace: Trace) -> dict[str, Any]:
    counts = [[count.t, count.alive] for count in trace.counts]
    return {**_numbers(statistics(trace)), "zones": list(trace.zones), "notes": list(trace.notes), "counts": counts}


def _numbers(found: Statistics) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in asdict(found).items()}


def _rows(found: Statistics) -> dict[str, str]:
    return {
        "span": f"{found.span_h:.1f} h",
        "nodes": f"{found.alive:.1f} alive on average, {found.peak:.3g} at most ({found.fraction:.0%})",
        "events": f"{found.adds:.4g} added, {found.removes:.4g} lost",
        "rate": f"{found.rate:.1%} of the living are lost in an hour",
        "groups": f"{found.group:.2f} lost at once at {found.moments:.4g} moments, {found.largest:.3g} at most",
        "median life": f"{found.life_h * 60:.0f} min" if not math.isnan(found.life_h) else "nobody was lost",
    }


def _notes(trace: Trace) -> dict[str, str]:
    zones = {"zones": ", ".join(trace.zones)} if trace.zones else {}
    return zones | {f"note {number}": note for number, note in enumerate(trace.notes, 1)}
