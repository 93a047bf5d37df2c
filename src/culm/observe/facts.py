"""What there is to say of a run. Pure: contents in, facts out; nothing here knows how they are shown.

It takes runs as they are: under way, done, failed, cut off, resumed, with files missing. What the files do not say is
None, and not made up.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple

from culm.observe.reading import Contents, Figure, Step

State = Literal["waiting", "running", "done", "failed", "cut off"]
Event = Mapping[str, Any]
SILENT_S = 60.0
"""A run of which nothing was heard for so long, and for twenty of its steps, is taken for cut off."""
LEFT_S = 5.0
"""The same where no process of this machine has its files open any more, and for three of its steps."""
_LATELY = 32


class Point(NamedTuple):
    """A step, on the time axis of the whole run."""

    t: float
    step: int
    value: float


class Mark(NamedTuple):
    """Something that befell the run."""

    t: float
    kind: str
    text: str


class Stay(NamedTuple):
    """A node while it was there."""

    node: str
    came: float
    gone: float | None
    """None: it is still there, or was when the run ended."""
    how: str
    """Why it is gone: lost, left; empty while it is there."""
    posts: tuple[tuple[float, float, str], ...]
    """From when to when it had which slot."""
    notices: tuple[float, ...]


class Recovery(NamedTuple):
    """A loss that the run went on from."""

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


class Happened(NamedTuple):
    """An event for people."""

    t: float
    kind: str
    text: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run."""

    name: str
    job: str
    graph: bool
    """Whether it trains a graph network: its steps are epochs."""
    state: State
    why_state: str
    start: Event = field(default_factory=dict)
    """What it was set up as: pipelines, stages, schedule, strategy, ..."""
    summary: Event = field(default_factory=dict)
    """What it came to, or so far."""
    now: Event = field(default_factory=dict)
    steps: int = 0
    """Done, those before a resume included."""
    asked: int | None = None
    samples: int = 0
    once: bool | None = None
    """Whether every sample was counted once; None: nobody can say."""
    proof: str = ""
    preemptions: int = 0
    recoveries: tuple[Recovery, ...] = ()
    setup_s: float | None = None
    wall_s: float | None = None
    """From the first step's begin to the last one's end."""
    recovering_s: float = 0.0
    goodput: float | None = None
    pace: float | None = None
    """Samples a second, lately."""
    left_s: float | None = None
    loss: float | None = None
    evaluation: float | None = None
    losses: tuple[Point, ...] = ()
    """As many as can be told apart."""
    evaluations: tuple[Point, ...] = ()
    paces: tuple[tuple[float, float], ...] = ()
    """Samples a second in windows of time."""
    goodputs: tuple[tuple[float, float], ...] = ()
    """Samples so far over seconds so far."""
    stays: tuple[Stay, ...] = ()
    epochs: tuple[tuple[float, int], ...] = ()
    """When each began, and its number."""
    marks: tuple[Mark, ...] = ()
    happened: tuple[Happened, ...] = ()
    checkpoints: tuple[tuple[float, int, int], ...] = ()
    """When, of how many steps, bytes."""
    reshapes: tuple[Event, ...] = ()
    """Changes of shape, with the seconds that they took."""
    looks: tuple[Event, ...] = ()
    """Of a graph run: queues, workers and spread over time."""
    accuracies: tuple[Event, ...] = ()
    ends_at: float = 0.0
    """The last moment that anything is known of."""
    damaged: int = 0

    @property
    def there(self) -> int:
        """Nodes at the moment, or at the end."""
        return sum(stay.gone is None for stay in self.stays)

    def get(self, name: str) -> Any:
        """A field of the summary, or else of what the run was set up as."""
        found = self.summary.get(name)
        return self.start.get(name) if found is None else found


