"""What a page shows of a run, or of several beside each other: blocks of text and charts, in order. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import msgspec

from culm.observe import charts
from culm.observe.facts import Facts, Recovery, same_weights
from culm.observe.reading import Trace

_TOLD_LAST = 300
_ROWS = 200
_MANY = 12
"""Nodes of which one also wants to know how many there were."""


class Block(msgspec.Struct, frozen=True):
    """A part of a page: text that is HTML already, or a chart under a heading."""

    id: str
    html: str = ""
    title: str = ""
    note: str = ""
    """Below the heading: how to read it."""
    figure: dict[str, Any] | None = None
    wide: bool = False


@dataclass(frozen=True)
class View:
    """A page without its frame."""

    title: str
    blocks: tuple[Block, ...]

    @cached_property
    def data(self) -> bytes:
        """The same as JSON, for the script of the page."""
        return msgspec.json.encode({"title": self.title, "blocks": self.blocks})

    @cached_property
    def version(self) -> str:
        """Another one whenever anything is shown differently."""
        return hashlib.sha256(self.data).hexdigest()[:16]


def of_run(run: Facts, trace: Trace | None = None) -> View:
    """One run: what somebody who was woken at night wants to know comes first."""
    title = f"{run.name}: {_progress_words(run)}" if run.name else _progress_words(run)
    return View(f"culm: {title}", tuple(_blocks(run, trace)))


def _blocks(run: Facts, trace: Trace | None) -> Iterator[Block]:
    yield Block("head", _head(run))
    if run.state in ("failed", "cut off") or run.damaged:
        yield Block("alarm", _alarm(run))
    yield Block("tiles", _tiles(run))
    if run.losses:
        unit = "epochs" if run.graph else "steps"
        yield Block("loss-steps", title=f"Loss over {unit}", figure=charts.losses(run, over="step"))
        yield Block("loss-time", title="Loss over time", figure=charts.losses(run, over="t"))
    if run.paces:
        note = "Red bands: from a loss to the step that made it good. Marks above: look at one to see what it was."
        yield Block("pace", title="Pace", note=note, figure=charts.pace(run), wide=True)
    if run.graph:
        yield from _graph_charts(run)
    if run.now.get("posts"):
        yield Block("posts", _posts(run.now), wide=True)
    if (drawn := charts.nodes(run)) is not None:
        who = "Servers" if run.graph else "Nodes"
        note = "" if run.graph else "Coloured by the pipeline that a node works in; grey: there, without a slot."
        if len(run.stays) > _MANY and not run.graph:
            yield Block("crowd", title="Nodes that were there", figure=charts.crowd(run), wide=True)
        if len(run.stays) > charts.MOST_ROWS:
            note += f" The last {charts.MOST_ROWS} of {len(run.stays)} that came."
        yield Block("nodes", title=f"{who} over time", note=note, figure=drawn, wide=True)
    if run.recoveries:
        yield Block("recoveries", _recoveries(run.recoveries, run.graph), wide=True)
    if run.wall_s:
        yield Block("split", _split(run), wide=True)
    if trace is not None and run.state == "done" and (drawn := charts.timeline(trace)) is not None:
        note = "What each node was at in the last steps; drag to look closer. All of it: trace.json in ui.perfetto.dev."
        yield Block("timeline", title="The last actions", note=note, figure=drawn, wide=True)
    if run.happened:
        yield Block("happened", _happened(run), wide=True)
    yield Block("details", _details(run), wide=True)


def _graph_charts(run: Facts) -> Iterator[Block]:
    if run.accuracies:
        yield Block("accuracy", title="Accuracy", figure=charts.accuracies(run))
    if run.looks:
        tasks = {"queue": "waiting for a worker", "running": "with workers"}
        spread = {"spread": "passes"}
        yield Block("tasks", title="Tasks", figure=charts.gauges(run, tasks, "tasks"))
        yield Block("workers", title="Workers", figure=charts.gauges(run, {"workers": "workers"}, "workers"))
        title = "Passes between the fastest and the slowest interval"
        yield Block("spread", title=title, figure=charts.gauges(run, spread, "passes"))


def _head(run: Facts) -> str:
    """Name, state, how far, and what it is."""
    mark = run.state.replace(" ", "-")
    bar = ""
    if run.asked:
        share = min(1.0, run.steps / run.asked)
        bar = f'<div class="bar"><i class="{mark}" style="width:{share:.2%}"></i></div>'
    return (
        f'<h1>{escape(run.name or run.job)} <span class="state {mark}">{escape(run.state)}</span></h1>'
        f'<p class="what">{escape(_what(run))}</p>{bar}<p class="far">{escape(_progress_words(run))}{_now(run)}</p>'
    )


def _progress_words(run: Facts) -> str:
    unit = "epoch" if run.graph else "step"
    of = f" of {run.asked:,}" if run.asked else ""
    left = f", {duration(run.left_s)} left" if run.left_s else ""
    return f"{unit} {run.steps:,}{of}{left}" if run.steps or run.asked else run.state


def _what(run: Facts) -> str:
    """What is trained, and how."""
    get = run.get
    if run.graph:
        parts = [
            get("model"),
            get("mode"),
            _counted(get("servers"), "graph server"),
            _counted(get("workers"), "worker"),
        ]
        about = [run.job, *parts, f"{get('vertices'):,} vertices" if isinstance(get("vertices"), int) else None]
    else:
        shape = " x ".join(filter(None, (_counted(get("pipelines"), "pipeline"), _counted(get("stages"), "stage"))))
        layers = _counted(get("layers"), "layer")
        about = [run.job, layers, shape, get("schedule"), get("strategy") and f"strategy {get('strategy')}"]
    exact = "exact" if get("exact") is True else "not exact" if get("exact") is False else None
    return " · ".join(str(part) for part in [*about, exact] if part)


def _counted(number: object, noun: str) -> str | None:
    return f"{number} {noun}{'' if number == 1 else 's'}" if isinstance(number, (int, str)) and number != "" else None


def _now(run: Facts) -> str:
    """The last look at the queues of a graph run, in words; who leads a run that is seen in the store."""
    if run.now.get("leader") is not None:
        epoch = f", epoch {run.now['epoch']}" if run.now.get("epoch") is not None else ""
        return escape(f" · node {run.now['leader']} leads{epoch}")
    if run.state != "running" or not run.looks:
        return ""
    last = run.looks[-1]
    return escape(
        f" · now: {last.get('workers')} workers, {last.get('queue')} tasks waiting, "
        f"{last.get('running')} with workers, {last.get('spread')} passes between the fastest and the slowest interval"
    )


def _alarm(run: Facts) -> str:
    text = ""
    if run.state in ("failed", "cut off"):
        saved = f" The newest checkpoint is of step {run.checkpoints[-1][1]}." if run.checkpoints else ""
        text = f"{run.state.capitalize()}: {run.why_state}.{saved}".replace("..", ".")
    if run.damaged:
        text += f" {run.damaged} damaged lines of the run's files were left out."
    return f'<p class="{"bad" if run.state == "failed" else "odd"}">{escape(text.strip())}</p>'


def _tiles(run: Facts) -> str:
    """The figures that matter, large."""
    once = {True: ("yes", "good"), False: ("NO", "bad"), None: ("not known", "")}[run.once]
    recoveries = f"{len(run.recoveries)} recover{'y' if len(run.recoveries) == 1 else 'ies'}"
    survived = recoveries if run.preemptions else "nobody was lost"
    if run.state == "failed" and run.why_state.startswith("NodeLost"):
        survived = "and one that was not"
    digest = _digest(run, "weights_sha256")[:10]
    tiles = [
        ("Every sample counted once", once[0], run.proof, once[1]),
        ("Preemptions survived", f"{run.preemptions}", survived, ""),
        ("Goodput", _rate(run.goodput), "all samples over all time", ""),
        ("Pace lately", _rate(run.pace), "of the last steps", "") if run.state == "running" else None,
        ("Loss", "none yet" if run.loss is None else f"{run.loss:.4g}", _evaluation(run), ""),
        _accuracy(run) if run.graph else None,
        ("Nodes", f"{run.there}", f"{len(run.stays)} in all", "") if run.stays and not run.graph else None,
        ("Time", duration(run.wall_s), _start_words(run), ""),
        ("Weights", digest, "SHA-256", "tight") if digest else None,
        ("Cost", _money(run.get("cost_usd")), "", "tight") if run.get("cost_usd") else None,
    ]
    made = "".join(_tile(*tile) for tile in tiles if tile is not None)
    return f'<div class="tiles">{made}</div>'


def _tile(name: str, value: str, note: str, mark: str) -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f'<div class="tile {mark}"><span>{escape(name)}</span><b>{escape(value)}</b>{small}</div>'


def _rate(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.1f}/s" if value < 1000 else f"{value:,.0f}/s"


def _money(value: object) -> str:
    return f"${value:.4g}" if isinstance(value, (int, float)) else "not known"


def _evaluation(run: Facts) -> str:
    return "" if run.evaluation is None else f"evaluation {run.evaluation:.4g}"


def _start_words(run: Facts) -> str:
    if run.setup_s is None:
        return ""
    return f"{duration(run.setup_s)} of it to set up" if run.graph else f"after {duration(run.setup_s)} to set up"


def _accuracy(run: Facts) -> tuple[str, str, str, str]:
    test, val = run.get("test_accuracy"), run.get("val_accuracy")
    if not isinstance(test, (int, float)) and run.accuracies:
        test, val = run.accuracies[-1].get("test"), run.accuracies[-1].get("val")
    shown = f"{test:.2%}" if isinstance(test, (int, float)) else "none yet"
    return "Test accuracy", shown, f"validation {val:.2%}" if isinstance(val, (int, float)) else "", ""


def duration(seconds: float | None) -> str:
    """For people: 0.42 s, 42 s, 3:20 min, 1:05:00 h."""
    if seconds is None:
        return "not known"
    if seconds < 10:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d} h"
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, first: str = "") -> str:
    """A table of what is not HTML yet."""
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{first}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _posts(now: Mapping[str, Any]) -> str:
    rows = [(post.get("node"), post.get("slot"), post.get("layers"), post.get("more")) for post in now["posts"]]
    return "<h2>Who does what</h2>" + table(("node", "slot", "layers", ""), rows)


def _recoveries(found: Sequence[Recovery], graph: bool) -> str:
    rows = [
        (
            "" if r.t is None else f"{r.t:.2f} s",
            r.step,
            ", ".join(r.lost),
            r.source,
            *(f"{ms:,.1f}" for ms in (r.detect_ms, r.decide_ms, r.move_ms, r.redo_ms, r.total_ms)),
            f"{r.redone_actions:,}",
        )
        for r in found[-_ROWS:]
    ]
    unit = "epoch" if graph else "step"
    headings = (
        "at",
        unit,
        "lost",
        "source",
        "detect ms",
        "decide ms",
        "move ms",
        "redo ms",
        "in all",
        "actions redone",
    )
    return "<h2>Recoveries</h2>" + _short_of(found) + table(headings, rows, first="figures")


def _short_of(rows: Sequence[object]) -> str:
    return f"<p class=note>The last {_ROWS} of {len(rows)}.</p>" if len(rows) > _ROWS else ""


def _split(run: Facts) -> str:
    """Where the time went, as a bar."""
    assert run.wall_s is not None
    moved = sum(e["seconds"] for e in _reshapes(run))
    setup = run.setup_s or 0.0
    whole = run.wall_s - (setup if run.graph else 0.0)
    trained = max(0.0, whole - run.recovering_s - moved)
    parts = [
        ("set-up", setup, "setup"),
        ("training", trained, "training"),
        ("recovering", run.recovering_s, "recovering"),
    ]
    parts += [("changing shape", moved, "moving")] if moved else []
    total = sum(seconds for _, seconds, _ in parts) or 1.0
    bars = "".join(f'<i class="{mark}" style="width:{s / total:.3%}"></i>' for _, s, mark in parts)
    words = "".join(
        f'<li><i class="{mark}"></i>{name}: {duration(s)} ({s / total:.1%})</li>' for name, s, mark in parts
    )
    return f'<h2>Where the time went</h2><div class="split">{bars}</div><ul class="legend">{words}</ul>'


def _reshapes(run: Facts) -> list[Mapping[str, Any]]:
    return [e for e in run.reshapes if isinstance(e.get("seconds"), (int, float))]


def _happened(run: Facts) -> str:
    """Newest first: what somebody looks for has just happened."""
    shown = list(run.happened)[-_TOLD_LAST:][::-1]
    rows, said = "", ""
    for h in shown:
        why = "″" if h.why and h.why == said else h.why  # one decision is told several times on its way
        rows += f'<tr class="{escape(h.kind)}"><td>{h.t:.2f} s</td><td>{escape(h.text)}</td><td>{escape(why)}</td></tr>'
        said = h.why
    more = f"<p class=note>The last {_TOLD_LAST} of {len(run.happened)}.</p>" if len(run.happened) > _TOLD_LAST else ""
    return (
        f"<h2>What happened, and why</h2>{more}<div class=scroll><table class=told><thead><tr><th>at</th>"
        f"<th>what</th><th>why</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _details(run: Facts) -> str:
    """All the rest, folded away."""
    get = run.summary.get
    rows: dict[str, object] = {
        "weights": get("weights_sha256"),
        "state": get("state_sha256"),
        "checkpoints": _checkpoints(run),
        "samples": f"{run.samples:,}",
        "run again": get("samples_redone"),
        "skipped steps": get("skipped_steps"),
        "at risk": f"{get('at_risk_s'):.2f} s with a layer that had one holder" if get("at_risk_s") else None,
        "of the ideal": f"{get('of_ideal'):.1%}" if isinstance(get("of_ideal"), float) else None,
        "memory": _memory(get("memory")),
        "timeouts": _timeouts(run.start.get("timeouts")),
        "why this shape": run.start.get("why"),
    }
    if run.graph:
        more = ("widths", "staleness", "intervals", "launcher", "relaunches", "workers_lost", "generations", "value",
                "time_per_epoch_s", "edges")  # fmt: skip
        rows |= {name.replace("_", " "): run.get(name) for name in more}
    found = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items() if value
    )
    return f"<h2>Details</h2><div class=scroll><table class=facts>{found}</table></div>"


def _checkpoints(run: Facts) -> str:
    if run.checkpoints:
        t, step, size = run.checkpoints[-1]
        return f"{len(run.checkpoints)} written, the newest of step {step} at {t:.2f} s ({size / 1e6:,.1f} MB)"
    listed = run.get("checkpoints")
    return f"{len(listed)} written, the newest of {listed[-1]}" if isinstance(listed, list) and listed else "none"


def _memory(found: object) -> str | None:
    if not isinstance(found, Mapping):
        return None
    peak, kept = found.get("peak_rss_bytes") or 0, found.get("kept_bytes") or 0
    return f"{peak / 2**20:,.0f} MiB at most in a worker, {kept / 2**20:,.1f} MiB kept for losses"


def _timeouts(found: object) -> str | None:
    if not isinstance(found, Mapping):
        return None
    return ", ".join(f"{name} {value:g} s" for name, value in found.items() if isinstance(value, (int, float)))


def of_runs(runs: Sequence[Facts]) -> View:
    """Several runs beside each other."""
    names = ", ".join(run.name for run in runs)
    return View(f"culm: {names}", tuple(_beside(runs)))


def _beside(runs: Sequence[Facts]) -> Iterator[Block]:
    same = {True: "yes", False: "NO", None: "not known: not all runs have come to an end"}[same_weights(runs)]
    mark = {"yes": "good", "NO": "bad"}.get(same, "")
    yield Block("head", f"<h1>{len(runs)} runs</h1>")
    tiles = _tile("Same weights", same.partition(":")[0], _alike(runs), mark)
    yield Block("tiles", f'<div class="tiles">{tiles}{"".join(_run_tile(run) for run in runs)}</div>')
    if any(run.losses for run in runs):
        yield Block("loss-steps", title="Loss over steps", figure=charts.overlaid(runs, over="step"))
        yield Block("loss-time", title="Loss over time", figure=charts.overlaid(runs, over="t"))
        yield Block("pace", title="Pace", figure=charts.paced(runs), wide=True)
    yield Block("summaries", _summaries(runs), wide=True)
    for number, run in enumerate(runs):
        if run.recoveries:
            made = _recoveries(run.recoveries, run.graph).replace("<h2>", f"<h2>{escape(run.name)}: ", 1)
            yield Block(f"recoveries-{number}", made, wide=True)


def _run_tile(run: Facts) -> str:
    mark = {"done": "", "failed": "bad", "cut off": "odd"}.get(run.state, "")
    note = f"{run.preemptions} preemptions, {_rate(run.goodput)}"
    return _tile(f"{run.name}: {run.state}", "none yet" if run.loss is None else f"loss {run.loss:.4g}", note, mark)


def _alike(runs: Sequence[Facts]) -> str:
    """Which runs came to the same bits."""
    groups: dict[object, list[str]] = {}
    for run in runs:
        digest = _digest(run, "weights_sha256")
        groups.setdefault(digest or f"no end: {run.name}", []).append(run.name)
    return "; ".join(" = ".join(group) for group in groups.values())


def _summaries(runs: Sequence[Facts]) -> str:
    """What each came to, a column each."""
    rows: dict[str, list[Any]] = {
        "state": [run.state for run in runs],
        "what": [_what(run) for run in runs],
        "steps": [f"{run.steps:,}" for run in runs],
        "samples": [f"{run.samples:,}" for run in runs],
        "every sample counted once": [{True: "yes", False: "NO", None: "not known"}[run.once] for run in runs],
        "final loss": ["" if run.loss is None else f"{run.loss:.6g}" for run in runs],
        "evaluation loss": ["" if run.evaluation is None else f"{run.evaluation:.6g}" for run in runs],
        "test accuracy": [_accuracy(run)[1] if run.graph else "" for run in runs],
        "goodput": [_rate(run.goodput) for run in runs],
        "time": [duration(run.wall_s) for run in runs],
        "preemptions": [run.preemptions for run in runs],
        "recovering": [duration(run.recovering_s) for run in runs],
        "cost": [_money(run.get("cost_usd")) for run in runs],
        "weights": [_digest(run, "weights_sha256") for run in runs],
        "state digest": [_digest(run, "state_sha256") for run in runs],
    }
    shown = [(name, *values) for name, values in rows.items() if any(value not in ("", None) for value in values)]
    return "<h2>Summaries</h2>" + table(("", *(run.name for run in runs)), shown, first="facts")


def _digest(run: Facts, name: str) -> str:
    return str(run.summary.get(name) or "")[:16]
