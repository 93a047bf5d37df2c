"""`culm trace`: market traces, which record when machines were available: from files or generated from a seed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich import box
from rich.table import Table

from culm.cli.error_reporting import report_errors
from culm.cli.progress_display import make_console
from culm.cli.run_tables import key_value_table
from culm.errors import UsageError
from culm.market.chart import ChartPanel, draw_svg, draw_text_chart
from culm.market.market_fit import fit_market
from culm.market.market_trace import HOUR, MarketTrace
from culm.market.trace_generator import MarketModel, generate_trace
from culm.market.trace_reader import TimeUnit, read_trace
from culm.market.trace_statistics import TraceStatistics, compute_statistics
from culm.market.trace_writer import TRACE_FORMATS, format_trace

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Market traces: when machines were available.")

_File = Annotated[Path, typer.Argument(metavar="FILE", help="A market trace in any known format.")]
_UnitOf = Annotated[str | None, typer.Option("--unit", help="Unit of times, if the guess is wrong: ms, s or h.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
_Out = Annotated[Path | None, typer.Option("--out", help="Write to this file instead of stdout.")]


@app.command()
def show(
    file: _File,
    unit: _UnitOf = None,
    picture: Annotated[Path | None, typer.Option("--svg", help="Also draw it to this file.")] = None,
    json_: _Json = False,
    debug: _Debug = False,
) -> None:
    """Draw a market trace and print its statistics."""
    with report_errors(debug=debug):
        trace = read_trace(file, unit=_parse_unit(unit))
        if picture is not None:
            write_file(
                picture,
                draw_svg(
                    trace.source, [ChartPanel("nodes alive", {"nodes": _alive_by_hour(trace)})], trace.span_s / HOUR
                ),
            )
        if json_:
            print(json.dumps(_trace_json(trace)))
        else:
            make_console(stderr=False).print(
                key_value_table(_statistics_rows(compute_statistics(trace)) | _note_rows(trace))
            )
            print(draw_text_chart(_alive_by_hour(trace), trace.span_s / HOUR), end="")


@app.command()
def convert(
    file: _File,
    to: Annotated[str, typer.Option("--to", help=f"{', '.join(TRACE_FORMATS)}.")] = "culm",
    unit: _UnitOf = None,
    gap: Annotated[float, typer.Option(help="Seconds between two ticks of the format skypilot.")] = 60.0,
    out: _Out = None,
    debug: _Debug = False,
) -> None:
    """Convert a market trace to another format."""
    with report_errors(debug=debug):
        print_or_write(format_trace(read_trace(file, unit=_parse_unit(unit)), to, gap_s=gap), out)


@app.command()
def generate(
    market: Annotated[str, typer.Option(help="As in nodes=48,hours=24,rate=0.10,group=2.1,zones=3.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same trace.")] = 0,
    to: Annotated[str, typer.Option("--to", help=f"{', '.join(TRACE_FORMATS)}.")] = "culm",
    out: _Out = None,
    debug: _Debug = False,
) -> None:
    """Generate a market trace from a seed: losses in groups per zone, lifetimes with a heavy tail."""
    with report_errors(debug=debug):
        print_or_write(format_trace(generate_trace(MarketModel.parse(market), seed), to), out)


@app.command()
def fit(
    file: _File,
    zones: Annotated[int | None, typer.Option(min=1, help="Zones of the market, where the trace names none.")] = None,
    unit: _UnitOf = None,
    json_: _Json = False,
    debug: _Debug = False,
) -> None:
    """Fit a market model to a trace, so that it generates similar ones."""
    with report_errors(debug=debug):
        fitted = fit_market(read_trace(file, unit=_parse_unit(unit)), zones=zones)
        text = market_text(fitted.market)
        if json_:
            numbers = {"given": _statistics_json(fitted.target), "generated": _statistics_json(fitted.achieved)}
            print(json.dumps({"market": asdict(fitted.market), **numbers, "option": text}))
            return
        table = Table("", "trace", "generated", box=box.SIMPLE, pad_edge=False)
        given, generated = _statistics_rows(fitted.target), _statistics_rows(fitted.achieved)
        for name in given:
            table.add_row(name, given[name], generated[name])
        make_console(stderr=False).print(table)
        print(f"--market {text}")


def market_text(market: MarketModel) -> str:
    """A market as text for `--market`."""
    return ",".join(f"{f.name}={getattr(market, f.name):.6g}" for f in fields(MarketModel))


def print_or_write(text: str, out: Path | None) -> None:
    """Write text to the file, or print it."""
    if out is None:
        print(text, end="")
    else:
        write_file(out, text)


def write_file(path: Path, text: str) -> None:
    """Write a file. Raises UsageError if that fails."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} could not be written: {error.strerror}") from error


def _parse_unit(text: str | None) -> TimeUnit | None:
    if text is None or text in get_args(TimeUnit):
        return cast("TimeUnit | None", text)
    raise UsageError(f"--unit is {text!r}: use ms, s or h")


def _alive_by_hour(trace: MarketTrace) -> list[tuple[float, float]]:
    return [(0.0, 0.0), *((count.t / HOUR, float(count.alive)) for count in trace.counts)]


def _trace_json(trace: MarketTrace) -> dict[str, Any]:
    counts = [[count.t, count.alive] for count in trace.counts]
    return {
        **_statistics_json(compute_statistics(trace)),
        "zones": list(trace.zones),
        "notes": list(trace.notes),
        "counts": counts,
    }


def _statistics_json(statistics: TraceStatistics) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in asdict(statistics).items()}


def _statistics_rows(statistics: TraceStatistics) -> dict[str, str]:
    return {
        "span": f"{statistics.span_h:.1f} h",
        "nodes": f"{statistics.alive:.1f} alive on average, {statistics.peak:.3g} at most ({statistics.fraction:.0%})",
        "events": f"{statistics.adds:.4g} added, {statistics.removes:.4g} lost",
        "rate": f"{statistics.rate:.1%} of the nodes are lost per hour",
        "groups": f"{statistics.group:.2f} lost at once on {statistics.moments:.4g} occasions, "
        f"{statistics.largest:.3g} at most",
        "median life": f"{statistics.life_h * 60:.0f} min" if not math.isnan(statistics.life_h) else "no node was lost",
    }


def _note_rows(trace: MarketTrace) -> dict[str, str]:
    zones = {"zones": ", ".join(trace.zones)} if trace.zones else {}
    return zones | {f"note {number}": note for number, note in enumerate(trace.notes, 1)}
