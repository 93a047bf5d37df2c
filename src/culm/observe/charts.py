"""Facts as charts: figures of plotly as plain data, for the script that pages carry. Pure; plotly is not imported.

Colours are legible on light and on dark; what depends on the page (ink, grid) is filled in there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

from culm.observe.facts import Facts, Mark
from culm.observe.reading import Trace
from culm.schedule.show import COLOURS

Figure = dict[str, Any]
LINES = ("#2f7ed8", "#e07b39", "#3a9d5d", "#a05bc4", "#c9434f", "#1f9e9e", "#b08a2e", "#7d7f86")
"""Of runs and series, one after the other."""
MARKS = {
    "lost": ("#d64550", "triangle-down"),
    "left": ("#d98e2b", "triangle-down"),
    "notice": ("#d9b52b", "diamond"),
    "came": ("#3a9d5d", "triangle-up"),
    "recovered": ("#3a9d5d", "circle"),
    "reshaped": ("#8a63d2", "square"),
    "rewound": ("#8a63d2", "triangle-left"),
    "failed": ("#d64550", "x"),
}
_MOST_MARKS = 300
MOST_ROWS = 120
"""Of nodes, the last that came."""
_MOST_BARS = 1600
_NEAR = 3
"""Steps that a timeline shows at first."""
_TIME = "seconds"


def losses(run: Facts, *, over: str) -> Figure:
    """Loss and evaluation loss over steps or seconds."""
    unit = "epoch" if run.graph else "step"
    found = [_curve(run.losses, over, "loss", LINES[0])]
    if run.evaluations:
        curve = _curve(run.evaluations, over, "evaluation loss", LINES[1])
        found.append({**curve, "mode": "lines+markers", "marker": {"size": 5}})
    made = figure(found, x=unit if over == "step" else _TIME, y="loss")
    return with_marks(made, run.marks) if over == "t" else made


def _curve(points: Sequence[Any], over: str, name: str, colour: str) -> Figure:
    return line([getattr(p, over) for p in points], [p.value for p in points], name, colour)


def line(x: Sequence[float], y: Sequence[float], name: str, colour: str) -> Figure:
    """A line; numbers are cut to what can be seen."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": [_short(v) for v in x],
        "y": [_short(v) for v in y],
        "name": _said(name),
        "line": {"color": colour, "width": 1.8},
    }


def _said(text: str) -> str:
    """As it stands: plotly takes < for a tag."""
    return escape(text, quote=False)


def _short(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def figure(data: Sequence[Figure], *, x: str, y: str, height: int = 300) -> Figure:
    """Axes with names, for some traces."""
    layout = {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}},
        "height": height,
        "showlegend": len([trace for trace in data if trace.get("showlegend", True)]) > 1,
    }
    return {"data": list(data), "layout": layout}


def pace(run: Facts) -> Figure:
    """Samples a second in windows of time, and the goodput: all samples over all time."""
    windows, whole = run.paces, run.goodputs
    found = [
        {**line([t for t, _ in windows], [v for _, v in windows], "pace", LINES[0]), "line": _stepped(LINES[0])},
        line([t for t, _ in whole], [v for _, v in whole], "goodput so far", LINES[1]),
    ]
    made = figure(found, x=_TIME, y="samples/s")
    made["layout"]["yaxis"]["rangemode"] = "tozero"
    return with_marks(made, run.marks, [(r.t - r.total_ms / 1e3, r.t) for r in run.recoveries if r.t is not None])


def _stepped(colour: str) -> Figure:
    return {"color": colour, "width": 1.6, "shape": "hvh"}


