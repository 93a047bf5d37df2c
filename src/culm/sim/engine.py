"""The simulator's clock: advances from event to event and accounts for training, losses, waiting and cost in between.

Between events training is a rate, not single steps: a step takes seconds and a run hours. A strategy answers each event
with a `StrategyResponse`; this module knows no particular strategy.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from culm.market.market_trace import HOUR, MarketTrace, NodeEvent
from culm.market.price_series import PriceMove, PriceSeries
from culm.market.rental_cost import CostLedger, RentalTerms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from culm.sim.cluster_costs import ClusterCosts


class SimulatedNode(NamedTuple):
    """A worker that can take part: a node with one accelerator, or one of the workers of a larger node."""

    name: str
    zone: str = ""
    """Workers with the same zone may be lost together: the zone of the node, and for a node with several workers also
    its name."""


def workers_of_node(name: str, zone: str, count: int) -> tuple[SimulatedNode, ...]:
    """The workers of a node, in the order in which they take adjacent slots."""
    if count == 1:
        return (SimulatedNode(name, zone),)
    return tuple(SimulatedNode(f"{name}/{index}", f"{zone}/{name}") for index in range(count))


@dataclass(frozen=True)
class StrategyResponse:
    """How the run continues after an event."""

    rate: float
    """Samples per second from then on; 0: too few nodes."""
    pauses: dict[str, float] = field(default_factory=dict)
    """Pauses before that, one after the other, in seconds by kind."""
    rollback_to: Literal["", "checkpoint", "start"] = ""
    """Where the model is rolled back to, if at all."""
    reason: str = ""
    completes_step: bool = False
    """Whether the open step is completed first, at the previous rate: a recovery ends with its step."""


class EngineStrategy(Protocol):
    """What a strategy does about losses and new nodes. It sees workers: those of a node come and go together."""

    expected_event_gap_s: float
    """Set before each event: expected time until nodes join or leave again, from past events."""
    phase: float
    """Set before each event: the finished share of the open step, from 0 to 1 ..."""
    step: int
    """... and its number."""
    now: float
    remaining_s: float
    """Set before each event: time until the end of the trace."""
    recheck_after_steps: int
    """Read after each response: `on_recheck` is called this many steps after the open one, unless an event comes first;
    0: never."""
    checkpoint_every_s: float
    """Seconds of training between two checkpoints; 0: no checkpoints."""
    checkpoint_stall_s: float
    checkpoint_write_s: float
    """Time from the start of a checkpoint until it can be loaded."""

    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        """Nodes were lost together. None: the run continues unchanged."""

    def on_nodes_joined(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        """Nodes are ready to take part."""

    def on_recheck(self) -> StrategyResponse | None:
        """No event happened during the time the strategy wanted to wait."""


class RunPoint(NamedTuple):
    """The state from a time on, for charts."""

    t: float
    nodes: int
    rate: float
    usd: float
    """Cost so far."""
    samples: float


@dataclass
class StrategyRun:
    """The result of one run."""

    seconds: float = 0.0
    samples: float = 0.0
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on; they add up to `seconds`."""
    node_seconds: float = 0.0
    usd: float = 0.0
    preemptions: int = 0
    """Nodes lost, however many workers each has."""
    recoveries: int = 0
    """How often a strategy responded to a loss."""
    rollbacks: int = 0
    """How often work was rolled back."""
    points: list[RunPoint] = field(default_factory=list)
    decision_counts: dict[str, int] = field(default_factory=dict)
    """How often each decision was taken."""

    def add_seconds(self, kind: str, seconds: float) -> None:
        if seconds:
            self.seconds_by_kind[kind] = self.seconds_by_kind.get(kind, 0.0) + seconds


class _SimulatedCheckpoint(NamedTuple):
    usable_at: float
    samples: float
    trained_s: float


