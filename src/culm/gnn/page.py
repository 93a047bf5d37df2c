"""A page that shows a run: loss, accuracy, queues, workers and staleness over time. One HTML page, no scripts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

Points = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 180, 52, 24
_POINTS = 600
"""Of a line at most: more can not be told apart, and a long run has many."""
_REFRESH_S = 2
_TOLD_LAST = 200
_COLOURS = ("#1f6f8b", "#d1495b", "#6a994e", "#7b5ea7")
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em auto;max-width:44em;color:#222}"
    "svg text{font-size:11px;fill:#555}td{padding:.1em 1em .1em 0;vertical-align:top}"
    "h2{font-size:1em;margin:1.5em 0 .3em}"
)
_FACTS = (
    "graph", "vertices", "edges", "model", "widths", "mode", "staleness", "servers", "intervals", "workers", "launcher",
    "epochs", "test_accuracy", "val_accuracy", "final_loss", "time_per_epoch_s", "wall_s", "relaunches", "workers_lost",
    "generations", "cost_usd", "value",
)  # fmt: skip


def page(
    summary: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    *,
    live: bool = False,
) -> str:
    """The whole page, out of what the files of the run hold. `live`: it goes on, and the browser looks again."""
    looks = [e for e in events if e["kind"] == "queues"]
    tests = [e for e in events if e["kind"] == "evaluation"]
    marks = [float(e["t"]) for e in events if e["kind"] == "server-lost"]
    charts = [
        _chart("loss", {"loss": _series(steps, "loss")}, marks),
        _chart("accuracy", {"validation": _series(tests, "val"), "test": _series(tests, "test")}, marks),
        _chart(
            "tasks", {"waiting for a worker": _series(looks, "queue"), "with workers": _series(looks, "running")}, marks
        ),
        _chart("workers", {"workers": _series(looks, "workers")}, marks),
        _chart("passes between the fastest and the slowest interval", {"spread": _series(looks, "spread")}, marks),
    ]
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(summary.get(k)))}</td></tr>" for k in _FACTS)
    happened = [e for e in events if e["kind"] in _TOLD][-_TOLD_LAST:]
    told = "".join(f"<li>{e['t']:.2f} s: {html.escape(_sentence(e))}</li>" for e in happened)
    name = html.escape(str(summary.get("graph")))
    again = f'<meta http-equiv="refresh" content="{_REFRESH_S}">' if live else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}<title>culm gnn: {name}</title>'
        f"<style>{_STYLE}</style><h1>{name}{' (running)' if live else ''}</h1>{_now(looks, live)}"
        f"<table>{rows}</table>{''.join(charts)}<h2>what happened</h2><ul>{told}</ul></html>\n"
    )


def _now(looks: Sequence[Mapping[str, Any]], live: bool) -> str:
    """The last look at the queues, in words."""
    if not live or not looks:
        return ""
    last = looks[-1]
    return (
        f"<p>now: {last['workers']} workers, {last['queue']} tasks waiting, {last['running']} with workers, "
        f"{last['spread']} passes between the fastest and the slowest interval</p>"
    )


_TOLD = {"generation", "server-lost", "worker-lost", "worker-sent-home", "autotune", "kill"}


def _sentence(event: Mapping[str, Any]) -> str:
    rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("t", "kind"))
    return f"{event['kind']}: {rest}"


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> Points:
    points = [(float(row["t"]), float(row[name])) for row in rows if isinstance(row.get(name), (int, float))]
    stride = -(-len(points) // _POINTS) or 1
    return points[::-1][::stride][::-1]  # the last one always stays


def _chart(title: str, series: Mapping[str, Points], marks: Sequence[float]) -> str:
    """Lines over seconds; a dashed line where a server was lost."""
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    last = max(t for t, _ in points) or 1.0
    low, high = min(0.0, *(v for _, v in points)), max(v for _, v in points) or 1.0

    def place(t: float, v: float) -> tuple[float, float]:
        return _LEFT + t / last * (_WIDTH - _LEFT - 8), _HEIGHT - _BELOW - (v - low) / (high - low) * (
            _HEIGHT - _BELOW - 12
        )

    drawn = "".join(_line(line, place, colour) for line, colour in zip(series.values(), _COLOURS, strict=False))
    lost = "".join(
        f'<line x1="{place(t, 0)[0]:.1f}" x2="{place(t, 0)[0]:.1f}" y1="8" y2="{_HEIGHT - _BELOW}" '
        'stroke="#bbb" stroke-dasharray="3 3"/>'
        for t in marks
    )
    names = "".join(
        f'<text x="{_LEFT + 150 * i}" y="{_HEIGHT - 4}" style="fill:{_COLOURS[i]}">{html.escape(name)}</text>'
        for i, name in enumerate(series)
    )
    axis = f'<text x="4" y="16">{high:.4g}</text><text x="4" y="{_HEIGHT - _BELOW}">{low:.4g}</text>'
    right = f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">{last:.1f} s</text>'
    inside = f"{lost}{drawn}{axis}{names}{right}"
    return f'<h2>{html.escape(title)}</h2><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{inside}</svg>'


def _line(points: Points, place: Any, colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(t, v) for t, v in points))
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>'