def with_marks(made: Figure, marks: Sequence[Mark], spans: Sequence[tuple[float, float]] = ()) -> Figure:
    """What befell the run, above the curves: who looks at one sees what it was. `spans` are shaded."""
    shown = list(marks)[-_MOST_MARKS:]
    for kind in dict.fromkeys(mark.kind for mark in shown):
        these = [mark for mark in shown if mark.kind == kind]
        colour, symbol = MARKS.get(kind, (LINES[-1], "circle"))
        made["data"].append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": [_short(mark.t) for mark in these],
                "y": [0.98] * len(these),
                "yaxis": "y2",
                "text": [_said(mark.text) for mark in these],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": colour, "symbol": symbol, "size": 9},
            }
        )
    lines = [
        {"type": "line", "x0": _short(mark.t), "x1": _short(mark.t), "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": MARKS[mark.kind][0], "width": 1, "dash": "dot"}}
        for mark in shown if mark.kind in ("lost", "left", "failed")
    ]  # fmt: skip
    shades = [
        {"type": "rect", "x0": _short(a), "x1": _short(b), "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 0},
         "fillcolor": "#d64550", "opacity": 0.14, "layer": "below"}
        for a, b in list(spans)[-_MOST_MARKS:]
    ]  # fmt: skip
    if shown:
        made["layout"]["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
        made["layout"]["showlegend"] = True
    made["layout"]["shapes"] = shades + lines
    return made


def nodes(run: Facts) -> Figure | None:
    """A bar for each node while it was there, by the pipeline that it was in; the colour says which."""
    stays = run.stays[-MOST_ROWS:]
    if not stays:
        return None
    rows = sorted({_said(stay.node) for stay in stays}, key=lambda node: (len(node) if node.isdecimal() else 99, node))
    bars: dict[str, list[tuple[float, float, str, str]]] = {}
    for stay in stays:
        end = run.ends_at if stay.gone is None else stay.gone
        bars.setdefault("no slot", []).append((stay.came, end, stay.node, f"node {stay.node}: there, without a slot"))
        for a, b, slot in stay.posts:
            name = f"pipeline {slot.partition('.')[0]}" if "." in slot else "in the epoch"
            text = f"node {stay.node}: slot {slot}{_epochs(run, a, b)}"
            bars.setdefault(name, []).append((a, b, stay.node, text))
    if run.graph:
        bars = {"there": [(a, b, node, text.partition(":")[0]) for a, b, node, text in bars["no slot"]]}
    names = sorted(bars, key=lambda name: (name.startswith("pipeline"), len(name), name))
    first = 0 if run.graph else -1
    colours = {name: "#9aa0aa" if name == "no slot" else LINES[i % len(LINES)] for i, name in enumerate(names, first)}
    found = [_bars(name, bars[name], colours[name]) for name in names]
    found += _ends(stays)
    height = max(140, min(900, 110 + (24 if len(rows) <= 24 else 9) * len(rows)))
    made = figure(found, x=_TIME, y="node", height=height)
    made["layout"] |= {"barmode": "overlay", "bargap": 0.25, "showlegend": True}
    made["layout"]["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": rows[::-1]}
    made["layout"]["yaxis"]["title"]["text"] = "" if run.graph else "node"
    return made


def crowd(run: Facts) -> Figure:
    """How many nodes were there."""
    moments = sorted([(s.came, 1) for s in run.stays] + [(s.gone, -1) for s in run.stays if s.gone is not None])
    totals = list(accumulate(change for _, change in moments))
    x = [t for t, _ in moments] + [run.ends_at]
    curve = line(x, [*totals, totals[-1]], "nodes", LINES[0])
    made = figure([curve | {"line": {"color": LINES[0], "width": 1.8, "shape": "hv"}}], x=_TIME, y="nodes", height=220)
    made["layout"]["yaxis"]["rangemode"] = "tozero"
    return made


def _epochs(run: Facts, begin: float, end: float) -> str:
    """Those that lie in a stretch of time."""
    found = [number for t, number in run.epochs if begin <= t < end]
    if len(found) < 2:
        return f", epoch {found[0]}" if found else ""
    return f", epochs {found[0]} to {found[-1]}"


def _bars(name: str, bars: Sequence[tuple[float, float, str, str]], colour: str) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": _said(name),
        "base": [_short(a) for a, *_ in bars],
        "x": [_short(b - a) for a, b, *_ in bars],
        "y": [_said(node) for *_, node, _ in bars],
        "text": [_said(text) for *_, text in bars],
        "textposition": "none",
        "customdata": [_short(b) for _, b, *_ in bars],
        "hovertemplate": "%{text}<br>%{base:.2f} to %{customdata:.2f} s<extra></extra>",
        "marker": {"color": colour, "opacity": 0.85},
    }


def _ends(stays: Sequence[Any]) -> list[Figure]:
    """Where nodes were lost, left, or had notice."""
    found = []
    for kind in ("lost", "left"):
        gone = [(stay.gone, stay.node) for stay in stays if stay.how == kind]
        found.append(_dots(kind, gone))
    found.append(_dots("notice", [(t, stay.node) for stay in stays for t in stay.notices]))
    return [dots for dots in found if dots["x"]]


def _dots(kind: str, at: Sequence[tuple[Any, str]]) -> Figure:
    colour, _ = MARKS[kind]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": kind,
        "x": [_short(t) for t, _ in at],
        "y": [_said(node) for _, node in at],
        "hovertemplate": f"node %{{y}}: {kind} at %{{x:.2f}} s<extra></extra>",
        "marker": {"color": colour, "symbol": "x" if kind == "lost" else "diamond", "size": 10},
    }


