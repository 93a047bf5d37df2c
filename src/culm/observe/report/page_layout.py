"""The layout of a page for one run or for several: blocks of text and charts, in order. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import msgspec

from culm.observe.report import charts
from culm.observe.report.load_run import PerfettoTrace
from culm.observe.report.report_data import RecoveryRow, ReportData, same_weights

_MAX_EVENT_LINES = 300
_MAX_TABLE_ROWS = 200
_NODE_COUNT_CHART_FROM = 12
"""With more nodes than this, the page also shows their number over time."""


class PageBlock(msgspec.Struct, frozen=True):
    """A part of a page: HTML, or a chart under a heading."""

    id: str
    html: str = ""
    title: str = ""
    note: str = ""
    """Below the heading: how to read the chart."""
    figure: dict[str, Any] | None = None
    wide: bool = False


@dataclass(frozen=True)
class PageLayout:
    """The title and blocks of a page."""

    title: str
    blocks: tuple[PageBlock, ...]

    @cached_property
    def data(self) -> bytes:
        """The layout as JSON, for the script of the page."""
        return msgspec.json.encode({"title": self.title, "blocks": self.blocks})

    @cached_property
    def version(self) -> str:
        """Changes whenever the content of the page changes."""
        return hashlib.sha256(self.data).hexdigest()[:16]


def layout_run(run: ReportData, trace: PerfettoTrace | None = None) -> PageLayout:
    """The page of one run, with the most urgent figures first."""
    title = f"{run.name}: {_progress_words(run)}" if run.name else _progress_words(run)
    return PageLayout(f"culm: {title}", tuple(_run_blocks(run, trace)))


def _run_blocks(run: ReportData, trace: PerfettoTrace | None) -> Iterator[PageBlock]:
    yield PageBlock("head", _header_html(run))
    if run.state in ("failed", "cut off") or run.damaged_lines:
        yield PageBlock("alarm", _alarm_html(run))
    yield PageBlock("tiles", _tiles_html(run))
    yield from _metric_blocks(run)
    if run.pace_curve:
        note = "Red bands: from a loss to the end of its recovery. Hover over a mark above to see the event."
        yield PageBlock("pace", title="Pace", note=note, figure=charts.pace_chart(run), wide=True)
    if run.graph:
        yield from _graph_blocks(run)
    if run.current.get("assignments"):
        yield PageBlock("assignments", _slots_html(run.current), wide=True)
    if (drawn := charts.node_chart(run)) is not None:
        title = "Servers" if run.graph else "Nodes"
        note = "" if run.graph else "Coloured by the pipeline that a node works in; grey: there, without a slot."
        if len(run.node_presences) > _NODE_COUNT_CHART_FROM and not run.graph:
            yield PageBlock("crowd", title="Nodes that were there", figure=charts.node_count_chart(run), wide=True)
        if len(run.node_presences) > charts.MAX_NODE_ROWS:
            note += f" The last {charts.MAX_NODE_ROWS} of {len(run.node_presences)} that joined."
        yield PageBlock("nodes", title=f"{title} over time", note=note, figure=drawn, wide=True)
    if run.recoveries:
        yield PageBlock("recoveries", _recoveries_html(run.recoveries, run.graph), wide=True)
    if run.cost is not None:
        yield PageBlock("cost", _cost_section(run), wide=True)
    if run.wall_s:
        yield PageBlock("split", _time_split_html(run), wide=True)
    if trace is not None and run.state == "done" and (drawn := charts.action_timeline(trace)) is not None:
        note = (
            "The actions of each node in the last steps; drag to zoom. The whole trace: trace.json in ui.perfetto.dev."
        )
        yield PageBlock("timeline", title="The last actions", note=note, figure=drawn, wide=True)
    if run.event_lines:
        yield PageBlock("happened", _event_lines_html(run), wide=True)
    yield PageBlock("details", _details_html(run), wide=True)


def _metric_blocks(run: ReportData) -> Iterator[PageBlock]:
    """The loss, and a chart for each named value."""
    if run.loss_curve:
        unit = "epochs" if run.graph else "steps"
        yield PageBlock("loss-steps", title=f"Loss over {unit}", figure=charts.loss_chart(run, over="step"))
        yield PageBlock("loss-time", title="Loss over time", figure=charts.loss_chart(run, over="t"))
    for number, (name, curve) in enumerate(run.value_curves.items()):
        if curve:
            yield PageBlock(f"value-{number}", title=name, figure=charts.value_chart(run, name))


def _graph_blocks(run: ReportData) -> Iterator[PageBlock]:
    if run.accuracies:
        yield PageBlock("accuracy", title="Accuracy", figure=charts.accuracy_chart(run))
    if run.queue_samples:
        tasks = {"queue": "waiting for a worker", "running": "with workers"}
        spread = {"spread": "passes"}
        yield PageBlock("tasks", title="Tasks", figure=charts.queue_chart(run, tasks, "tasks"))
        yield PageBlock("workers", title="Workers", figure=charts.queue_chart(run, {"workers": "workers"}, "workers"))
        title = "Passes between the fastest and the slowest interval"
        yield PageBlock("spread", title=title, figure=charts.queue_chart(run, spread, "passes"))


def _header_html(run: ReportData) -> str:
    """Name, state, description and progress."""
    mark = run.state.replace(" ", "-")
    bar = ""
    if run.steps_requested:
        share = min(1.0, run.steps / run.steps_requested)
        bar = f'<div class="bar"><i class="{mark}" style="width:{share:.2%}"></i></div>'
    return (
        f'<h1>{escape(run.name or run.job)} <span class="state {mark}">{escape(run.state)}</span></h1>'
        f'<p class="what">{escape(_run_description(run))}</p>{bar}'
        f'<p class="far">{escape(_progress_words(run))}{_current_words(run)}</p>'
    )


def _progress_words(run: ReportData) -> str:
    unit = "epoch" if run.graph else "step"
    of = f" of {run.steps_requested:,}" if run.steps_requested else ""
    left = f", {format_duration(run.left_s)} left" if run.left_s else ""
    return f"{unit} {run.steps:,}{of}{left}" if run.steps or run.steps_requested else run.state


def _run_description(run: ReportData) -> str:
    """Job, shape, schedule and strategy in one line."""
    get = run.get
    if run.graph:
        parts = [
            get("model"),
            get("mode"),
            _format_count(get("servers"), "graph server"),
            _format_count(get("workers"), "worker"),
        ]
        about = [run.job, *parts, f"{get('vertices'):,} vertices" if isinstance(get("vertices"), int) else None]
    else:
        shape = " x ".join(
            filter(None, (_format_count(get("pipelines"), "pipeline"), _format_count(get("stages"), "stage")))
        )
        if run.reshapes:
            shape += f", now {run.reshapes[-1].get('layout')}"
        elif run.state == "running" and (empty := _empty_slots(run)):
            shape += f", {_format_count(empty, 'slot')} empty"
        layers = _format_count(get("layers"), "layer")
        about = [run.job, layers, shape, get("schedule"), get("strategy") and f"strategy {get('strategy')}"]
    exact = "exact" if get("exact") is True else "not exact" if get("exact") is False else None
    return " · ".join(str(part) for part in [*about, exact] if part)


def _empty_slots(run: ReportData) -> int:
    """How many slots of the initial shape no node fills now."""
    pipelines, stages = run.get("pipelines"), run.get("stages")
    if run.filled_slots is None or not isinstance(pipelines, int) or not isinstance(stages, int):
        return 0
    return max(0, pipelines * stages - run.filled_slots)


def _format_count(number: object, noun: str) -> str | None:
    return f"{number} {noun}{'' if number == 1 else 's'}" if isinstance(number, (int, str)) and number != "" else None


def _current_words(run: ReportData) -> str:
    """The current queues of a graph run, or the leader of a run that is seen in the store."""
    if run.current.get("leader") is not None:
        epoch = f", epoch {run.current['epoch']}" if run.current.get("epoch") is not None else ""
        return escape(f" · node {run.current['leader']} leads{epoch}")
    if run.state != "running" or not run.queue_samples:
        return ""
    last = run.queue_samples[-1]
    return escape(
        f" · now: {last.get('workers')} workers, {last.get('queue')} tasks waiting, "
        f"{last.get('running')} with workers, {last.get('spread')} passes between the fastest and the slowest interval"
    )


def _alarm_html(run: ReportData) -> str:
    text = ""
    if run.state in ("failed", "cut off"):
        saved = f" The newest checkpoint is of step {run.checkpoints[-1][1]}." if run.checkpoints else ""
        text = f"{run.state.capitalize()}: {run.why_state}.{saved}".replace("..", ".")
    if run.damaged_lines:
        text += f" {run.damaged_lines} damaged lines of the run's files were left out."
    return f'<p class="{"bad" if run.state == "failed" else "odd"}">{escape(text.strip())}</p>'


def _verified_tile(run: ReportData) -> tuple[str, str, str, str] | None:
    """Steps that `culm verify` has retrained to the same bits; None: it has not been called."""
    proven = run.summary.get("verified")
    return ("Verified", f"{proven} steps", "retrained to the same bits", "good") if proven else None


def _tiles_html(run: ReportData) -> str:
    """The most important figures as tiles."""
    once = {True: ("yes", "good"), False: ("NO", "bad"), None: ("not known", "")}[run.every_sample_once]
    recoveries = f"{len(run.recoveries)} recover{'y' if len(run.recoveries) == 1 else 'ies'}"
    survived = recoveries if run.preemptions else "no node was lost"
    if run.state == "failed" and run.why_state.startswith("NodeLost"):
        survived = "and one loss that ended the run"
    digest = _short_digest(run, "weights_sha256")[:10]
    tiles = [
        ("Every sample counted once", once[0], run.proof, once[1]),
        ("Preemptions survived", f"{run.preemptions}", survived, ""),
        ("Goodput", _format_rate(run.goodput), "all samples over all time", ""),
        ("Pace lately", _format_rate(run.pace), "of the last steps", "") if run.state == "running" else None,
        ("Loss", "none yet" if run.loss is None else f"{run.loss:.4g}", _evaluation_words(run), ""),
        _accuracy_tile(run) if run.graph else None,
        ("Nodes", f"{run.nodes_present}", f"{len(run.node_presences)} in all", "")
        if run.node_presences and not run.graph
        else None,
        ("Time", format_duration(run.wall_s), _start_words(run), ""),
        ("Weights", digest, "SHA-256", "tight") if digest else None,
        _verified_tile(run),
        ("Cost", _format_usd(_cost_usd(run)), _on_demand_words(run), "tight") if _cost_usd(run) else None,
    ]
    html = "".join(_tile_html(*tile) for tile in tiles if tile is not None)
    return f'<div class="tiles">{html}</div>'


def _tile_html(name: str, value: str, note: str, mark: str) -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f'<div class="tile {mark}"><span>{escape(name)}</span><b>{escape(value)}</b>{small}</div>'


def _format_rate(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.1f}/s" if value < 1000 else f"{value:,.0f}/s"


def _format_usd(value: object) -> str:
    return f"${value:.4g}" if isinstance(value, (int, float)) else "not known"


def _cost_usd(run: ReportData) -> float | None:
    """Dollars, also of a run that goes on."""
    found: float | None = run.get("cost_usd")
    return run.cost.usd if not found and run.cost is not None else found


def _cost_section(run: ReportData) -> str:
    """What the nodes have cost, by kind of node."""
    if run.cost is None:
        return ""
    rows = [
        (
            row["instance"] or "not named", row["market"], row["zone"] or "", row["nodes"], f"{row['hours']:.2f}",
            f"{row['mean_usd_h']:.4g}", _format_usd(row["usd"]),
        )
        for row in run.cost.kinds
    ]  # fmt: skip
    lost = ", ".join(
        f"{_format_usd(usd)} on {what}"
        for what, usd in (
            ("waiting", run.cost.waiting_usd),
            ("recoveries", run.cost.recovery_usd),
            ("repeated steps", run.cost.redone_usd),
        )
        if usd
    )
    heads = ("instance", "market", "zone", "nodes", "hours", "mean $/h", "cost")
    note = f"<p>{escape(f'Of {_format_usd(run.cost.usd)} in all: {lost}.')}</p>" if lost else ""
    return "<h2>Cost</h2>" + html_table(heads, rows, css_class="facts") + note


def _on_demand_words(run: ReportData) -> str:
    on_demand = run.get("cost_on_demand_usd") or (None if run.cost is None else run.cost.on_demand_usd)
    return f"{_format_usd(on_demand)} on demand" if on_demand else ""


def _evaluation_words(run: ReportData) -> str:
    return "" if run.evaluation is None else f"evaluation {run.evaluation:.4g}"


def _start_words(run: ReportData) -> str:
    if run.setup_s is None:
        return ""
    return (
        f"{format_duration(run.setup_s)} of it to set up"
        if run.graph
        else f"after {format_duration(run.setup_s)} to set up"
    )


def _accuracy_tile(run: ReportData) -> tuple[str, str, str, str]:
    test, val = run.get("test_accuracy"), run.get("val_accuracy")
    if not isinstance(test, (int, float)) and run.accuracies:
        test, val = run.accuracies[-1].get("test"), run.accuracies[-1].get("val")
    shown = f"{test:.2%}" if isinstance(test, (int, float)) else "none yet"
    return "Test accuracy", shown, f"validation {val:.2%}" if isinstance(val, (int, float)) else "", ""


def format_duration(seconds: float | None) -> str:
    """A duration as 0.42 s, 42 s, 3:20 min or 1:05:00 h."""
    if seconds is None:
        return "not known"
    if seconds < 10:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d} h"
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"


def html_table(headings: Sequence[str], rows: Sequence[Sequence[object]], *, css_class: str = "") -> str:
    """A table; cells are escaped."""
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(v))}</td>" for v in row) + "</tr>" for row in rows)
    table = f'<table class="{css_class}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _slots_html(now: Mapping[str, Any]) -> str:
    rows = [(row.get("node"), row.get("slot"), row.get("layers"), row.get("more")) for row in now["assignments"]]
    return "<h2>Roles of the nodes</h2>" + html_table(("node", "slot", "layers", ""), rows)


def _recoveries_html(found: Sequence[RecoveryRow], graph: bool) -> str:
    rows = [
        (
            "" if r.t is None else f"{r.t:.2f} s",
            r.step,
            ", ".join(r.lost),
            r.source,
            *(f"{ms:,.1f}" for ms in (r.detect_ms, r.decide_ms, r.move_ms, r.redo_ms, r.total_ms)),
            f"{r.redone_actions:,}",
        )
        for r in found[-_MAX_TABLE_ROWS:]
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
    return "<h2>Recoveries</h2>" + _truncation_note(found) + html_table(headings, rows, css_class="figures")


def _truncation_note(rows: Sequence[object]) -> str:
    return f"<p class=note>The last {_MAX_TABLE_ROWS} of {len(rows)}.</p>" if len(rows) > _MAX_TABLE_ROWS else ""


def _time_split_html(run: ReportData) -> str:
    """The split of the run's time, as a bar."""
    assert run.wall_s is not None
    moved = sum(e["seconds"] for e in _timed_reshapes(run))
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
        f'<li><i class="{mark}"></i>{name}: {format_duration(s)} ({s / total:.1%})</li>' for name, s, mark in parts
    )
    return f'<h2>Where the time went</h2><div class="split">{bars}</div><ul class="legend">{words}</ul>'