class Engine:
    """One run of one strategy over one trace."""

    def __init__(
        self,
        trace: MarketTrace,
        strategy: EngineStrategy,
        cluster_costs: ClusterCosts,
        prices: PriceSeries,
        step_samples: float = 0.0,
        workers_per_node: int = 1,
    ) -> None:
        """`prices` are those of a node with all its workers."""
        self.trace = trace
        self.step_samples = step_samples
        self.workers_per_node = workers_per_node
        self.open_step_rest: tuple[float, float] = (0.0, 0.0)
        """The rest of the open step: seconds, and the rate during them."""
        self.strategy = strategy
        self.cluster_costs = cluster_costs
        self.prices = prices
        self.ledger = CostLedger()
        """What the nodes cost: the ledger of real runs."""
        self.rentals: dict[str, tuple[str, str | None]] = {}
        """By node that is present: the name of its rental, and its zone if its price follows `prices`."""
        self.rental_count = 0
        self.result = StrategyRun()
        self.now = 0.0
        self.rate = 0.0
        self.pauses: list[tuple[str, float]] = []
        self.nodes: dict[str, tuple[SimulatedNode, ...]] = {}
        """The workers of each node that is present."""
        self.alive_count = 0
        self.paid_until = 0.0
        self.event_count = 0
        self.warming: list[tuple[float, str]] = []
        self.ready_names: set[str] = set()
        self.ready_times: dict[str, float] = {}
        self.recheck_at = math.inf
        self.recheck_at_samples = 0.0
        self.trained_since_checkpoint = 0.0
        self.checkpoints: list[_SimulatedCheckpoint] = [_SimulatedCheckpoint(0.0, 0.0, 0.0)]
        self.trained_s = 0.0

    def simulate(self) -> StrategyRun:
        """Simulate from the start of the trace to its end."""
        for t, moment in groupby(self._timeline(), key=lambda change: change.t):
            changes = list(moment)
            self.advance_through(t)
            self.apply_prices([change for change in changes if isinstance(change, PriceMove)])
            events = [change for change in changes if isinstance(change, NodeEvent)]
            if events:
                self.apply_events(events)
        return self.end(self.trace.span_s)

    def _timeline(self) -> Iterator[NodeEvent | PriceMove]:
        """Events of the trace and moves of prices in order of time, up to the end of the trace."""
        moves = [move for move in self.prices.moves if 0 < move.t <= self.trace.span_s]
        return heapq.merge(moves, self.trace.events, key=lambda change: change.t)

    def end(self, t: float) -> StrategyRun:
        """Advance to the end of the run and return the result."""
        self.advance_through(t)
        self.result.seconds = t
        self.result.samples = max(0.0, self.result.samples)
        self._record_point()
        return self.result

    def apply_prices(self, moves: list[PriceMove]) -> None:
        """New prices, at the time that was advanced to."""
        for move in moves:
            for name, zone in self.rentals.values():
                if zone is not None and move.zone in ("", zone):
                    self.ledger.change_price(name, move.usd_h, self.now)
        if moves:
            self._record_point()

    def advance_through(self, t: float) -> None:
        """Advance to `t`. On the way, nodes that become ready join, and strategies that asked for it recheck."""
        while (at := min(self.recheck_at, self.warming[0][0] if self.warming else math.inf)) <= t:
            self._advance(at)
            ready = list(self._pop_ready_nodes(at))
            if ready:
                self.ready_names.update(ready)
                self._update_strategy()
                joined = [worker for name in ready for worker in self.nodes[name]]
                self._handle_response(self.strategy.on_nodes_joined(joined))
            elif self.recheck_at <= at:
                self._recheck()
        self._advance(t)

    def _pop_ready_nodes(self, at: float) -> Iterator[str]:
        while self.warming and self.warming[0][0] <= at:
            ready_at, name = heapq.heappop(self.warming)
            # The node may have been lost meanwhile, and even have joined again: then this entry is stale.
            if self.ready_times.get(name) == ready_at:
                del self.ready_times[name]
                yield name

    def apply_events(self, events: list[NodeEvent], usd_h: float | None = None) -> None:
        """Apply the events of one time: losses first, because strategies do not know the new nodes yet. `usd_h`: what
        the new nodes cost, always; default: what `prices` says for their zone."""
        lost = []
        for event in events:
            self.ready_times.pop(event.node, None)
            if event.kind == "remove":
                # By name: not every trace has the zone of a lost node.
                lost.append((event.node, self.nodes.pop(event.node)))
                self.ledger.release(self.rentals.pop(event.node)[0], self.now)
            else:
                self.nodes[event.node] = workers_of_node(event.node, event.zone, self.workers_per_node)
                self._rent(event, usd_h)
                ready_at = self.ready_times[event.node] = self.now + self.cluster_costs.warm_up_s
                heapq.heappush(self.warming, (ready_at, event.node))
        self.alive_count = len(self.nodes)
        self.event_count += self.now > 0
        if lost:
            self._handle_losses(lost)
        self._record_point()

    def _rent(self, event: NodeEvent, usd_h: float | None) -> None:
        """Rent a node. A node of a trace that comes again is another machine: its rental has another name."""
        price = self.prices.at(self.now, event.zone) if usd_h is None else usd_h
        self.rental_count += 1
        name = f"{event.node}, rental {self.rental_count}"
        self.rentals[event.node] = name, event.zone if usd_h is None else None
        self.ledger.rent(name, RentalTerms(usd_h=price), self.now)

    def _handle_losses(self, lost: list[tuple[str, tuple[SimulatedNode, ...]]]) -> None:
        self.result.preemptions += len(lost)
        active = [worker for name, workers in lost if name in self.ready_names for worker in workers]
        self.ready_names.difference_update(name for name, _ in lost)
        if active:
            self._update_strategy()
            response = self.strategy.on_nodes_lost(active)
            self.result.recoveries += response is not None
            self._handle_response(response)

    def _update_strategy(self) -> None:
        """Set what the strategy knows before it responds."""
        strategy, steps_done = self.strategy, self.result.samples / self.step_samples if self.step_samples else 0.5
        strategy.now, strategy.remaining_s, strategy.expected_event_gap_s = (
            self.now,
            self.trace.span_s - self.now,
            self._expected_event_gap(),
        )
        strategy.step = int(steps_done + 1e-9)
        strategy.phase = max(0.0, steps_done - strategy.step)

    def _expected_event_gap(self) -> float:
        """Expected time until nodes join or leave again: the mean so far, with one assumed event in the first hour."""
        return (self.now + HOUR) / (self.event_count + 1)

    def _handle_response(self, response: StrategyResponse | None) -> None:
        if response is not None:
            self._apply_response(response)
        self._schedule_recheck()

    def _apply_response(self, response: StrategyResponse) -> None:
        if response.rollback_to:
            self._roll_back(response.rollback_to)
        pauses = [(kind, seconds) for kind, seconds in response.pauses.items() if seconds > 0]
        # The new pauses replace running ones, but a second disturbance never makes the run continue earlier.
        if sum(s for _, s in pauses) >= sum(s for _, s in self.pauses):
            self.pauses = pauses
        remaining_samples = (
            (1.0 - self.strategy.phase) * self.step_samples if response.completes_step and response.rate else 0.0
        )
        self.open_step_rest = (
            (remaining_samples / self.rate, self.rate) if remaining_samples and self.rate else (0.0, 0.0)
        )
        self.rate = response.rate
        if response.reason:
            self.result.decision_counts[response.reason] = self.result.decision_counts.get(response.reason, 0) + 1
        self._record_point()

    def _schedule_recheck(self) -> None:
        """Schedule the recheck: after the open step and as many more as the strategy requests."""
        steps, self.recheck_at = self.strategy.recheck_after_steps, math.inf
        if steps and self.rate > 0:
            self.recheck_at_samples = (
                int(self.result.samples / self.step_samples + 1e-9) + 1 + steps
            ) * self.step_samples
            self.recheck_at = (
                self.now + sum(seconds for _, seconds in self.pauses) + self._seconds_to_reach(self.recheck_at_samples)
            )

    def _seconds_to_reach(self, samples: float) -> float:
        """Seconds until this many samples are trained, without pauses."""
        seconds, rate = self.open_step_rest
        return seconds + max(0.0, samples - self.result.samples - seconds * rate) / self.rate

    def _recheck(self) -> None:
        """Let the strategy recheck, or postpone it if checkpoints have delayed training."""
        left_s = self._seconds_to_reach(self.recheck_at_samples)
        if left_s > 1e-6:
            self.recheck_at = self.now + left_s
            return
        self._update_strategy()
        self._handle_response(self.strategy.on_recheck())

    def _roll_back(self, to: str) -> None:
        """Restore the newest complete checkpoint (or the start); the training time since then counts as undone."""
        usable = [checkpoint for checkpoint in self.checkpoints if checkpoint.usable_at <= self.now]
        last = usable[-1] if to == "checkpoint" and usable else _SimulatedCheckpoint(0.0, 0.0, 0.0)
        undone_s = self.trained_s - last.trained_s
        if self.result.samples > last.samples:
            self.result.rollbacks += 1
            self.result.samples = last.samples
            self.result.add_seconds("train", -undone_s)
            self.result.add_seconds("undone", undone_s)
            self.trained_s = last.trained_s
        self.checkpoints = [last]
        self.trained_since_checkpoint = 0.0

    def _advance(self, t: float) -> None:
        """Advance to a time before which no event happens."""
        left_s = t - self.now
        if left_s <= 0:
            return
        while self.pauses and left_s > 0:
            kind, seconds = self.pauses[0]
            spent = min(seconds, left_s)
            self.result.add_seconds(kind, spent)
            left_s -= spent
            self.now += spent
            self.pauses[0:1] = [(kind, seconds - spent)] if seconds > spent else []
            if not self.pauses:
                self._record_point()
        if left_s > 0 and self.open_step_rest[0] > 0:
            left_s -= self._finish_open_step(left_s)
        if left_s > 0 and self.rate > 0:
            self._train(left_s, self.rate)
        elif left_s > 0:
            self.result.add_seconds("wait", left_s)
        self.now = t
        self._accrue_cost()

    def _accrue_cost(self) -> None:
        """Charge for the nodes since the last call."""
        since, self.paid_until = self.now - self.paid_until, self.now
        self.result.node_seconds += self.alive_count * since
        self.result.usd = self.ledger.usd(self.now)

    def _finish_open_step(self, max_s: float) -> float:
        """Continue the open step for at most `max_s` seconds; returns the seconds spent."""
        seconds, rate = self.open_step_rest
        spent = min(seconds, max_s)
        self._train(spent, rate)
        self.open_step_rest = (seconds - spent, rate) if seconds > spent else (0.0, 0.0)
        if seconds < max_s * (1 - 1e-9):
            self._record_point()
        return spent

    def _train(self, seconds: float, rate: float) -> None:
        """Train, and write checkpoints when they are due."""
        interval_s, max_stall_s = self.strategy.checkpoint_every_s, self.strategy.checkpoint_stall_s
        while seconds > 0:
            spent = min(seconds, interval_s - self.trained_since_checkpoint) if interval_s else seconds
            self.result.samples += spent * rate
            self.trained_s += spent
            self.trained_since_checkpoint += spent
            self.result.add_seconds("train", spent)
            self.now += spent
            seconds -= spent
            if interval_s and self.trained_since_checkpoint >= interval_s:
                stall_s = min(max_stall_s, seconds)
                self.result.add_seconds("checkpoint", stall_s)
                seconds -= stall_s
                self.now += stall_s
                self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        self.trained_since_checkpoint = 0.0
        usable = [checkpoint for checkpoint in self.checkpoints if checkpoint.usable_at <= self.now]
        in_progress = [checkpoint for checkpoint in self.checkpoints if checkpoint.usable_at > self.now]
        usable_at = self.now + self.strategy.checkpoint_write_s
        self.checkpoints = [
            *usable[-1:],
            *in_progress,
            _SimulatedCheckpoint(usable_at, self.result.samples, self.trained_s),
        ]

    def _record_point(self) -> None:
        self._accrue_cost()
        rate = 0.0 if self.pauses else self.open_step_rest[1] if self.open_step_rest[0] > 0 else self.rate
        self.result.points.append(RunPoint(self.now, self.alive_count, rate, self.result.usd, self.result.samples))
