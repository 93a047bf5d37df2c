"""The facts of a run for reports. Pure: contents of files in, figures, curves and sentences out; no layout.

Runs may be running, done, failed, cut off, resumed, or have files missing. A figure that the files do not have is None,
never a guess.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple

from culm.market.cost_record import CostRecord
from culm.observe.report.load_run import RunContents
from culm.observe.step_metrics import StepMetrics

RunState = Literal["waiting", "running", "done", "failed", "cut off"]
EventFields = Mapping[str, Any]
CUT_OFF_AFTER_S = 60.0
"""A run that wrote nothing for this long, and for 20 of its steps, counts as cut off."""
CUT_OFF_WITHOUT_WRITER_S = 5.0
"""The same if no process of this machine has its files open: this long, and 3 of its steps."""
_RECENT_STEPS = 32


class CurvePoint(NamedTuple):
    """A step, on the time axis of the whole run."""

    t: float
    step: int
    value: float


class EventMark(NamedTuple):
    """An event to be marked on charts."""

    t: float
    kind: str
    text: str


class NodePresence(NamedTuple):
    """The presence of a node in the run."""

    node: str
    joined_at: float
    ended_at: float | None
    """None: it is present, or was when the run ended."""
    end_reason: str
    """lost or left; empty while it is present."""
    assignments: tuple[tuple[float, float, str], ...]
    """Begin, end and slot of each of its assignments."""
    notices: tuple[float, ...]


class RecoveryRow(NamedTuple):
    """A recovery from the loss of nodes."""

    t: float | None
    step: int
    lost: tuple[str, ...]
    source: str
    detect_ms: float
    decide_ms: float
    move_ms: float
    redo_ms: float
    redone_actions: int

    @property
    def total_ms(self) -> float:
        return self.detect_ms + self.decide_ms + self.move_ms + self.redo_ms


class EventLine(NamedTuple):
    """An event as a sentence, with its reason."""

    t: float
    kind: str
    text: str
    why: str


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """All facts of one run."""

    name: str
    job: str
    graph: bool
    """Whether it trains a graph network: its steps are epochs."""
    state: RunState
    why_state: str
    start_event: EventFields = field(default_factory=dict)
    """The event `run_started`: pipelines, stages, schedule, strategy, ..."""
    summary: EventFields = field(default_factory=dict)
    """summary.json, or the summary so far of a run that is seen in the store."""
    current: EventFields = field(default_factory=dict)
    cost: CostRecord | None = None
    """What its nodes have cost; None: no node had a price."""
    steps: int = 0
    """Committed steps, including those before a resume."""
    steps_requested: int | None = None
    samples: int = 0
    every_sample_once: bool | None = None
    """Whether every sample was counted exactly once; None: unknown."""
    proof: str = ""
    preemptions: int = 0
    recoveries: tuple[RecoveryRow, ...] = ()
    setup_s: float | None = None
    wall_s: float | None = None
    """Seconds from the begin of the first step to the end of the last."""
    recovering_s: float = 0.0
    goodput: float | None = None
    pace: float | None = None
    """Samples per second over the last steps."""
    left_s: float | None = None
    loss: float | None = None
    evaluation: float | None = None
    loss_curve: tuple[CurvePoint, ...] = ()
    """Thinned to what a chart can show."""
    evaluation_curve: tuple[CurvePoint, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    """Named values: the last of each."""
    value_curves: Mapping[str, tuple[CurvePoint, ...]] = field(default_factory=dict)
    pace_curve: tuple[tuple[float, float], ...] = ()
    """Samples per second in windows of time."""
    goodput_curve: tuple[tuple[float, float], ...] = ()
    """Samples so far over seconds so far."""
    node_presences: tuple[NodePresence, ...] = ()
    epochs: tuple[tuple[float, int], ...] = ()
    """Begin and number of each epoch."""
    marks: tuple[EventMark, ...] = ()
    event_lines: tuple[EventLine, ...] = ()
    checkpoints: tuple[tuple[float, int, int], ...] = ()
    """Time, completed steps and bytes of each checkpoint."""
    reshapes: tuple[EventFields, ...] = ()
    """Changes of shape, with the seconds that they took."""
    shape_reason: str = ""
    """Why the shape was last changed, or why the run began without all of its nodes; empty: it has the initial shape,
    or the change followed from a loss."""
    filled_slots: int | None = None
    """Slots of the current epoch that a node fills; None: there is no epoch yet."""
    queue_samples: tuple[EventFields, ...] = ()
    """Graph runs: queue lengths, workers and spread over time."""
    accuracies: tuple[EventFields, ...] = ()
    last_event_t: float = 0.0
    """The time of the last event or step."""
    damaged_lines: int = 0

    @property
    def nodes_present(self) -> int:
        """Nodes that are present now, or were at the end."""
        return sum(presence.ended_at is None for presence in self.node_presences)

    def get(self, name: str) -> Any:
        """A field of the summary, or else of the event `run_started`."""
        found = self.summary.get(name)
        return self.start_event.get(name) if found is None else found


def build_report_data(contents: RunContents) -> ReportData:
    """Compute the facts of a run from its contents."""
    events, ends = _join_parts(contents.events)
    starts = _resume_steps(contents.events)
    steps, times = contents.steps, _step_times(contents.steps, starts, ends)
    start: EventFields = next((e for e in reversed(events) if e["kind"] == "run_started"), {})
    graph = _is_graph(contents)
    state, why = _run_state(contents, events, times)
    summary = dict(contents.summary or {}) if state == "done" or contents.live else {}
    last = max([0.0, *(float(e["t"]) for e in events), *times[-1:]])
    recoveries = _recoveries(events, summary)
    last_part = next((i for i, s in enumerate(steps) if s.step >= starts[-1]), len(steps)) if starts else 0
    part = steps[last_part:]
    speed = _speed_figures(
        part,
        times[last_part:],
        [e for e in events if e["t"] >= _last_part_start(ends)],
        _last_part_start(ends),
        summary,
    )
    once, proof = _sample_count_check(part, start, summary)
    samples = [step.samples for step in steps]
    return ReportData(
        name=contents.name,
        job=str(start.get("job") or summary.get("graph") or start.get("graph") or ""),
        graph=graph,
        state=state,
        why_state=why,
        start_event=start,
        summary=summary,
        current=contents.current,
        cost=contents.cost,
        steps=_as_int(summary.get("steps"), steps[-1].step + 1 if steps else _as_int(start.get("start"), 0)),
        steps_requested=_as_int(start.get("epochs"), None) or _as_int(start.get("steps"), None),
        samples=_as_int(summary.get("samples"), sum(s.samples for s in part)),
        every_sample_once=once,
        proof=proof,
        preemptions=_preemptions(events, summary),
        recoveries=recoveries,
        recovering_s=sum(found.total_ms for found in recoveries) / 1e3,
        **speed,
        left_s=_remaining_s(part, times, start, state),
        loss=_as_float(summary.get("final_loss"), _last_value(steps, "loss")),
        evaluation=_last_value(steps, "eval_loss"),
        loss_curve=tuple(_curve(steps, times, [step.loss for step in steps])),
        evaluation_curve=tuple(_curve(steps, times, [step.eval_loss for step in steps])),
        values={name: value for step in steps for name, value in step.values.items()},
        value_curves=_value_curves(steps, times),
        pace_curve=tuple(pace_windows(times, samples)),
        goodput_curve=tuple(cumulative_goodput(times, samples, speed["setup_s"] if not starts else None)),
        node_presences=tuple(_node_presences(events, last)),
        epochs=tuple((e["t"], _as_int(e.get("number"), 0)) for e in events if e["kind"] == "epoch"),
        marks=tuple(_marks(events)),
        event_lines=tuple(_event_lines(events)),
        checkpoints=tuple(
            (e["t"], _as_int(e.get("step"), 0), _as_int(e.get("bytes"), 0)) for e in events if e["kind"] == "checkpoint"
        ),
        reshapes=tuple(e for e in events if e["kind"] == "reshaped"),
        shape_reason=_shape_reason(events),
        filled_slots=next((len(_as_list(e.get("members"))) for e in reversed(events) if e["kind"] == "epoch"), None),
        queue_samples=tuple(e for e in events if e["kind"] == "queues"),
        accuracies=tuple(e for e in events if e["kind"] == "evaluation" and "test" in e),
        last_event_t=last,
        damaged_lines=contents.damaged_lines,
    )


def same_weights(runs: Sequence[ReportData], digest: str = "weights_sha256") -> bool | None:
    """Whether all runs have the same digest; None: not all have ended."""
    found = [known if isinstance(known := run.summary.get(digest), str) else None for run in runs]
    return None if None in found or len(found) < 2 else len(set(found)) == 1


def _resume_steps(events: Sequence[EventFields]) -> list[int]:
    """The first step of each part of a run after the first; a part begins whenever the run is resumed."""
    return [_as_int(e.get("start"), 0) for e in events if e["kind"] == "run_started"][1:]


def _join_parts(events: Sequence[EventFields]) -> tuple[list[dict[str, Any]], list[float]]:
    """The events of all parts on one time axis, and the end of each part: every part counts its seconds from zero."""
    found: list[dict[str, Any]] = []
    offset, end, ends = 0.0, 0.0, list[float]()
    for event in events:
        if event["kind"] == "run_started" and found:
            ends.append(end)
            offset = end
        t = offset + float(event["t"])
        end = max(end, t)
        found.append({**event, "t": t})
    return found, [*ends, end]


def _step_times(steps: Sequence[StepMetrics], starts: Sequence[int], ends: Sequence[float]) -> list[float]:
    """The end of each step on the common time axis. A step belongs to the last part that ran it."""
    if not starts:
        return [step.t for step in steps]
    parts = [sum(step.step >= start for start in starts) for step in steps]
    return [(ends[part - 1] if part else 0.0) + step.t for part, step in zip(parts, steps, strict=True)]


def _is_graph(contents: RunContents) -> bool:
    return "epochs" in (contents.summary or {}) or any(e["kind"] in ("generation", "queues") for e in contents.events)


def _run_state(contents: RunContents, events: Sequence[EventFields], times: Sequence[float]) -> tuple[RunState, str]:
    """The state of the run and the reason for it. The summary of a part before a resume is ignored."""
    ended = next((e for e in reversed(events) if e["kind"] in ("run_started", "finished", "failed")), None)
    if ended is not None and ended["kind"] == "failed":
        return "failed", f"{ended.get('error') or 'error'}: {ended.get('message') or 'no reason was written'}"
    began_again = (
        ended is not None and ended["kind"] == "run_started" and sum(e["kind"] == "run_started" for e in events) > 1
    )
    if contents.summary and not contents.live and not began_again:
        return "done", ""
    if not events and not times:
        return "waiting", "it has not written anything yet"
    quiet, pace = contents.idle_s, _recent_step_s(times)
    left = contents.has_open_writer is False and bool(times)
    patience = max(CUT_OFF_WITHOUT_WRITER_S, 3 * pace) if left else max(CUT_OFF_AFTER_S, 20 * pace)
    if contents.live or contents.has_open_writer or quiet is None or quiet < patience:
        return "running", ""
    return "cut off", f"it has not finished, and has written nothing for {quiet:.0f} s"


def _recent_step_s(times: Sequence[float]) -> float:
    lately = times[-_RECENT_STEPS:]
    return (lately[-1] - lately[0]) / (len(lately) - 1) if len(lately) > 1 else 0.0


def _last_part_start(ends: Sequence[float]) -> float:
    """The begin of the last part of the run."""
    return ends[-2] if len(ends) > 1 else 0.0


def _speed_figures(
    part: Sequence[StepMetrics],
    times: Sequence[float],
    events: Sequence[EventFields],
    begin: float,
    summary: EventFields,
) -> dict[str, float | None]:
    """Figures of the last part of a run: seconds to its first step and since then, samples per second over all of its
    steps and over the latest ones."""
    ready = [float(e["t"]) for e in events if e["kind"] in ("ready", "server-up")]
    size = _first_epoch_size(events)
    first = ready[size - 1] if len(ready) >= size else None
    end = times[-1] if times else None
    wall = _as_float(summary.get("wall_s"), None if end is None or first is None else end - first)
    samples = sum(step.samples for step in part)
    lately = part[-_RECENT_STEPS:]
    seconds = times[-1] - times[-len(lately)] if lately else 0.0
    return {
        "setup_s": _as_float(summary.get("start_s"), None if first is None else first - begin),
        "wall_s": wall,
        "goodput": _as_float(summary.get("goodput"), samples / wall if wall and wall > 0 else None),
        "pace": sum(step.samples for step in lately[1:]) / seconds if seconds > 0 else None,
    }


def _first_epoch_size(events: Sequence[EventFields]) -> int:
    """The number of workers that must be ready before the first step."""
    first = next((e for e in events if e["kind"] == "epoch"), None)
    return max(1, len(_as_list(first.get("members")))) if first is not None else 1


def _remaining_s(
    part: Sequence[StepMetrics], times: Sequence[float], start: EventFields, state: RunState
) -> float | None:
    asked, pace = _as_int(start.get("steps"), None), _recent_step_s(times[-len(part) :] if part else ())
    if state != "running" or asked is None or not part or not pace:
        return None
    return float(max(0.0, (asked - part[-1].step - 1) * pace))


def _sample_count_check(
    part: Sequence[StepMetrics], start: EventFields, summary: EventFields
) -> tuple[bool | None, str]:
    """Whether every sample was counted once: by the summary, or by the steps so far if there is none."""
    names = ("samples", "samples_expected", "samples_lost", "samples_duplicated")
    samples, expected, lost, twice = (_as_int(summary.get(name), None) for name in names)
    if None not in (samples, expected, lost, twice):
        proof = f"{samples:,} of {expected:,} expected, {lost:,} lost, {twice:,} counted twice"
        return samples == expected and not lost and not twice, proof
    batch, steps = _as_int(start.get("global_batch"), None), {step.step for step in part}
    if batch is None or not part:
        return None, ""
    counted, expected = sum(step.samples for step in part), len(steps) * batch
    right = counted == expected and len(steps) == len(part)
    return right, f"so far {counted:,} of {expected:,} in {len(steps):,} committed steps"


def _parts(events: Sequence[EventFields]) -> list[list[EventFields]]:
    """The events of each part of a run: a resumed run has several. Node numbers begin again in each, and the summary
    is that of the last."""
    parts: list[list[EventFields]] = [[]]
    for event in events:
        if event["kind"] == "run_started" and parts[-1]:
            parts.append([])
        parts[-1].append(event)
    return parts


def _preemptions(events: Sequence[EventFields], summary: EventFields) -> int:
    """Nodes that were lost or left, in all parts of the run."""
    *earlier, last = _parts(events)
    before = sum(len(_departed_nodes(part)) for part in earlier)
    of_last: int = _as_int(summary.get("preemptions"), len(_departed_nodes(last)))
    return before + of_last


def _recoveries(events: Sequence[EventFields], summary: EventFields) -> tuple[RecoveryRow, ...]:
    """The recoveries in all parts of the run."""
    *earlier, last = _parts(events)
    before = [_recovery_row(e, e["t"]) for part in earlier for e in part if e["kind"] == "recovered"]
    return *before, *_recoveries_of_part(last, summary)


def _recoveries_of_part(events: Sequence[EventFields], summary: EventFields) -> tuple[RecoveryRow, ...]:
    """Recoveries from events, which have times; from the summary if it has more, because events of a lost leader are
    missing."""
    recovered = [e for e in events if e["kind"] == "recovered"]
    listed = _as_list(summary.get("recoveries"))
    if len(listed) <= len(recovered):
        return tuple(_recovery_row(e, e["t"]) for e in recovered)
    rows = [_recovery_row(row, None) for row in listed if isinstance(row, Mapping)]
    times = {(row.step, row.lost): row.t for row in (_recovery_row(e, e["t"]) for e in recovered)}
    losses = [e for e in events if e["kind"] in ("server-lost", "lost")]
    return tuple(row._replace(t=times.get((row.step, row.lost), _estimate_recovery_time(row, losses))) for row in rows)


def _estimate_recovery_time(row: RecoveryRow, losses: Sequence[EventFields]) -> float | None:
    """The time of a recovery that only the summary has: its duration after the loss of its first node."""
    at = next((float(e["t"]) for e in losses if str(e.get("node")) in row.lost), None)
    return None if at is None else at + row.total_ms / 1e3


def _recovery_row(row: EventFields, t: float | None) -> RecoveryRow:
    ms = {name: _as_float(row.get(name), 0.0) or 0.0 for name in ("detect_ms", "decide_ms", "move_ms", "redo_ms")}
    return RecoveryRow(
        t=t,
        step=_as_int(row.get("step"), 0),
        lost=tuple(map(str, _as_list(row.get("lost")))),
        source=str(row.get("source") or ""),
        redone_actions=_as_int(row.get("redone_actions"), 0),
        **ms,
    )


def _departed_nodes(events: Sequence[EventFields]) -> set[str]:
    return {str(e.get("node")) for e in events if e["kind"] in ("lost", "left", "server-lost")}


def _node_presences(events: Sequence[EventFields], end: float) -> Iterator[NodePresence]:
    """The presence of every node, ordered by its end. A resumed run begins without nodes."""
    present: dict[str, _PresentNode] = {}
    for event in events:
        kind, t, node = event["kind"], float(event["t"]), str(event.get("node"))
        if kind == "run_started":
            yield from (node.to_presence(t, "") for node in present.values())
            present.clear()
        elif kind in ("node_joined", "server-up"):
            present.setdefault(node, _PresentNode(node, t))
        elif kind == "notice" and node in present:
            present[node].notices.append(t)
        elif kind in ("lost", "left", "server-lost") and node in present:
            yield present.pop(node).to_presence(t, kind.removeprefix("server-"))
        elif kind == "epoch":
            _update_slots(present, event, t)
    yield from (node.to_presence(None, "", end) for node in present.values())


class _PresentNode:
    """A node that is present: since when, and in which slots it was."""

    def __init__(self, node: str, joined_at: float) -> None:
        self.node, self.joined_at = node, joined_at
        self.slot_changes: list[tuple[float, str]] = []
        self.notices: list[float] = []

    def to_presence(self, ended_at: float | None, reason: str, run_end: float | None = None) -> NodePresence:
        until = ended_at if ended_at is not None else run_end or self.joined_at
        begins = [*self.slot_changes, (until, "")]
        assignments = [(a, b, slot) for (a, slot), (b, _) in pairwise(begins) if slot]
        return NodePresence(self.node, self.joined_at, ended_at, reason, tuple(assignments), tuple(self.notices))


def _update_slots(present: Mapping[str, _PresentNode], event: EventFields, t: float) -> None:
    members = [str(node) for node in _as_list(event.get("members"))]
    slots = [str(slot) for slot in _as_list(event.get("slots"))] or ["in"] * len(members)
    for name, node in present.items():
        slot = ", ".join(slot for member, slot in zip(members, slots, strict=False) if member == name)
        if (node.slot_changes[-1][1] if node.slot_changes else "") != slot:
            node.slot_changes.append((t, slot))


_MARK_KINDS = {
    "lost": "lost",
    "server-lost": "lost",
    "worker-lost": "lost",
    "left": "left",
    "notice": "notice",
    "recovered": "recovered",
    "reshaped": "reshaped",
    "rewound": "rewound",
    "failed": "failed",
}


def _shape_reason(events: Sequence[EventFields]) -> str:
    """Why the last change of shape was made, if it was announced, or why the run began without all of its nodes."""
    reason = announced = ""
    for event in events:
        if event["kind"] == "epoch" and event.get("number") == 1:
            reason = str(event.get("why") or "")
        elif event["kind"] == "drain":
            announced = str(event.get("why") or "")
        elif event["kind"] == "reshaped":
            reason, announced = announced, ""
    return reason


def _marks(events: Sequence[EventFields]) -> Iterator[EventMark]:
    """The events that charts mark. Nodes that join after the first epoch are marked, too."""
    begun = False
    for event in events:
        kind = event["kind"]
        begun = (begun or kind in ("epoch", "generation")) and kind != "run_started"
        if kind in _MARK_KINDS:
            yield EventMark(float(event["t"]), _MARK_KINDS[kind], event_sentence(event))
        elif kind == "node_joined" and begun:
            yield EventMark(float(event["t"]), "joined", event_sentence(event))


_UNLISTED_KINDS = {"ready", "queues", "server-up", "worker-up", "checkpoint", "evaluation"}
"""Events that charts show, or that are of no interest by themselves."""


def _event_lines(events: Sequence[EventFields]) -> Iterator[EventLine]:
    """Events as sentences. Consecutive suspicions with the same reason are merged."""
    shown = [event for event in events if event["kind"] not in _UNLISTED_KINDS]
    for (kind, why), alike in groupby(shown, key=_kind_and_reason):
        together = list(alike)
        if kind == "suspected":
            nodes = dict.fromkeys(str(event.get("node")) for event in together)
            together = [{**together[0], "node": ", ".join(nodes)}]
        for event in together:
            yield EventLine(float(event["t"]), str(event["kind"]), event_sentence(event), why)


def _kind_and_reason(event: EventFields) -> tuple[str, str]:
    return str(event["kind"]), str(event.get("why") or "")


def event_sentence(event: EventFields) -> str:
    """An event as a sentence; an event of an unknown kind by its fields."""
    for template in _SENTENCE_TEMPLATES.get(str(event["kind"]), ()):
        # this event may lack a field of the sentence
        with contextlib.suppress(KeyError, ValueError, TypeError, IndexError):
            return template.format_map({name: _format_nodes(value) for name, value in event.items()})
    rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("t", "kind", "why") and v is not None)
    return f"{str(event['kind']).replace('_', ' ').replace('-', ' ')}{': ' if rest else ''}{rest}"


def _format_nodes(value: object) -> object:
    """A list in an event is a list of nodes: "node 3", "nodes 1, 2". A node with several slots is named once."""
    if not isinstance(value, (list, tuple)):
        return value
    value = list(dict.fromkeys(map(str, value)))
    return f"node{'' if len(value) == 1 else 's'} {', '.join(value) or 'none'}"


_SENTENCE_TEMPLATES = {
    "run_started": (
        "the run begins: {nodes} nodes, up to step {steps}",
        "the run begins: {graph}, {model}, {mode}, up to epoch {epochs}",
    ),
    "node_joined": ("node {node} has joined",),
    "storage_failed": ("{path} cannot be written: {delayed} is retried",),
    "storage_recovered": ("{path} can be written again after {seconds:.1f} s",),
    "lost": ("node {node} is lost in step {step}",),
    "left": ("node {node} has handed over and left",),
    "worker_failed": (
        "node {node} raised an exception in {action} of step {step}: {why}",
        "node {node} raised an exception: {why}",
    ),
    "out_of_memory": ("node {node} has too little memory in {action} of step {step}: {why}",),
    "repeated": ("node {node} repeats the action that raised: {why}",),
    "given_up": ("node {node} is given up: {why}",),
    "incident": ("{text}",),
    "refused": ("node {node} is refused: {why}",),
    "sessions_expired": ("all sessions in the store expired in step {step}: {why}",),
    "session_lost": ("node {node} has lost its session in the store: {why}",),
    "returned": ("node {node} is back with its state",),
    "awaiting": ("waiting up to {seconds:.0f} s for {nodes}: {why}",),
    "notice": ("node {node} has notice: {seconds:.0f} s",),
    "suspected": ("node {node} cannot reach a peer",),
    "epoch": ("epoch {number} begins with {members}",),
    "slow_node": ("node {node} takes {factor} times as long as its peers: it gets fewer micro-batches",),
    "slow_node_stays": ("node {node} takes {factor} times as long as usual, and no other node can do its work",),
    "slow_node_replaced": ("node {node} is slow and is replaced",),
    "slow_nodes_over": ("no node is slow any more",),
    "recovered": ("step {step} went on without {lost}, by {source}: {redone_actions} actions run again",),
    "protected": ("node {node} has a copy of stage {stage}",),
    "decision": ("decided: {verdict} ({layout})",),
    "drain": ("steps before {step} are completed, then the shape is {layout}",),
    "plan_improved": ("from step {step} on a better plan is used: steps are {gain:.1%} shorter",),
    "plan_kept": ("the plan of a step stays as it is",),
    "reshaped": ("the shape is {layout}: {layers} layers moved in {seconds:.2f} s",),
    "corruption": ("damage was found: {why}",),
    "corruption_unresolved": ("the faulty node is not known: {why}",),
    "quarantined": ("node {node} is quarantined: {why}",),
    "samples_wrong": ("step {step}: {lost} samples are missing and {duplicated} count twice",),
    "rewound": ("back to step {step}: {steps} steps are run again",),
    "leader": ("another node became the leader",),
    "finished": ("all {steps} steps are done",),
    "failed": ("the run failed: {message}",),
    "stopped": ("stopped after step {step}",),
    "skipped": ("step {step} is skipped: the weights do not move",),
    "hook_slow": ("{name} has been running for {seconds:.0f} s",),
    "hook_failed": ("{name} failed: {why}",),
    "hook_returned": ("{name} has returned for step {step}; it is called again",),
    "writer_failed": ("the writer {writer} failed and gets no more steps",),
    "server-lost": ("server {node} is lost",),
    "worker-lost": ("worker {worker} is lost",),
    "generation": ("generation {number} begins from epoch {version}",),
    "autotune": ("{workers} workers from now on",),
    "kill": ("{node} is killed on purpose",),
}


def _value_curves(steps: Sequence[StepMetrics], times: Sequence[float]) -> dict[str, tuple[CurvePoint, ...]]:
    """A curve for each named value, in the order in which they first appear."""
    names = dict.fromkeys(name for step in steps for name in step.values)
    return {name: tuple(_curve(steps, times, [step.values.get(name) for step in steps])) for name in names}


def _curve(steps: Sequence[StepMetrics], times: Sequence[float], values: Sequence[float | None]) -> list[CurvePoint]:
    """The finite values as a curve, with no more points than can be told apart."""
    found = [i for i, value in enumerate(values) if value is not None and math.isfinite(value)]
    numbers = [float(values[i] or 0.0) for i in found]
    return [CurvePoint(times[found[i]], steps[found[i]].step, numbers[i]) for i in downsample_indices(numbers)]


def _last_value(steps: Sequence[StepMetrics], name: str) -> float | None:
    return next(
        (found for step in reversed(steps) if (found := _as_float(getattr(step, name), None)) is not None), None
    )


def _as_float(value: object, default: float | None) -> float | None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if real else default  # type: ignore[arg-type]


def _as_list(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _as_int(value: object, default: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def downsample_indices(values: Sequence[float], max_points: int = 1500) -> list[int]:
    """The indices to draw: first, minimum, maximum and last of each stretch, so that spikes presence visible."""
    if len(values) <= max_points:
        return list(range(len(values)))
    stride = -(-4 * len(values) // max_points)
    found: list[int] = []
    for at in range(0, len(values), stride):
        stretch = values[at : at + stride]
        low, high = stretch.index(min(stretch)), stretch.index(max(stretch))
        found += sorted({at, at + low, at + high, at + len(stretch) - 1})
    return found


def pace_windows(times: Sequence[float], samples: Sequence[int], windows: int = 240) -> list[tuple[float, float]]:
    """Samples per second in equal windows of time, by the middle of each, so that a pause shows as a dent."""
    times = list(accumulate(times, max))  # clocks of different leaders may differ slightly
    if len(times) < 5 or times[-1] <= times[0]:
        return []
    windows = max(1, min(windows, (len(times) - 1) // 3))
    first, width = times[0], (times[-1] - times[0]) / windows
    totals = list(accumulate(samples))
    edges = [_samples_until(first + number * width, times, totals) for number in range(windows)] + [float(totals[-1])]
    return [(first + (n + 0.5) * width, (b - a) / width) for n, (a, b) in enumerate(pairwise(edges))]


def _samples_until(t: float, times: Sequence[float], totals: Sequence[int]) -> float:
    """Samples counted until a time; the samples of a step are spread evenly over its duration."""
    after = bisect.bisect_right(times, t)
    if after >= len(times):
        return float(totals[-1])
    before = after - 1
    share = (t - times[before]) / (times[after] - times[before])
    return totals[before] + share * (totals[after] - totals[before])


def cumulative_goodput(
    times: Sequence[float], samples: Sequence[int], begin: float | None = None, max_points: int = 400
) -> list[tuple[float, float]]:
    """Samples so far divided by seconds so far."""
    if not times:
        return []
    zero, totals = times[0] if begin is None else begin, list(accumulate(samples))
    stride = -(-len(times) // max_points)
    shown = {*range(stride - 1, len(times), stride), len(times) - 1}
    return [(times[i], totals[i] / (times[i] - zero)) for i in sorted(shown) if times[i] > zero]
