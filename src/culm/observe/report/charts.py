"""Charts of a run: plotly figures as plain data, drawn by the script of the page. Pure; plotly is not imported.

Colours are legible on light and dark backgrounds; the page fills in text and grid colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from culm.observe.report.load_run import PerfettoTrace
from culm.observe.report.report_data import CurvePoint, EventMark, ReportData
from culm.schedule.timeline_render import KIND_COLOURS

PlotlyFigure = dict[str, Any]
LINE_COLOURS = ("#2f7ed8", "#e07b39", "#3a9d5d", "#a05bc4", "#c9434f", "#1f9e9e", "#b08a2e", "#7d7f86")
"""Colours of runs and series, in order."""
MARK_STYLES = {
    "lost": ("#d64550", "triangle-down"),
    "left": ("#d98e2b", "triangle-down"),
    "notice": ("#d9b52b", "diamond"),
    "joined": ("#3a9d5d", "triangle-up"),
    "recovered": ("#3a9d5d", "circle"),
    "reshaped": ("#8a63d2", "square"),
    "rewound": ("#8a63d2", "triangle-left"),
    "failed": ("#d64550", "x"),
}
_MAX_MARKS = 300
MAX_NODE_ROWS = 120
"""Nodes that a chart shows: those that joined last."""
_MAX_BARS = 1600
_INITIAL_STEPS = 3
"""Steps that a timeline shows before zooming out."""
_TIME_AXIS = "seconds"


def loss_chart(run: ReportData, *, over: str) -> PlotlyFigure:
    """Loss and evaluation loss over steps or seconds."""
    unit = "epoch" if run.graph else "step"
    found = [_curve(run.loss_curve, over, "loss", LINE_COLOURS[0])]
    if run.evaluation_curve:
        curve = _curve(run.evaluation_curve, over, "evaluation loss", LINE_COLOURS[1])
        found.append({**curve, "mode": "lines+markers", "marker": {"size": 5}})
    chart = figure(found, x=unit if over == "step" else _TIME_AXIS, y="loss")
    return add_marks(chart, run.marks) if over == "t" else chart


def value_chart(run: ReportData, name: str) -> PlotlyFigure:
    """A named value over steps."""
    curve = _curve(run.value_curves[name], "step", name, LINE_COLOURS[0])
    return figure([curve], x="epoch" if run.graph else "step", y=_escape_text(name))


def _curve(points: Sequence[CurvePoint], over: str, name: str, colour: str) -> PlotlyFigure:
    return line([getattr(p, over) for p in points], [p.value for p in points], name, colour)


def line(x: Sequence[float], y: Sequence[float], name: str, colour: str) -> PlotlyFigure:
    """A line; numbers are rounded to six digits."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": [_round(v) for v in x],
        "y": [_round(v) for v in y],
        "name": _escape_text(name),
        "line": {"color": colour, "width": 1.8},
    }


def _escape_text(text: str) -> str:
    """Escape text for plotly, which interprets tags."""
    return escape(text, quote=False)