def _timed_reshapes(run: ReportData) -> list[Mapping[str, Any]]:
    return [e for e in run.reshapes if isinstance(e.get("seconds"), (int, float))]


def _event_lines_html(run: ReportData) -> str:
    """The events as a table, newest first."""
    shown = list(run.event_lines)[-_MAX_EVENT_LINES:][::-1]
    rows, last_reason = "", ""
    for h in shown:
        why = "″" if h.why and h.why == last_reason else h.why  # consecutive events often share a reason
        rows += f'<tr class="{escape(h.kind)}"><td>{h.t:.2f} s</td><td>{escape(h.text)}</td><td>{escape(why)}</td></tr>'
        last_reason = h.why
    more = (
        f"<p class=note>The last {_MAX_EVENT_LINES} of {len(run.event_lines)}.</p>"
        if len(run.event_lines) > _MAX_EVENT_LINES
        else ""
    )
    return (
        f"<h2>What happened, and why</h2>{more}<div class=scroll><table class=events><thead><tr><th>at</th>"
        f"<th>what</th><th>why</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _details_html(run: ReportData) -> str:
    """Further facts, folded."""
    get = run.summary.get
    rows: dict[str, object] = {
        "weights": get("weights_sha256"),
        "state": get("state_sha256"),
        "checkpoints": _checkpoint_words(run),
        "samples": f"{run.samples:,}",
        "run again": get("samples_redone"),
        "skipped steps": get("skipped_steps"),
        "at risk": f"{get('at_risk_s'):.2f} s with a layer that had one holder" if get("at_risk_s") else None,
        "of the ideal": f"{get('of_ideal'):.1%}" if isinstance(get("of_ideal"), float) else None,
        "memory": _memory_words(get("memory")),
        "timeouts": _timeout_words(run.start_event.get("timeouts")),
        "why this shape": run.start_event.get("why"),
        "why the current one": run.shape_reason,
        "config": _config_words(run.get("config")),
    }
    if run.graph:
        more = ("widths", "staleness", "intervals", "launcher", "relaunches", "workers_lost", "generations", "value",
                "time_per_epoch_s", "edges")  # fmt: skip
        rows |= {name.replace("_", " "): run.get(name) for name in more}
    found = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in rows.items() if value
    )
    return f"<h2>Details</h2><div class=scroll><table class=facts>{found}</table></div>"