def timeline(trace: Trace) -> Figure | None:
    """The last actions of each node, coloured by kind as in the pictures of schedules: as many steps as can be seen."""
    spans = [span for span in trace.traceEvents if span.ph == "X"]
    labels = {span.tid: _said(str(span.args.get("name") or span.tid)) for span in trace.traceEvents if span.ph == "M"}
    if not spans:
        return None
    steps = sorted({_step(span) for span in spans}, reverse=True)
    counts = dict.fromkeys(steps, 0)
    for span in spans:
        counts[_step(span)] += 1
    first, total = steps[0], 0
    for step in steps:
        total += counts[step]
        if total > _MOST_BARS and step != steps[0]:
            break
        first = step
    shown = [span for span in spans if _step(span) >= first]
    zero = min(span.ts for span in shown)
    by_slot = sorted({span.tid for span in shown}, key=lambda tid: (labels.get(tid, "").partition(": ")[2], tid))
    rows = [labels.get(tid, str(tid)) for tid in by_slot]
    found = []
    for kind, (colour, meaning) in COLOURS.items():
        these = [span for span in shown if span.name.lstrip("0123456789")[:1] == kind]
        if these:
            found.append(_actions(f"{meaning} ({kind})", these, zero, labels, colour))
    made = figure(found, x="milliseconds", y="", height=max(180, min(900, 120 + 30 * len(rows))))
    near = [span for span in shown if _step(span) > steps[0] - _NEAR]
    begin, end = min(span.ts for span in near), max(span.ts + span.dur for span in near)
    made["layout"]["xaxis"]["range"] = [_short((begin - zero) / 1e3), _short((end - zero) / 1e3)]
    made["layout"] |= {"barmode": "overlay", "bargap": 0.2, "showlegend": True}
    made["layout"]["yaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": rows[::-1]}
    return made


def _step(span: Any) -> int:
    found = span.args.get("step")
    return found if isinstance(found, int) else 0


def _actions(name: str, spans: Sequence[Any], zero: float, labels: Mapping[int, str], colour: str) -> Figure:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [_short((span.ts - zero) / 1e3) for span in spans],
        "x": [_short(span.dur / 1e3) for span in spans],
        "y": [labels.get(span.tid, str(span.tid)) for span in spans],
        "text": [_said(f"{span.name} of step {_step(span)}") for span in spans],
        "textposition": "none",
        "hovertemplate": "%{text}: %{x:.3g} ms<extra></extra>",
        "marker": {"color": colour, "line": {"width": 0}},
    }


def accuracies(run: Facts) -> Figure:
    """Of a graph run, on the vertices of each set."""
    found = []
    for name, label, colour in (
        ("val", "validation", LINES[0]),
        ("test", "test", LINES[1]),
        ("train", "train", LINES[2]),
    ):
        rows = [e for e in run.accuracies if isinstance(e.get(name), (int, float))]
        if rows:
            found.append(
                line([e["t"] for e in rows], [e[name] for e in rows], label, colour) | {"mode": "lines+markers"}
            )
    return with_marks(figure(found, x=_TIME, y="accuracy"), run.marks)


def gauges(run: Facts, names: Mapping[str, str], y: str) -> Figure:
    """Of a graph run, what was seen of queues and workers."""
    found = []
    for (name, label), colour in zip(names.items(), LINES, strict=False):
        rows = [e for e in run.looks if isinstance(e.get(name), (int, float))]
        rows = rows[:: -(-len(rows) // 800) or 1]
        found.append(line([e["t"] for e in rows], [e[name] for e in rows], label, colour))
    made = with_marks(figure(found, x=_TIME, y=y, height=240), run.marks)
    made["layout"]["yaxis"]["rangemode"] = "tozero"
    return made


def overlaid(runs: Sequence[Facts], *, over: str) -> Figure:
    """The losses of several runs, over each other; the later ones dashed, so that equal ones are seen to be."""
    found = []
    for number, run in enumerate(runs):
        curve = _curve(run.losses, over, run.name, LINES[number % len(LINES)])
        found.append(curve | {"line": {**curve["line"], "dash": ("solid", "dash", "dot", "dashdot")[number % 4]}})
    unit = "epoch" if all(run.graph for run in runs) else "step"
    return figure(found, x=unit if over == "step" else _TIME, y="loss", height=340)


def paced(runs: Sequence[Facts]) -> Figure:
    """The paces of several runs."""
    found = []
    for number, run in enumerate(runs):
        windows = run.paces
        colour = LINES[number % len(LINES)]
        curve = line([t for t, _ in windows], [v for _, v in windows], run.name, colour)
        found.append(curve | {"line": _stepped(colour)})
    made = figure(found, x=_TIME, y="samples/s")
    made["layout"]["yaxis"]["rangemode"] = "tozero"
    return made