def facts(contents: Contents) -> Facts:
    """All there is to say."""
    events, ends = _on_one_axis(contents.events)
    starts = _starts(contents.events)
    steps, times = contents.steps, _times(contents.steps, starts, ends)
    start: Event = next((e for e in reversed(events) if e["kind"] == "run_started"), {})
    graph = _is_graph(contents)
    state, why = _state(contents, events, times)
    summary = dict(contents.summary or {}) if state == "done" or contents.live else {}
    last = max([0.0, *(float(e["t"]) for e in events), *times[-1:]])
    recoveries = _recoveries(events, summary)
    last_part = next((i for i, s in enumerate(steps) if s.step >= starts[-1]), len(steps)) if starts else 0
    part = steps[last_part:]
    speed = _speed(part, times[last_part:], [e for e in events if e["t"] >= _begin(ends)], _begin(ends), summary)
    once, proof = _proof(part, start, summary)
    samples = [step.samples for step in steps]
    return Facts(
        name=contents.name,
        job=str(start.get("job") or summary.get("graph") or start.get("graph") or ""),
        graph=graph,
        state=state,
        why_state=why,
        start=start,
        summary=summary,
        now=contents.now,
        steps=_whole(summary.get("steps"), steps[-1].step + 1 if steps else _whole(start.get("start"), 0)),
        asked=_whole(start.get("epochs"), None) or _whole(start.get("steps"), None),
        samples=_whole(summary.get("samples"), sum(s.samples for s in part)),
        once=once,
        proof=proof,
        preemptions=_whole(summary.get("preemptions"), len(_gone(events))),
        recoveries=recoveries,
        recovering_s=sum(found.total_ms for found in recoveries) / 1e3,
        **speed,
        left_s=_left(part, times, start, state),
        loss=_number(summary.get("final_loss"), _last(steps, "loss")),
        evaluation=_last(steps, "eval_loss"),
        losses=tuple(_points(steps, times, [step.loss for step in steps])),
        evaluations=tuple(_points(steps, times, [step.eval_loss for step in steps])),
        paces=tuple(paces(times, samples)),
        goodputs=tuple(goodputs(times, samples, speed["setup_s"] if not starts else None)),
        stays=tuple(_stays(events, last)),
        epochs=tuple((e["t"], _whole(e.get("number"), 0)) for e in events if e["kind"] == "epoch"),
        marks=tuple(_marks(events)),
        happened=tuple(_happened(events)),
        checkpoints=tuple(
            (e["t"], _whole(e.get("step"), 0), _whole(e.get("bytes"), 0)) for e in events if e["kind"] == "checkpoint"
        ),
        reshapes=tuple(e for e in events if e["kind"] == "reshaped"),
        looks=tuple(e for e in events if e["kind"] == "queues"),
        accuracies=tuple(e for e in events if e["kind"] == "evaluation" and "test" in e),
        ends_at=last,
        damaged=contents.damaged,
    )


def same_weights(runs: Sequence[Facts], digest: str = "weights_sha256") -> bool | None:
    """Whether all came to the same bits; None: not all have come to an end."""
    found = [known if isinstance(known := run.summary.get(digest), str) else None for run in runs]
    return None if None in found or len(found) < 2 else len(set(found)) == 1


def _starts(events: Sequence[Event]) -> list[int]:
    """The first step of each part of a run: one, and another for every time that it was resumed."""
    return [_whole(e.get("start"), 0) for e in events if e["kind"] == "run_started"][1:]


def _on_one_axis(events: Sequence[Event]) -> tuple[list[dict[str, Any]], list[float]]:
    """Events of all parts after each other, and when each part ended: every part counts its seconds afresh."""
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


def _times(steps: Sequence[Step], starts: Sequence[int], ends: Sequence[float]) -> list[float]:
    """When steps ended, on the axis. A step stands there once, in the last part that has run it."""
    if not starts:
        return [step.t for step in steps]
    parts = [sum(step.step >= start for start in starts) for step in steps]
    return [(ends[part - 1] if part else 0.0) + step.t for part, step in zip(parts, steps, strict=True)]


def _is_graph(contents: Contents) -> bool:
    return "epochs" in (contents.summary or {}) or any(e["kind"] in ("generation", "queues") for e in contents.events)


def _state(contents: Contents, events: Sequence[Event], times: Sequence[float]) -> tuple[State, str]:
    """How it stands, and how that is known. A summary of a part before a resume is not one of the run."""
    ended = next((e for e in reversed(events) if e["kind"] in ("run_started", "finished", "failed")), None)
    if ended is not None and ended["kind"] == "failed":
        return "failed", f"{ended.get('error') or 'error'}: {ended.get('message') or 'no reason was written'}"
    began_again = (
        ended is not None and ended["kind"] == "run_started" and sum(e["kind"] == "run_started" for e in events) > 1
    )
    if contents.summary and not contents.live and not began_again:
        return "done", ""
    if not events and not times:
        return "waiting", "nothing was heard of it yet"
    quiet, pace = contents.quiet_s, _step_s(times)
    left = contents.held is False and bool(times)
    patience = max(LEFT_S, 3 * pace) if left else max(SILENT_S, 20 * pace)
    if contents.live or contents.held or quiet is None or quiet < patience:
        return "running", ""
    return "cut off", f"no end was written, and nothing at all for {quiet:.0f} s"