def _round(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def figure(data: Sequence[PlotlyFigure], *, x: str, y: str, height: int = 300) -> PlotlyFigure:
    """A figure with named axes."""
    layout = {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
        "height": height,
        "showlegend": len([trace for trace in data if trace.get("showlegend", True)]) > 1,
    }
    return {"data": list(data), "layout": layout}


def pace_chart(run: ReportData) -> PlotlyFigure:
    """Samples per second in windows of time, and goodput: all samples over all time."""
    windows, whole = run.pace_curve, run.goodput_curve
    found = [
        {
            **line([t for t, _ in windows], [v for _, v in windows], "pace", LINE_COLOURS[0]),
            "line": _step_line(LINE_COLOURS[0]),
        },
        line([t for t, _ in whole], [v for _, v in whole], "goodput so far", LINE_COLOURS[1]),
    ]
    chart = figure(found, x=_TIME_AXIS, y="samples/s")
    chart["layout"]["yaxis"]["rangemode"] = "tozero"
    return add_marks(chart, run.marks, [(r.t - r.total_ms / 1e3, r.t) for r in run.recoveries if r.t is not None])


def _step_line(colour: str) -> PlotlyFigure:
    return {"color": colour, "width": 1.6, "shape": "hvh"}


def add_marks(
    chart: PlotlyFigure, marks: Sequence[EventMark], spans: Sequence[tuple[float, float]] = ()
) -> PlotlyFigure:
    """Add events as markers above the curves, with their sentence on hover, and shade the `spans`."""
    shown = list(marks)[-_MAX_MARKS:]
    for kind in dict.fromkeys(mark.kind for mark in shown):
        these = [mark for mark in shown if mark.kind == kind]
        colour, symbol = MARK_STYLES.get(kind, (LINE_COLOURS[-1], "circle"))
        chart["data"].append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": [_round(mark.t) for mark in these],
                "y": [0.98] * len(these),
                "yaxis": "y2",
                "text": [_escape_text(mark.text) for mark in these],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": colour, "symbol": symbol, "size": 9},
            }
        )
    lines = [
        {"type": "line", "x0": _round(mark.t), "x1": _round(mark.t), "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": MARK_STYLES[mark.kind][0], "width": 1, "dash": "dot"}}
        for mark in shown if mark.kind in ("lost", "left", "failed")
    ]  # fmt: skip
    shades = [
        {"type": "rect", "x0": _round(a), "x1": _round(b), "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 0},
         "fillcolor": "#d64550", "opacity": 0.14, "layer": "below"}
        for a, b in list(spans)[-_MAX_MARKS:]
    ]  # fmt: skip
    if shown:
        chart["layout"]["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
        chart["layout"]["showlegend"] = True
    chart["layout"]["shapes"] = shades + lines
    return chart


def node_chart(run: ReportData) -> PlotlyFigure | None:
    """A bar for each node while it was present, coloured by pipeline. None: there are no nodes."""
    presences = run.node_presences[-MAX_NODE_ROWS:]
    if not presences:
        return None
    rows = sorted(
        {_escape_text(presence.node) for presence in presences},
        key=lambda node: (len(node) if node.isdecimal() else 99, node),
    )
    bars: dict[str, list[tuple[float, float, str, str]]] = {}
    for presence in presences:
        end = run.last_event_t if presence.ended_at is None else presence.ended_at
        bars.setdefault("no slot", []).append(
            (presence.joined_at, end, presence.node, f"node {presence.node}: present, without a slot")
        )
        for a, b, slot in presence.assignments:
            name = f"pipeline {slot.partition('.')[0]}" if "." in slot else "in the epoch"
            text = f"node {presence.node}: slot {slot}{_epoch_words(run, a, b)}"
            bars.setdefault(name, []).append((a, b, presence.node, text))
    if run.graph:
        bars = {"present": [(a, b, node, text.partition(":")[0]) for a, b, node, text in bars["no slot"]]}
    names = sorted(bars, key=lambda name: (name.startswith("pipeline"), len(name), name))
    first = 0 if run.graph else -1
    colours = {
        name: "#9aa0aa" if name == "no slot" else LINE_COLOURS[i % len(LINE_COLOURS)]
        for i, name in enumerate(names, first)
    }
    found = [_bars(name, bars[name], colours[name]) for name in names]
    found += _departure_markers(presences)
    height = max(140, min(900, 110 + (24 if len(rows) <= 24 else 9) * len(rows)))
    chart = figure(found, x=_TIME_AXIS, y="node", height=height)
    chart["layout"] |= {"barmode": "overlay", "bargap": 0.25, "showlegend": True}
    chart["layout"]["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": rows[::-1]}
    chart["layout"]["yaxis"]["title"]["text"] = "" if run.graph else "node"
    return chart


def node_count_chart(run: ReportData) -> PlotlyFigure:
    """The number of nodes over time."""
    moments = sorted(
        [(p.joined_at, 1) for p in run.node_presences]
        + [(p.ended_at, -1) for p in run.node_presences if p.ended_at is not None]
    )
    totals = list(accumulate(change for _, change in moments))
    x = [t for t, _ in moments] + [run.last_event_t]
    curve = line(x, [*totals, totals[-1]], "nodes", LINE_COLOURS[0])
    chart = figure(
        [curve | {"line": {"color": LINE_COLOURS[0], "width": 1.8, "shape": "hv"}}], x=_TIME_AXIS, y="nodes", height=220
    )
    chart["layout"]["yaxis"]["rangemode"] = "tozero"
    return chart


def _epoch_words(run: ReportData, begin: float, end: float) -> str:
    """The epochs that began within a period, as words."""
    found = [number for t, number in run.epochs if begin <= t < end]
    if len(found) < 2:
        return f", epoch {found[0]}" if found else ""
    return f", epochs {found[0]} to {found[-1]}"


def _bars(name: str, bars: Sequence[tuple[float, float, str, str]], colour: str) -> PlotlyFigure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": _escape_text(name),
        "base": [_round(a) for a, *_ in bars],
        "x": [_round(b - a) for a, b, *_ in bars],
        "y": [_escape_text(node) for *_, node, _ in bars],
        "text": [_escape_text(text) for *_, text in bars],
        "textposition": "none",
        "customdata": [_round(b) for _, b, *_ in bars],
        "hovertemplate": "%{text}<br>%{base:.2f} to %{customdata:.2f} s<extra></extra>",
        "marker": {"color": colour, "opacity": 0.85},
    }