def _checkpoint_words(run: ReportData) -> str:
    if run.checkpoints:
        t, step, size = run.checkpoints[-1]
        return f"{len(run.checkpoints)} written, the newest of step {step} at {t:.2f} s ({size / 1e6:,.1f} MB)"
    listed = run.get("checkpoints")
    return f"{len(listed)} written, the newest of {listed[-1]}" if isinstance(listed, list) and listed else "none"


def _memory_words(found: object) -> str | None:
    if not isinstance(found, Mapping):
        return None
    peak, kept = found.get("peak_rss_bytes") or 0, found.get("kept_bytes") or 0
    words = f"{peak / 2**20:,.0f} MiB at most in a worker, {kept / 2**20:,.1f} MiB kept for losses"
    device, slabs = found.get("peak_device_bytes") or 0, found.get("peak_slab_bytes") or 0
    return f"{words}, {device / 2**20:,.0f} MiB on its GPU, {slabs / 2**20:,.0f} MiB page-locked" if device else words


def _config_words(found: object) -> str | None:
    """The fields of the RunConfig that were set."""
    if not isinstance(found, Mapping):
        return None
    return ", ".join(f"{name}={value}" for name, value in found.items() if value not in (None, False, [], ()))


def _timeout_words(found: object) -> str | None:
    if not isinstance(found, Mapping):
        return None
    return ", ".join(f"{name} {value:g} s" for name, value in found.items() if isinstance(value, (int, float)))