def _step_s(times: Sequence[float]) -> float:
    lately = times[-_LATELY:]
    return (lately[-1] - lately[0]) / (len(lately) - 1) if len(lately) > 1 else 0.0


def _begin(ends: Sequence[float]) -> float:
    """When the last part of the run began."""
    return ends[-2] if len(ends) > 1 else 0.0


def _speed(
    part: Sequence[Step], times: Sequence[float], events: Sequence[Event], begin: float, summary: Event
) -> dict[str, float | None]:
    """Seconds to the first step and since then, samples a second over these and lately: of the last part."""
    ready = [float(e["t"]) for e in events if e["kind"] in ("ready", "server-up")]
    crew = _first_crew(events)
    first = ready[crew - 1] if len(ready) >= crew else None
    end = times[-1] if times else None
    wall = _number(summary.get("wall_s"), None if end is None or first is None else end - first)
    samples = sum(step.samples for step in part)
    lately = part[-_LATELY:]
    seconds = times[-1] - times[-len(lately)] if lately else 0.0
    return {
        "setup_s": _number(summary.get("start_s"), None if first is None else first - begin),
        "wall_s": wall,
        "goodput": _number(summary.get("goodput"), samples / wall if wall and wall > 0 else None),
        "pace": sum(step.samples for step in lately[1:]) / seconds if seconds > 0 else None,
    }


def _first_crew(events: Sequence[Event]) -> int:
    """How many have to be ready before the first step."""
    first = next((e for e in events if e["kind"] == "epoch"), None)
    return max(1, len(_list(first.get("members")))) if first is not None else 1


def _left(part: Sequence[Step], times: Sequence[float], start: Event, state: State) -> float | None:
    asked, pace = _whole(start.get("steps"), None), _step_s(times[-len(part) :] if part else ())
    if state != "running" or asked is None or not part or not pace:
        return None
    return float(max(0.0, (asked - part[-1].step - 1) * pace))


def _proof(part: Sequence[Step], start: Event, summary: Event) -> tuple[bool | None, str]:
    """Whether every sample was counted once, by the ledger or, before there is one, by the steps so far."""
    names = ("samples", "samples_expected", "samples_lost", "samples_duplicated")
    samples, expected, lost, twice = (_whole(summary.get(name), None) for name in names)
    if None not in (samples, expected, lost, twice):
        told = f"{samples:,} of {expected:,} expected, {lost:,} lost, {twice:,} counted twice"
        return samples == expected and not lost and not twice, told
    batch, steps = _whole(start.get("global_batch"), None), {step.step for step in part}
    if batch is None or not part:
        return None, ""
    counted, expected = sum(step.samples for step in part), len(steps) * batch
    right = counted == expected and len(steps) == len(part)
    return right, f"so far {counted:,} of {expected:,} in {len(steps):,} committed steps"


def _recoveries(events: Sequence[Event], summary: Event) -> tuple[Recovery, ...]:
    """From the events, which have times; the summary has those of an earlier leader whose events were lost, too."""
    told = [e for e in events if e["kind"] == "recovered"]
    listed = _list(summary.get("recoveries"))
    if len(listed) <= len(told):
        return tuple(_recovery(e, e["t"]) for e in told)
    rows = [_recovery(row, None) for row in listed if isinstance(row, Mapping)]
    times = {(row.step, row.lost): row.t for row in (_recovery(e, e["t"]) for e in told)}
    losses = [e for e in events if e["kind"] in ("server-lost", "lost")]
    return tuple(row._replace(t=times.get((row.step, row.lost), _made_good(row, losses))) for row in rows)


def _made_good(row: Recovery, losses: Sequence[Event]) -> float | None:
    """When a loss was made good that only the summary tells of: so long after the first who was lost with it."""
    at = next((float(e["t"]) for e in losses if str(e.get("node")) in row.lost), None)
    return None if at is None else at + row.total_ms / 1e3


def _recovery(row: Event, t: float | None) -> Recovery:
    ms = {name: _number(row.get(name), 0.0) or 0.0 for name in ("detect_ms", "decide_ms", "move_ms", "redo_ms")}
    return Recovery(
        t=t,
        step=_whole(row.get("step"), 0),
        lost=tuple(map(str, _list(row.get("lost")))),
        source=str(row.get("source") or ""),
        redone_actions=_whole(row.get("redone_actions"), 0),
        **ms,
    )


