"""Render a timeline: text for the terminal, SVG for a page, a trace for Perfetto."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from culm.schedule.action import Kind
from culm.text_format import count_noun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from culm.schedule.plan import Plan
    from culm.schedule.plan_timing import ActionSpan, Timeline

_MAX_COLUMNS = 1000


def render_text(timeline: Timeline, *, column_duration: float | None = None) -> str:
    """A row for each worker and a column for each `column_duration` of time (default: the shortest action).

    An action over several columns is filled with dashes, an idle column is a dot. Actions shorter than a column may be
    omitted, as R and S are when they cost nothing. There are at most 1000 columns.
    """
    column_duration = _column_duration(timeline, column_duration)
    slots = _column_of_time(timeline.makespan, column_duration)
    width = 1 + max((len(str(span.action)) for row in timeline.spans for span in row), default=0)
    labels = [timeline.plan.slot_label(worker) for worker in range(len(timeline.spans))]
    left = max(map(len, labels))
    lines = [_title(timeline), f"{'':{left}}  {_ruler(slots, column_duration, width)}"]
    for label, row in zip(labels, timeline.spans, strict=True):
        lines.append(f"{label:>{left}}  {_text_row(row, slots, column_duration, width)}")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _column_duration(timeline: Timeline, requested: float | None) -> float:
    """`requested`, or the shortest action that takes time; larger if there would be too many columns."""
    slot = min(_durations(timeline), default=1.0) if requested is None else requested
    return max(slot, timeline.makespan / _MAX_COLUMNS) or 1.0


def _durations(timeline: Timeline) -> Iterator[float]:
    return (span.end - span.start for row in timeline.spans for span in row if span.end > span.start)


def _column_of_time(time: float, slot: float) -> int:
    return math.floor(time / slot + 0.5)


def _ruler(slots: int, slot: float, width: int) -> str:
    return "".join(f"{number * slot:<{5 * width}.4g}" for number in range(0, slots, 5))


def _text_row(row: tuple[ActionSpan, ...], slots: int, slot: float, width: int) -> str:
    idle = ".".ljust(width)
    out, at = [], 0
    for span in row:
        start, end = _column_of_time(span.start, slot), _column_of_time(span.end, slot)
        if end > start:
            fill = "-" if end - start > 1 else " "
            out += [idle * (start - at), str(span.action).ljust((end - start) * width - 1, fill), " "]
            at = end
    return "".join([*out, idle * (slots - at)])


def _title(timeline: Timeline) -> str:
    plan = timeline.plan
    shape = f"{count_noun(plan.pipelines, 'pipeline')} x {count_noun(plan.stages, 'stage')}"
    return (
        f"{plan.name}: {shape}, {count_noun(plan.micro_batches, 'micro-batch')}; "
        f"makespan {timeline.makespan:.4g}, bubble {timeline.bubble_fraction:.1%}"
    )


# SVG. Colours are light enough for dark digits; the background is white, so that they are readable on a dark page.
KIND_COLOURS = {
    Kind.F: ("#9cc3f5", "forward"),
    Kind.B: ("#f2a59d", "backward"),
    Kind.I: ("#f6c177", "backward, input"),
    Kind.W: ("#a3d39c", "backward, weights"),
    Kind.R: ("#cbb5ee", "reduce"),
    Kind.S: ("#c9ced6", "optimizer step"),
}
_LEFT, _TOP, _ROW, _BAR = 150, 76, 30, 24
"""Pixels: the column of labels, the caption and legend, a row and the bar in it."""
_STYLE = "text{font:12px system-ui,sans-serif;fill:#1f2937}.digits{text-anchor:middle}.faint{fill:#6b7280}"


def render_svg(timeline: Timeline) -> str:
    """A self-contained picture: bars coloured by kind with the micro-batch number inside, and a legend."""
    plan = timeline.plan
    scale = _scale(timeline)
    width = max(740, round(_LEFT + timeline.makespan * scale + 24))
    height = _row_y(plan, len(plan.workers) - 1) + _ROW + 34
    size = f'width="{width}" height="{height}"'
    caption = escape(_title(timeline))
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} role="img">',
        f"<title>{caption}</title><style>{_STYLE}</style>",
        f'<rect {size} rx="10" fill="#ffffff" stroke="#d1d5db"/>',
        f'<text x="20" y="30" style="font-size:15px;font-weight:600">{caption}</text>',
        *_legend(timeline),
        *(part for worker in range(len(plan.workers)) for part in _bars(timeline, worker, scale)),
        *_axis(timeline.makespan, scale, height - 14),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _scale(timeline: Timeline) -> float:
    """Pixels per unit of time: wide enough for digits in the shortest action, within a page that can be scrolled."""
    shortest = min(_durations(timeline), default=1.0)
    return min(24 / shortest, 2400 / timeline.makespan) if timeline.makespan else 1.0


def _row_y(plan: Plan, worker: int) -> int:
    """Rows from top to bottom, with a gap between pipelines."""
    return _TOP + worker * _ROW + worker // plan.stages * 12


def _legend(timeline: Timeline) -> Iterator[str]:
    shown = {span.action.kind for row in timeline.spans for span in row if span.end > span.start}
    x = 20
    for kind, (colour, meaning) in KIND_COLOURS.items():
        if kind in shown:
            yield f'<rect x="{x}" y="44" width="14" height="14" rx="3" fill="{colour}"/>'
            yield f'<text x="{x + 20}" y="55">{meaning} ({kind})</text>'
            x += 46 + 7 * len(f"{meaning} ({kind})")


def _bars(timeline: Timeline, worker: int, scale: float) -> Iterator[str]:
    plan, y = timeline.plan, _row_y(timeline.plan, worker)
    pipeline, stage = divmod(worker, plan.stages)
    yield f'<text x="20" y="{y + 16}">pipeline {pipeline} stage {stage}</text>'
    yield f'<rect x="{_LEFT}" y="{y}" width="{timeline.makespan * scale:.2f}" height="{_BAR}" fill="#f1f3f5"/>'
    for span in timeline.spans[worker]:
        if span.end > span.start:
            yield _bar(
                span, _LEFT + span.start * scale, y, (span.end - span.start) * scale, span.action.segment // plan.stages
            )


def _bar(span: ActionSpan, x: float, y: int, width: float, depth: int) -> str:
    """A bar. Bars of a worker's further segments are paler than those of its first."""
    action, start, end = span
    colour, _ = KIND_COLOURS[action.kind]
    digits = str(action.kind if action.micro is None else action.micro)
    shape = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" rx="3"'
    text = (
        f'<text class="digits" x="{x + width / 2:.2f}" y="{y + 16}">{digits}</text>' if width > 7 * len(digits) else ""
    )
    return (
        f'<g><title>{action}: {start:.4g} to {end:.4g}</title><rect {shape} fill="{colour}" '
        f'fill-opacity="{1 / (1 + 0.6 * depth):.2f}" stroke="#ffffff"/>{text}</g>'
    )