def layout_comparison(runs: Sequence[ReportData]) -> PageLayout:
    """The page that compares several runs."""
    names = ", ".join(run.name for run in runs)
    return PageLayout(f"culm: {names}", tuple(_comparison_blocks(runs)))


def _comparison_blocks(runs: Sequence[ReportData]) -> Iterator[PageBlock]:
    same = {True: "yes", False: "NO", None: "not known: not all runs have come to an end"}[same_weights(runs)]
    mark = {"yes": "good", "NO": "bad"}.get(same, "")
    yield PageBlock("head", f"<h1>{len(runs)} runs</h1>")
    tiles = _tile_html("Same weights", same.partition(":")[0], _equal_weights_groups(runs), mark)
    yield PageBlock("tiles", f'<div class="tiles">{tiles}{"".join(_run_tile(run) for run in runs)}</div>')
    if any(run.loss_curve for run in runs):
        yield PageBlock("loss-steps", title="Loss over steps", figure=charts.compare_losses(runs, over="step"))
        yield PageBlock("loss-time", title="Loss over time", figure=charts.compare_losses(runs, over="t"))
        yield PageBlock("pace", title="Pace", figure=charts.compare_paces(runs), wide=True)
    for number, name in enumerate(dict.fromkeys(name for run in runs for name in run.value_curves)):
        yield PageBlock(f"value-{number}", title=name, figure=charts.compare_values(runs, name))
    yield PageBlock("summaries", _summary_table(runs), wide=True)
    for number, run in enumerate(runs):
        if run.recoveries:
            html = _recoveries_html(run.recoveries, run.graph).replace("<h2>", f"<h2>{escape(run.name)}: ", 1)
            yield PageBlock(f"recoveries-{number}", html, wide=True)