def _gone(events: Sequence[Event]) -> set[str]:
    return {str(e.get("node")) for e in events if e["kind"] in ("lost", "left", "server-lost")}


def _stays(events: Sequence[Event], end: float) -> Iterator[Stay]:
    """Everyone who ever was there, in the order in which they came. A resumed run begins with nobody."""
    here: dict[str, _Here] = {}
    for event in events:
        kind, t, node = event["kind"], float(event["t"]), str(event.get("node"))
        if kind == "run_started":
            yield from (who.stay(t, "") for who in here.values())
            here.clear()
        elif kind in ("node_joined", "server-up"):
            here.setdefault(node, _Here(node, t))
        elif kind == "notice" and node in here:
            here[node].notices.append(t)
        elif kind in ("lost", "left", "server-lost") and node in here:
            yield here.pop(node).stay(t, kind.removeprefix("server-"))
        elif kind == "epoch":
            _seat(here, event, t)
    yield from (who.stay(None, "", end) for who in here.values())


class _Here:
    """A node that is there: since when, and in which slots it was."""

    def __init__(self, node: str, came: float) -> None:
        self.node, self.came = node, came
        self.posts: list[tuple[float, str]] = []
        self.notices: list[float] = []

    def stay(self, gone: float | None, how: str, end: float | None = None) -> Stay:
        until = gone if gone is not None else end or self.came
        begins = [*self.posts, (until, "")]
        posts = [(a, b, slot) for (a, slot), (b, _) in pairwise(begins) if slot]
        return Stay(self.node, self.came, gone, how, tuple(posts), tuple(self.notices))


def _seat(here: Mapping[str, _Here], event: Event, t: float) -> None:
    members = [str(node) for node in _list(event.get("members"))]
    slots = [str(slot) for slot in _list(event.get("slots"))] or ["in"] * len(members)
    seated = dict(zip(members, slots, strict=False))
    for node, who in here.items():
        slot = seated.get(node, "")
        if (who.posts[-1][1] if who.posts else "") != slot:
            who.posts.append((t, slot))


_MARKED = {
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


def _marks(events: Sequence[Event]) -> Iterator[Mark]:
    """What curves are to be read beside. Whoever joins after the first epoch is new."""
    begun = False
    for event in events:
        kind = event["kind"]
        begun = (begun or kind in ("epoch", "generation")) and kind != "run_started"
        if kind in _MARKED:
            yield Mark(float(event["t"]), _MARKED[kind], sentence(event))
        elif kind == "node_joined" and begun:
            yield Mark(float(event["t"]), "came", sentence(event))


_QUIET = {"ready", "queues", "server-up", "worker-up", "checkpoint", "evaluation"}
"""Events that are drawn, or of no interest by themselves."""


def _happened(events: Sequence[Event]) -> Iterator[Happened]:
    """Events as sentences. What several say one after the other, for the same reason, is told once."""
    shown = [event for event in events if event["kind"] not in _QUIET]
    for (kind, why), alike in groupby(shown, key=_told_alike):
        together = list(alike)
        if kind == "suspected":
            nodes = dict.fromkeys(str(event.get("node")) for event in together)
            together = [{**together[0], "node": ", ".join(nodes)}]
        for event in together:
            yield Happened(float(event["t"]), str(event["kind"]), sentence(event), why)


def _told_alike(event: Event) -> tuple[str, str]:
    return str(event["kind"]), str(event.get("why") or "")


def sentence(event: Event) -> str:
    """An event in words; one of a kind that is not known here, by its fields."""
    for told in _SENTENCES.get(str(event["kind"]), ()):
        with contextlib.suppress(KeyError, ValueError, TypeError, IndexError):  # this event lacks what it speaks of
            return told.format_map({name: _nodes(value) for name, value in event.items()})
    rest = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("t", "kind", "why") and v is not None)
    return f"{str(event['kind']).replace('_', ' ').replace('-', ' ')}{': ' if rest else ''}{rest}"


def _nodes(value: object) -> object:
    """Lists are of nodes, in events: as people write them."""
    if not isinstance(value, (list, tuple)):
        return value
    return f"node{'' if len(value) == 1 else 's'} {', '.join(map(str, value)) or 'none'}"


