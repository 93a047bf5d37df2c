"""The clock of the simulator: from event to event, with what was trained, lost, waited for and paid in between.

Training is a rate between events, not steps: a step is seconds and a run is hours. What a strategy does about an event
it answers with a `Turn`; this file knows no strategy.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from culm.market.trace import HOUR, Event, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from culm.sim.costs import Charges


class Node(NamedTuple):
    """A machine, once it can take part."""

    name: str
    zone: str = ""


@dataclass(frozen=True)
class Turn:
    """How it goes on after an event."""

    rate: float
    """Samples per second from then on; 0: too few nodes."""
    pauses: dict[str, float] = field(default_factory=dict)
    """What happens before that, one after the other, by kind of time."""
    back_to: Literal["", "checkpoint", "start"] = ""
    """Where the model is taken back to, if it is."""
    why: str = ""
    completes: bool = False
    """Whether the open step is completed first, at the rate that there was: a recovery ends with its step."""


class Strategy(Protocol):
    """What is done about losses and newcomers."""

    expected_s: float
    """Told before each event: how long it may be until nodes come or go again, going by the past."""
    phase: float
    """Told before each event: how much of the open step is done, from 0 to 1 ..."""
    step: int
    """... and which one that is."""
    now: float
    left_s: float
    """Told before each event: until the end of the trace."""
    watches: int
    """Read after each answer: so many steps after the open one it wants to look again, unless something happens before;
    0: it does not."""
    checkpoint_every_s: float
    """Seconds of training between two checkpoints; 0: none are written."""
    checkpoint_stall_s: float
    checkpoint_write_s: float
    """Until a checkpoint that was begun can be loaded."""

    def lost(self, gone: Sequence[Node]) -> Turn | None:
        """Nodes have vanished together. None: it goes on as before."""

    def joined(self, new: Sequence[Node]) -> Turn | None:
        """Nodes are ready to take part."""

    def looked(self) -> Turn | None:
        """Nothing has happened for as long as it wanted to wait."""


class Point(NamedTuple):
    """The state from a time on, for pictures."""

    t: float
    nodes: int
    rate: float
    usd: float
    """Paid so far."""
    samples: float


@dataclass
class Run:
    """What one run came to."""

    seconds: float = 0.0
    samples: float = 0.0
    split: dict[str, float] = field(default_factory=dict)
    """Seconds by what they went into; they add up to `seconds`."""
    node_s: float = 0.0
    usd: float = 0.0
    preemptions: int = 0
    """Nodes lost."""
    recoveries: int = 0
    """Times that a loss was answered."""
    rollbacks: int = 0
    """Times that work was taken back."""
    points: list[Point] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    """How often each decision was taken."""

    def spend(self, kind: str, seconds: float) -> None:
        if seconds:
            self.split[kind] = self.split.get(kind, 0.0) + seconds


class _Saved(NamedTuple):
    usable: float
    samples: float
    trained_s: float


class Engine:
    """One run of one strategy over one trace."""

    def __init__(
        self, trace: Trace, strategy: Strategy, charges: Charges, usd_h: float, step_samples: float = 0.0
    ) -> None:
        self.trace = trace
        self.step_samples = step_samples
        self.rest: tuple[float, float] = (0.0, 0.0)
        """What is left of the open step: seconds, and the rate in them."""
        self.strategy = strategy
        self.charges = charges
        self.usd_s = usd_h / HOUR
        self.run = Run()
        self.now = 0.0
        self.rate = 0.0
        self.pauses: list[tuple[str, float]] = []
        self.nodes: dict[str, Node] = {}
        self.alive = 0
        self.paid_until = 0.0
        self.moments = 0
        self.warming: list[tuple[float, Node]] = []
        self.ready: set[str] = set()
        self.coming: dict[str, float] = {}
        self.look_at = math.inf
        self.look_for = 0.0
        self.since_checkpoint = 0.0
        self.saved: list[_Saved] = [_Saved(0.0, 0.0, 0.0)]
        self.trained_s = 0.0

    def play(self) -> Run:
        """From the start of the trace to its end."""
        for t, moment in groupby(self.trace.events, key=lambda event: event.t):
            self._until(t)
            self._change(list(moment))
        self._until(self.trace.span_s)
        self.run.seconds = self.trace.span_s
        self.run.samples = max(0.0, self.run.samples)
        self._mark()
        return self.run

    def _until(self, t: float) -> None:
        """Newcomers that are ready before `t` join on the way, and strategies that wanted to look again do."""
        while (at := min(self.look_at, self.warming[0][0] if self.warming else math.inf)) <= t:
            self._advance(at)
            ready = list(self._ready(at))
            if ready:
                self.ready.update(node.name for node in ready)
                self._tell()
                self._take(self.strategy.joined(ready))
            elif self.look_at <= at:
                self._look()
        self._advance(t)

    def _ready(self, at: float) -> Iterator[Node]:
        while self.warming and self.warming[0][0] <= at:
            due, node = heapq.heappop(self.warming)
            # A node may have gone meanwhile, and even have come again: then this is not its time.
            if self.coming.get(node.name) == due:
                del self.coming[node.name]
                yield node

    def _change(self, events: list[Event]) -> None:
        """What happens at one moment: losses first, since they do not know of the newcomers."""
        lost = []
        for event in events:
            self.coming.pop(event.node, None)
            if event.kind == "remove":
                # By name: not every trace says of a node that goes where it was.
                lost.append(self.nodes.pop(event.node))
            else:
                node = self.nodes[event.node] = Node(event.node, event.zone)
                due = self.coming[event.node] = self.now + self.charges.warm_up_s
                heapq.heappush(self.warming, (due, node))
        self.alive = len(self.nodes)
        self.moments += self.now > 0
        if lost:
            self._lose(lost)
        self._mark()

    def _lose(self, lost: list[Node]) -> None:
        self.run.preemptions += len(lost)
        took_part = [node for node in lost if node.name in self.ready]
        self.ready.difference_update(node.name for node in lost)
        if took_part:
            self._tell()
            turn = self.strategy.lost(took_part)
            self.run.recoveries += turn is not None
            self._take(turn)

    def _tell(self) -> None:
        """What a strategy knows before it answers."""
        told, done = self.strategy, self.run.samples / self.step_samples if self.step_samples else 0.5
        told.now, told.left_s, told.expected_s = self.now, self.trace.span_s - self.now, self._expected()
        told.step = int(done + 1e-9)
        told.phase = max(0.0, done - told.step)

    def _expected(self) -> float:
        """Until nodes come or go again: as long as it took on average so far, with once imagined in the first hour."""
        return (self.now + HOUR) / (self.moments + 1)

    def _take(self, turn: Turn | None) -> None:
        if turn is not None:
            self._turn(turn)
        self._watch()

    def _turn(self, turn: Turn) -> None:
        if turn.back_to:
            self._take_back(turn.back_to)
        pauses = [(kind, seconds) for kind, seconds in turn.pauses.items() if seconds > 0]
        # What is under way is begun anew, but nobody is done earlier because something else went wrong too.
        if sum(s for _, s in pauses) >= sum(s for _, s in self.pauses):
            self.pauses = pauses
        left = (1.0 - self.strategy.phase) * self.step_samples if turn.completes and turn.rate else 0.0
        self.rest = (left / self.rate, self.rate) if left and self.rate else (0.0, 0.0)
        self.rate = turn.rate
        if turn.why:
            self.run.reasons[turn.why] = self.run.reasons.get(turn.why, 0) + 1
        self._mark()

    def _watch(self) -> None:
        """When the strategy is to look again: after the open step and as many more as it wants."""
        steps, self.look_at = self.strategy.watches, math.inf
        if steps and self.rate > 0:
            self.look_for = (int(self.run.samples / self.step_samples + 1e-9) + 1 + steps) * self.step_samples
            self.look_at = self.now + sum(seconds for _, seconds in self.pauses) + self._trains_s(self.look_for)

    def _trains_s(self, samples: float) -> float:
        """Until so many samples are trained, if nothing holds it up."""
        seconds, rate = self.rest
        return seconds + max(0.0, samples - self.run.samples - seconds * rate) / self.rate

    def _look(self) -> None:
        """Let the strategy look again, unless checkpoints have held training up so that it is not time yet."""
        left_s = self._trains_s(self.look_for)
        if left_s > 1e-6:
            self.look_at = self.now + left_s
            return
        self._tell()
        self._take(self.strategy.looked())

    def _take_back(self, to: str) -> None:
        """The model as it was in the newest checkpoint that is complete; the time since then was for nothing."""
        usable = [saved for saved in self.saved if saved.usable <= self.now]
        last = usable[-1] if to == "checkpoint" and usable else _Saved(0.0, 0.0, 0.0)
        undone = self.trained_s - last.trained_s
        if self.run.samples > last.samples:
            self.run.rollbacks += 1
            self.run.samples = last.samples
            self.run.spend("train", -undone)
            self.run.spend("undone", undone)
            self.trained_s = last.trained_s
        self.saved = [last]
        self.since_checkpoint = 0.0

    def _advance(self, t: float) -> None:
        """To a time before which nothing happens."""
        left = t - self.now
        if left <= 0:
            return
        while self.pauses and left > 0:
            kind, seconds = self.pauses[0]
            spent = min(seconds, left)
            self.run.spend(kind, spent)
            left -= spent
            self.now += spent
            self.pauses[0:1] = [(kind, seconds - spent)] if seconds > spent else []
            if not self.pauses:
                self._mark()
        if left > 0 and self.rest[0] > 0:
            left -= self._complete(left)
        if left > 0 and self.rate > 0:
            self._train(left, self.rate)
        elif left > 0:
            self.run.spend("wait", left)
        self.now = t
        self._pay()

    def _pay(self) -> None:
        """For the nodes that were there since it was last done."""
        since, self.paid_until = self.now - self.paid_until, self.now
        self.run.node_s += self.alive * since
        self.run.usd += self.alive * since * self.usd_s

    def _complete(self, most: float) -> float:
        """Go on with the open step; how long it took."""
        seconds, rate = self.rest
        spent = min(seconds, most)
        self._train(spent, rate)
        self.rest = (seconds - spent, rate) if seconds > spent else (0.0, 0.0)
        if seconds < most * (1 - 1e-9):
            self._mark()
        return spent

    def _train(self, seconds: float, rate: float) -> None:
        """Train, and write checkpoints as they come due."""
        every, stall = self.strategy.checkpoint_every_s, self.strategy.checkpoint_stall_s
        while seconds > 0:
            spent = min(seconds, every - self.since_checkpoint) if every else seconds
            self.run.samples += spent * rate
            self.trained_s += spent
            self.since_checkpoint += spent
            self.run.spend("train", spent)
            self.now += spent
            seconds -= spent
            if every and self.since_checkpoint >= every:
                held = min(stall, seconds)
                self.run.spend("checkpoint", held)
                seconds -= held
                self.now += held
                self._save()

    def _save(self) -> None:
        self.since_checkpoint = 0.0
        usable = [saved for saved in self.saved if saved.usable <= self.now]
        coming = [saved for saved in self.saved if saved.usable > self.now]
        due = self.now + self.strategy.checkpoint_write_s
        self.saved = [*usable[-1:], *coming, _Saved(due, self.run.samples, self.trained_s)]

    def _mark(self) -> None:
        self._pay()
        rate = 0.0 if self.pauses else self.rest[1] if self.rest[0] > 0 else self.rate
        self.run.points.append(Point(self.now, self.alive, rate, self.run.usd, self.run.samples))