def _departure_markers(presences: Sequence[Any]) -> list[PlotlyFigure]:
    """Markers for nodes that were lost, left, or had notice."""
    found = []
    for kind in ("lost", "left"):
        ended = [(presence.ended_at, presence.node) for presence in presences if presence.end_reason == kind]
        found.append(_markers(kind, ended))
    found.append(_markers("notice", [(t, presence.node) for presence in presences for t in presence.notices]))
    return [dots for dots in found if dots["x"]]


def _markers(kind: str, at: Sequence[tuple[Any, str]]) -> PlotlyFigure:
    colour, _ = MARK_STYLES[kind]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": [_round(t) for t, _ in at],
        "y": [_escape_text(node) for _, node in at],
        "hovertemplate": f"node %{{y}}: {kind} at %{{x:.2f}} s<extra></extra>",
        "marker": {"color": colour, "symbol": "x" if kind == "lost" else "diamond", "size": 10},
    }


def action_timeline(trace: PerfettoTrace) -> PlotlyFigure | None:
    """The last actions of each node, coloured by kind as in schedule diagrams. None: the trace has no actions."""
    spans = [span for span in trace.traceEvents if span.ph == "X" and span.cat != "copy"]
    labels = {
        span.tid: _escape_text(str(span.args.get("name") or span.tid)) for span in trace.traceEvents if span.ph == "M"
    }
    if not spans:
        return None
    steps = sorted({_step_of(span) for span in spans}, reverse=True)
    counts = dict.fromkeys(steps, 0)
    for span in spans:
        counts[_step_of(span)] += 1
    first, total = steps[0], 0
    for step in steps:
        total += counts[step]
        if total > _MAX_BARS and step != steps[0]:
            break
        first = step
    shown = [span for span in spans if _step_of(span) >= first]
    zero = min(span.ts for span in shown)
    by_slot = sorted({span.tid for span in shown}, key=lambda tid: (labels.get(tid, "").partition(": ")[2], tid))
    rows = [labels.get(tid, str(tid)) for tid in by_slot]
    found = []
    for kind, (colour, meaning) in KIND_COLOURS.items():
        these = [span for span in shown if span.name.lstrip("0123456789")[:1] == kind]
        if these:
            found.append(_action_bars(f"{meaning} ({kind})", these, zero, labels, colour))
    chart = figure(found, x="milliseconds", y="", height=max(180, min(900, 120 + 30 * len(rows))))
    near = [span for span in shown if _step_of(span) > steps[0] - _INITIAL_STEPS]
    begin, end = min(span.ts for span in near), max(span.ts + span.dur for span in near)
    chart["layout"]["xaxis"]["range"] = [_round((begin - zero) / 1e3), _round((end - zero) / 1e3)]
    chart["layout"] |= {"barmode": "overlay", "bargap": 0.2, "showlegend": True}
    chart["layout"]["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": rows[::-1]}
    return chart