def _axis(makespan: float, scale: float, y: int) -> Iterator[str]:
    """Round times, far enough apart to be readable."""
    if makespan <= 0:
        return
    least = 60 / scale
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    for number in range(math.floor(makespan / step) + 1):
        x = _LEFT + number * step * scale
        yield f'<text class="digits faint" x="{x:.2f}" y="{y}">{number * step:.4g}</text>'


def render_perfetto(timeline: Timeline, *, microseconds: float = 1e6) -> dict[str, Any]:
    """The Chrome trace event format, for ui.perfetto.dev: a process for each pipeline, a thread for each worker.

    `microseconds` is the length of one unit of time: the default is for costs in seconds.
    """
    plan = timeline.plan
    events = [event for worker in range(len(plan.workers)) for event in _track_metadata(plan, worker)]
    for worker, row in enumerate(timeline.spans):
        events += [_span_event(plan, worker, span, microseconds) for span in row]
    about = {"plan": plan.name, "makespan": timeline.makespan, "bubble": timeline.bubble_fraction}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _track_ids(plan: Plan, worker: int) -> dict[str, int]:
    """Counted from 1: viewers keep process and thread 0 for the idle task."""
    return {"pid": worker // plan.stages + 1, "tid": worker + 1}


def _track_metadata(plan: Plan, worker: int) -> Iterator[dict[str, Any]]:
    pipeline, stage = divmod(worker, plan.stages)
    for kind, name in (("process_name", f"pipeline {pipeline}"), ("thread_name", f"stage {stage}")):
        yield {"ph": "M", "name": kind, **_track_ids(plan, worker), "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", **_track_ids(plan, worker), "args": {"sort_index": stage}}


def _span_event(plan: Plan, worker: int, span: ActionSpan, microseconds: float) -> dict[str, Any]:
    action, start, end = span
    return {
        "ph": "X",
        "name": str(action),
        "cat": KIND_COLOURS[action.kind][1],
        **_track_ids(plan, worker),
        "ts": start * microseconds,
        "dur": (end - start) * microseconds,
        "args": {"segment": action.segment, "kind": str(action.kind), "micro": action.micro},
    }