def _run_tile(run: ReportData) -> str:
    mark = {"done": "", "failed": "bad", "cut off": "odd"}.get(run.state, "")
    note = f"{run.preemptions} preemptions, {_format_rate(run.goodput)}"
    return _tile_html(
        f"{run.name}: {run.state}", "none yet" if run.loss is None else f"loss {run.loss:.4g}", note, mark
    )


def _equal_weights_groups(runs: Sequence[ReportData]) -> str:
    """Groups of runs with equal weights."""
    groups: dict[object, list[str]] = {}
    for run in runs:
        digest = _short_digest(run, "weights_sha256")
        groups.setdefault(digest or f"no end: {run.name}", []).append(run.name)
    return "; ".join(" = ".join(group) for group in groups.values())


def _summary_table(runs: Sequence[ReportData]) -> str:
    """The summaries, one column for each run."""
    rows: dict[str, list[Any]] = {
        "state": [run.state for run in runs],
        "what": [_run_description(run) for run in runs],
        "steps": [f"{run.steps:,}" for run in runs],
        "samples": [f"{run.samples:,}" for run in runs],
        "every sample counted once": [
            {True: "yes", False: "NO", None: "not known"}[run.every_sample_once] for run in runs
        ],
        "final loss": ["" if run.loss is None else f"{run.loss:.6g}" for run in runs],
        "evaluation loss": ["" if run.evaluation is None else f"{run.evaluation:.6g}" for run in runs],
        "test accuracy": [_accuracy_tile(run)[1] if run.graph else "" for run in runs],
        "goodput": [_format_rate(run.goodput) for run in runs],
        "time": [format_duration(run.wall_s) for run in runs],
        "preemptions": [run.preemptions for run in runs],
        "recovering": [format_duration(run.recovering_s) for run in runs],
        "cost": [_format_usd(_cost_usd(run)) if _cost_usd(run) is not None else "" for run in runs],
        "the same steps on demand": [
            _format_usd(run.get("cost_on_demand_usd")) if run.get("cost_on_demand_usd") else "" for run in runs
        ],
        "weights": [_short_digest(run, "weights_sha256") for run in runs],
        "state digest": [_short_digest(run, "state_sha256") for run in runs],
    }
    shown = [(name, *values) for name, values in rows.items() if any(value not in ("", None) for value in values)]
    return "<h2>Summaries</h2>" + html_table(("", *(run.name for run in runs)), shown, css_class="facts")


def _short_digest(run: ReportData, name: str) -> str:
    return str(run.summary.get(name) or "")[:16]
