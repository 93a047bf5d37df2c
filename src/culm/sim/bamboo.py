"""`bamboo-sim`: the event simulator behind the simulation table of Bamboo (NSDI'23), as its authors wrote it.

Their model, with what it leaves out: no work is ever lost, state is always there, losses come one by one.

- Hour by hour each living node is removed with probability p, at some second of the hour; what is missing to the
  target is asked for, and each request granted, at some second, with the probability of that hour.
- A node is ready 45 s after it was granted. It is waited for 30 s at the start and after a fatal loss (global
  rendezvous), 20 s for a rebalancing (local); a participant that dies meanwhile starts the wait anew.
- A lost node's stage goes to its predecessor; steps take 1.5 times as long until the next rendezvous, the one under
  way from the loss on. If one of the two carries two stages already, the loss is fatal.
- After each step: rebalance if standby nodes can relieve all overloaded ones, if more than 5 % of the losses would be
  fatal, or if a further pipeline fits.

Two habits of the original are kept, since the published figures contain them: the loss of any node while training
slows the step down, even that of a standby node, and a lost standby node goes on being counted as one.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from culm.market.trace import HOUR

Coordinates: TypeAlias = tuple[int, int]
"""(pipeline, stage)."""
Status: TypeAlias = Literal["stopped", "rendezvous", "running"]
_What: TypeAlias = Literal["hour", "add", "remove", "ready", "rendezvous"]

CREATE_S = 45.0
GLOBAL_S = 30.0
SLOWDOWN = 1.5
FATAL_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class BambooCase:
    """What is trained. The defaults are BERT-Large as in the published table."""

    probability: float
    """p: of a node, to be removed in an hour."""
    samples: int = 264
    stages: int = 12
    target: int = 48
    steps: int = 22_194
    pipeline_ms: float = 4 * 2480.0
    """A step of one pipeline; of n pipelines an n-th."""
    local_s: float = 20.0
    usd_h: float = 0.91


class BambooResult(NamedTuple):
    throughput: float
    """Samples per second, from the first step on."""
    cost: float
    """Dollars per hour."""
    value: float
    """Throughput by cost, step by step, averaged over time."""
    preemptions: int
    fatal: int


@dataclass
class _Node:
    ready: bool = False
    coordinates: list[Coordinates] = field(default_factory=list)


class _Due(NamedTuple):
    """Something that will happen. At the same time, in the order in which it was asked for."""

    t: float
    number: int
    what: _What
    name: str = ""
    wait_s: float = 0.0


class BambooSim:
    """One run, from the first request to the last step."""

    def __init__(self, case: BambooCase, seed: int) -> None:
        self.case = case
        self.random = random.Random(seed)
        self.grants = [self.random.random() for _ in range(24)]
        self.nodes: dict[str, _Node] = {}
        self.due: list[_Due] = []
        self.asked = self.named = 0
        self.status: Status = "stopped"
        self.meeting: list[str] = []
        self.pipelines = self.waiting = 0
        self.steps = self.preemptions = self.fatal = 0
        self.step_s = self.step_end = 0.0
        self.slowed_at: float | None = None
        self.changed = False
        self.node_s = self.counted_until = 0.0
        self.began: float | None = None
        self.last_end = self.last_node_s = 0.0
        self.worth = 0.0

    def run(self) -> BambooResult:
        """Steps are events of their own; as long as nothing else happens, many are taken at once."""
        for _ in range(self.case.target):
            if self.random.random() < self.grants[0]:
                self._ask(0.0, "add", self._name())
        self._ask(0.0, "hour")
        while self.steps < self.case.steps:
            if self.status == "running" and self.step_end < self.due[0].t:
                self._step()
            else:
                self._happen(heapq.heappop(self.due))
        return self._result()

    def _result(self) -> BambooResult:
        assert self.began is not None, "steps were made"
        seconds = self.last_end - self.began
        cost = self.last_node_s / self.last_end * self.case.usd_h
        return BambooResult(
            self.steps * self.case.samples / seconds, cost, self.worth / seconds, self.preemptions, self.fatal
        )

    def _ask(self, t: float, what: _What, name: str = "", wait_s: float = 0.0) -> None:
        self.asked += 1
        heapq.heappush(self.due, _Due(t, self.asked, what, name, wait_s))

    def _name(self) -> str:
        self.named += 1
        return f"node{self.named}"

    def _happen(self, due: _Due) -> None:
        self._count(due.t)
        if due.what == "hour":
            self._draw_hour(due.t)
        elif due.what == "add":
            self.nodes[due.name] = _Node()
            self._ask(due.t + CREATE_S, "ready", due.name)
        elif due.what == "ready":
            self._ready(due.t, due.name)
        elif due.what == "remove":
            self._remove(due.t, due.name)
        else:
            self._meet(due.t, due.wait_s)

    def _count(self, t: float) -> None:
        """Nodes are paid for from their grant on."""
        self.node_s += len(self.nodes) * (t - self.counted_until)
        self.counted_until = t

    def _draw_hour(self, now: float) -> None:
        """Losses of the hour, and grants for what is missing or will be; a grant that finds no room is dropped."""
        self._ask(now + HOUR, "hour")
        there = set(self.nodes)
        losses = [(t, name) for name in self.nodes if (t := self._within(now, self.case.probability)) is not None]
        grant = self.grants[int(now // HOUR) % 24]
        wanted = self.case.target - len(there) + len(losses)
        grants = [t for _ in range(wanted) if (t := self._within(now, grant)) is not None]
        heapq.heapify(losses)
        for t in sorted(grants):
            while losses and losses[0][0] < t:
                self._lose(there, *heapq.heappop(losses))
            if len(there) < self.case.target:
                name = self._name()
                there.add(name)
                self._ask(t, "add", name)
                gone = self._within(now, self.case.probability)
                if gone is not None and gone >= t:
                    heapq.heappush(losses, (gone, name))
        while losses:
            self._lose(there, *heapq.heappop(losses))

    def _within(self, now: float, probability: float) -> float | None:
        return now + self.random.randrange(3600) if self.random.random() < probability else None

    def _lose(self, there: set[str], t: float, name: str) -> None:
        there.discard(name)
        self._ask(t, "remove", name)

    def _ready(self, now: float, name: str) -> None:
        if name not in self.nodes:
            return
        self.nodes[name].ready = True
        if self.status == "stopped":
            self._gather(now, GLOBAL_S)
        elif self.status == "rendezvous":
            self.meeting.append(name)
        else:
            self.waiting += 1
            self.changed = True

    def _remove(self, now: float, name: str) -> None:
        lost = self.nodes.pop(name)
        self.preemptions += 1
        if lost.coordinates and not self._taken_over(lost):
            self.fatal += 1
            self._gather(now, GLOBAL_S)
        elif self.status == "running":
            self.changed = True
            if self.slowed_at is None:
                self.slowed_at = now
                self.step_s *= SLOWDOWN
                self.step_end += (self.step_end - now) * (SLOWDOWN - 1)

    def _taken_over(self, lost: _Node) -> bool:
        """Whether the predecessor could take the stage; it holds a copy as long as it carries its own stage alone."""
        if len(lost.coordinates) > 1:
            return False
        pipeline, stage = lost.coordinates[0]
        before = (pipeline, (stage - 1) % self.case.stages)
        for node in self.nodes.values():
            if before in node.coordinates:
                if len(node.coordinates) > 1:
                    return False
                node.coordinates.append((pipeline, stage))
                break
        return True

    def _gather(self, now: float, wait_s: float) -> None:
        self.status = "rendezvous"
        self.meeting = [name for name, node in self.nodes.items() if node.ready]
        self._ask(now + wait_s, "rendezvous", wait_s=wait_s)

    def _meet(self, now: float, wait_s: float) -> None:
        if any(name not in self.nodes for name in self.meeting):
            self._gather(now, wait_s)
            return
        self.pipelines = len(self.meeting) // self.case.stages
        slots = iter([(d, s) for d in range(self.pipelines) for s in range(self.case.stages)])
        self.waiting = 0
        for name in self.meeting:
            slot = next(slots, None)
            self.nodes[name].coordinates = [] if slot is None else [slot]
            self.waiting += slot is None
        self.meeting, self.slowed_at = [], None
        self.status = "running" if self.pipelines else "stopped"
        if self.pipelines:
            self._start(now)

    def _start(self, now: float) -> None:
        self.step_s = self.case.pipeline_ms / self.pipelines / 1e3
        self.step_end = now + self.step_s
        self.changed = True
        if self.began is None:
            self._count(now)
            self.began = self.last_end = now
            self.last_node_s = self.node_s

    def _step(self) -> None:
        """The end of a step, and of all that follow it undisturbed."""
        self._account(self.step_end, 1)
        if self.changed and self._should_rebalance():
            self._gather(self.step_end, self.case.local_s)
            return
        self.changed = False
        room = math.ceil((self.due[0].t - self.step_end) / self.step_s) - 1
        more = min(self.case.steps - self.steps, max(0, room))
        if more:
            self._account(self.step_end + more * self.step_s, more)
            self.step_end += more * self.step_s
        self.step_end += self.step_s

    def _account(self, end: float, steps: int) -> None:
        """Steps that ended at equal distances up to `end`, and what they were worth."""
        self._count(end)
        usd_h = (self.node_s - self.last_node_s) / (end - self.last_end) * self.case.usd_h
        self.worth += steps * self.case.samples / usd_h if usd_h else 0.0
        self.steps += steps
        self.last_end, self.last_node_s = end, self.node_s

    def _should_rebalance(self) -> bool:
        overloaded = sum(len(node.coordinates) > 1 for node in self.nodes.values())
        if overloaded and self.waiting >= overloaded:
            return True
        active = self.pipelines * self.case.stages - overloaded
        if 2 * overloaded / active > FATAL_SHARE:
            return True
        return (active + self.waiting) // self.case.stages > self.pipelines