_SENTENCES = {
    "run_started": (
        "the run begins: {nodes} nodes, up to step {steps}",
        "the run begins: {graph}, {model}, {mode}, up to epoch {epochs}",
    ),
    "node_joined": ("node {node} has joined",),
    "lost": ("node {node} is lost in step {step}",),
    "left": ("node {node} has handed over and left",),
    "notice": ("node {node} has notice: {seconds:.0f} s",),
    "suspected": ("node {node}: somebody is missed",),
    "epoch": ("epoch {number} begins with {members}",),
    "recovered": ("step {step} went on without {lost}, by {source}: {redone_actions} actions run again",),
    "protected": ("node {node} has a copy of stage {stage}",),
    "decision": ("decided: {verdict} ({layout})",),
    "drain": ("steps before {step} are completed, then the shape is {layout}",),
    "reshaped": ("the shape is {layout}: {layers} layers moved in {seconds:.2f} s",),
    "rewound": ("back to step {step}: {steps} steps are run again",),
    "leader": ("another node leads",),
    "finished": ("all {steps} steps are done",),
    "failed": ("the run failed: {message}",),
    "stopped": ("stopped after step {step}",),
    "skipped": ("step {step} moved nothing",),
    "server-lost": ("server {node} is lost",),
    "worker-lost": ("worker {worker} is lost",),
    "generation": ("generation {number} begins from epoch {version}",),
    "autotune": ("{workers} workers from now on",),
    "kill": ("{node} is struck down on purpose",),
}


def _points(steps: Sequence[Step], times: Sequence[float], values: Sequence[Figure]) -> list[Point]:
    """A curve: no more points than can be told apart, and no number that is none."""
    found = [i for i, value in enumerate(values) if isinstance(value, (int, float)) and math.isfinite(value)]
    numbers = [float(values[i] or 0.0) for i in found]
    return [Point(times[found[i]], steps[found[i]].step, numbers[i]) for i in thinned(numbers)]


def _last(steps: Sequence[Step], name: str) -> float | None:
    return next((found for step in reversed(steps) if (found := _number(getattr(step, name), None)) is not None), None)


def _number(value: object, otherwise: float | None) -> float | None:
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if real else otherwise  # type: ignore[arg-type]


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _whole(value: object, otherwise: Any) -> Any:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def thinned(values: Sequence[float], most: int = 1500) -> list[int]:
    """Which of them to draw: of each stretch the first, the least, the greatest and the last."""
    if len(values) <= most:
        return list(range(len(values)))
    stride = -(-4 * len(values) // most)
    found: list[int] = []
    for at in range(0, len(values), stride):
        stretch = values[at : at + stride]
        low, high = stretch.index(min(stretch)), stretch.index(max(stretch))
        found += sorted({at, at + low, at + high, at + len(stretch) - 1})
    return found


def paces(times: Sequence[float], samples: Sequence[int], windows: int = 240) -> list[tuple[float, float]]:
    """Samples a second in equal windows of time, by the middle of each: a pause is a dent, and not left out."""
    times = list(accumulate(times, max))  # clocks of different leaders may disagree a little
    if len(times) < 5 or times[-1] <= times[0]:
        return []
    windows = max(1, min(windows, (len(times) - 1) // 3))
    first, width = times[0], (times[-1] - times[0]) / windows
    totals = list(accumulate(samples))
    edges = [_until(first + number * width, times, totals) for number in range(windows)] + [float(totals[-1])]
    return [(first + (n + 0.5) * width, (b - a) / width) for n, (a, b) in enumerate(pairwise(edges))]


def _until(t: float, times: Sequence[float], totals: Sequence[int]) -> float:
    """Samples until a moment: those of a step come in evenly while it lasts."""
    after = bisect.bisect_right(times, t)
    if after >= len(times):
        return float(totals[-1])
    before = after - 1
    share = (t - times[before]) / (times[after] - times[before])
    return totals[before] + share * (totals[after] - totals[before])


def goodputs(
    times: Sequence[float], samples: Sequence[int], begin: float | None = None, most: int = 400
) -> list[tuple[float, float]]:
    """Samples so far over the seconds so far."""
    if not times:
        return []
    zero, totals = times[0] if begin is None else begin, list(accumulate(samples))
    stride = -(-len(times) // most)
    shown = {*range(stride - 1, len(times), stride), len(times) - 1}
    return [(times[i], totals[i] / (times[i] - zero)) for i in sorted(shown) if times[i] > zero]