def _step_of(span: Any) -> int:
    found = span.args.get("step")
    return found if isinstance(found, int) else 0


def _action_bars(name: str, spans: Sequence[Any], zero: float, labels: Mapping[int, str], colour: str) -> PlotlyFigure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [_round((span.ts - zero) / 1e3) for span in spans],
        "x": [_round(span.dur / 1e3) for span in spans],
        "y": [labels.get(span.tid, str(span.tid)) for span in spans],
        "text": [_escape_text(f"{span.name} of step {_step_of(span)}") for span in spans],
        "textposition": "none",
        "hovertemplate": "%{text}: %{x:.3g} ms<extra></extra>",
        "marker": {"color": colour, "line": {"width": 0}},
    }


def accuracy_chart(run: ReportData) -> PlotlyFigure:
    """Graph runs: accuracy on the validation, test and training vertices."""
    found = []
    for name, label, colour in (
        ("val", "validation", LINE_COLOURS[0]),
        ("test", "test", LINE_COLOURS[1]),
        ("train", "train", LINE_COLOURS[2]),
    ):
        rows = [e for e in run.accuracies if isinstance(e.get(name), (int, float))]
        if rows:
            found.append(
                line([e["t"] for e in rows], [e[name] for e in rows], label, colour) | {"mode": "lines+markers"}
            )
    return add_marks(figure(found, x=_TIME_AXIS, y="accuracy"), run.marks)


def queue_chart(run: ReportData, names: Mapping[str, str], y: str) -> PlotlyFigure:
    """Graph runs: queue lengths and workers over time."""
    found = []
    for (name, label), colour in zip(names.items(), LINE_COLOURS, strict=False):
        rows = [e for e in run.queue_samples if isinstance(e.get(name), (int, float))]
        rows = rows[:: -(-len(rows) // 800) or 1]
        found.append(line([e["t"] for e in rows], [e[name] for e in rows], label, colour))
    chart = add_marks(figure(found, x=_TIME_AXIS, y=y, height=240), run.marks)
    chart["layout"]["yaxis"]["rangemode"] = "tozero"
    return chart


def compare_losses(runs: Sequence[ReportData], *, over: str) -> PlotlyFigure:
    """The losses of several runs in one chart."""
    return _compare_curves(runs, [run.loss_curve for run in runs], over, "loss")


def compare_values(runs: Sequence[ReportData], name: str) -> PlotlyFigure:
    """A named value of several runs in one chart, over steps."""
    return _compare_curves(runs, [run.value_curves.get(name, ()) for run in runs], "step", _escape_text(name))


def _compare_curves(
    runs: Sequence[ReportData], curves: Sequence[Sequence[CurvePoint]], over: str, y: str
) -> PlotlyFigure:
    """One curve for each run; later ones are dashed, so that equal curves remain visible."""
    found = []
    for number, (run, points) in enumerate(zip(runs, curves, strict=True)):
        curve = _curve(points, over, run.name, LINE_COLOURS[number % len(LINE_COLOURS)])
        found.append(curve | {"line": {**curve["line"], "dash": ("solid", "dash", "dot", "dashdot")[number % 4]}})
    unit = "epoch" if all(run.graph for run in runs) else "step"
    return figure(found, x=unit if over == "step" else _TIME_AXIS, y=y, height=340)


def compare_paces(runs: Sequence[ReportData]) -> PlotlyFigure:
    """Samples per second of several runs in one chart."""
    found = []
    for number, run in enumerate(runs):
        windows = run.pace_curve
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        curve = line([t for t, _ in windows], [v for _, v in windows], run.name, colour)
        found.append(curve | {"line": _step_line(colour)})
    chart = figure(found, x=_TIME_AXIS, y="samples/s")
    chart["layout"]["yaxis"]["rangemode"] = "tozero"
    return chart
