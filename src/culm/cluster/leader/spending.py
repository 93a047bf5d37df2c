"""Spending: what the nodes of the run cost, when the budget ends the run, and the progress that a fleet controller
sees. Pure: part of the leader's state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.leader.phases import Phase
from culm.market.cost_record import CostRecord
from culm.market.rental_cost import CostLedger, Rental, RentalTerms, mean_on_demand_usd_h, on_demand_equivalent
from culm.plan.rent.fleet_decision import (
    FleetHistory,
    FleetLimits,
    FleetProgress,
    HistoryState,
    budget_stop_reason,
    share_window_s,
)

if TYPE_CHECKING:
    from culm.cluster.run_setup import RunSetup

_RECOVERY_PHASES = {Phase.HALTING, Phase.REPLACING, Phase.DECIDING, Phase.RECOVERING}
_DEFAULT_CHECKPOINT_S = 5.0
_CHECKPOINT_BYTES_S = 50e6
"""Before a checkpoint was written: bytes per second and worker that storage is expected to take, and a fixed time."""
_END_S = 2.0
"""Seconds from the last checkpoint until the nodes are released."""


class SpendingSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What the next leader needs to continue the account."""

    rentals: tuple[Rental, ...] = ()
    """Those that have not ended; the others are part of the history of the run."""
    names: dict[int, str] = {}
    """The rental of each node that is present."""
    full_steps: int = 0
    full_s: float = 0.0
    history: HistoryState = (((1.0, 1.0),), 0.0)
    """See FleetHistory."""
    checkpoint_s: float | None = None
    stop_reason: str = ""


class Spending:
    """Rentals by node, the pace with all nodes, and the limits of the user."""

    def __init__(self, setup: RunSetup) -> None:
        self._setup = setup
        self._ledger = CostLedger()
        self._names: dict[int, str] = {}
        self._full_steps, self._full_s = 0, 0.0
        self._partial_steps, self._partial_s = 0, 0.0
        """Failure-free steps with fewer nodes, and how long all nodes would have taken for them."""
        self._last_full_commit_at: float | None = None
        self._last_commit_at: float | None = None
        """When the last step was committed; before the first, when training began."""
        self._first_step_s = 0.0
        self._history = FleetHistory(setup.nodes, window_s=share_window_s(setup.limits.deadline_s))
        self._checkpoint_s: float | None = None
        self._checkpoint_began: dict[int, float] = {}
        self._work: tuple[frozenset[str], bool] = (frozenset(), False)
        self.stop_reason = ""
        """Why the budget ends the run; empty: it does not."""
        self.changed = False
        """Whether a node was rented or released, or a price has changed, since `record` was last called."""

    @property
    def is_active(self) -> bool:
        """Whether any node has a price."""
        return bool(self._ledger.rentals) or bool(self._setup.earlier_rentals)

    @property
    def has_limits(self) -> bool:
        return self._setup.limits != FleetLimits()

    def rent(self, node: int, terms: RentalTerms, now: float) -> Rental | None:
        """A node with a price has registered. Returns its rental if that is news."""
        name = terms.machine or f"node {node}"
        if self._names.get(node) == name:
            return None
        self._names[node] = name
        self._ledger.rent(name, terms, now)
        self.changed = True
        self._count_spot(now)
        return next(each for each in self._ledger.rentals if each.name == name)

    def has_rental(self, node: int) -> bool:
        """Whether a node that is present has a price."""
        return node in self._names

    def release(self, node: int, now: float) -> Rental | None:
        """A node is gone. Returns its rental; None: it had no price."""
        name = self._names.pop(node, None)
        if name is None or name in self._names.values():  # its machine has registered again meanwhile
            return None
        self.changed = True
        rental = self._ledger.release(name, now)
        self._count_spot(now)
        return rental

    def change_price(self, node: int, usd_h: float, now: float) -> bool:
        """A node has another price from now on. Returns whether that is a change."""
        changed = node in self._names and self._ledger.change_price(self._names[node], usd_h, now)
        self.changed |= changed
        return changed

    def observe(self, phase: Phase, members: Iterable[int], now: float) -> None:
        """What the run does from now on, and which nodes have a slot."""
        trains = phase in (Phase.TRAINING, Phase.FINISHING)
        recovers = phase in _RECOVERY_PHASES or (phase is Phase.BUILDING and bool(self._full_steps))
        working = (self._names[node] for node in members if node in self._names) if trains or recovers else ()
        work = (frozenset(working), recovers)
        if trains and self._last_commit_at is None:
            self._last_commit_at = now
        if work != self._work:
            self._work = work
            self._ledger.set_work(work[0], now, recovering=recovers)

    @property
    def is_training(self) -> bool:
        """Whether the last observation was training: then step reports cannot change what the run does."""
        return bool(self._work[0]) and not self._work[1]

    def record_commit(self, step: int, now: float, *, failure_free: bool, nodes: int) -> None:
        """A step was committed. `failure_free`: nothing happened since the one before. `nodes`: with a slot."""
        full = failure_free and nodes >= self._setup.nodes
        if full and self._last_full_commit_at is not None:
            self._full_steps += 1
            self._full_s += now - self._last_full_commit_at
        elif failure_free and not full and self._last_commit_at is not None:
            self._partial_steps += 1
            self._partial_s += (now - self._last_commit_at) * nodes / self._setup.nodes
        self._last_full_commit_at = now if full else None
        if not self._first_step_s and self._last_commit_at is not None:
            self._first_step_s = now - self._last_commit_at
        self._last_commit_at = now
        every = self._setup.checkpoint_every
        if every and (step + 1) % every == 0:
            self._checkpoint_began[step + 1] = now

    def record_checkpoint(self, step: int, now: float) -> None:
        """A checkpoint of this many steps is valid."""
        began = self._checkpoint_began.pop(step, None)
        self._checkpoint_began = {each: at for each, at in self._checkpoint_began.items() if each > step}
        if began is not None:
            self._checkpoint_s = max(self._checkpoint_s or 0.0, now - began)

    def check_budget(self, now: float, open_steps: int) -> str:
        """Why the run has to stop now to keep its budget; empty: it can go on. `open_steps`: steps that it completes
        before it can stop, and one more until this is called again."""
        why = budget_stop_reason(self.usd(now), self._usd_if_stopped(now, open_steps), self._setup.limits.budget_usd)
        self.stop_reason = self.stop_reason or why or ""
        return self.stop_reason

    def seconds_to_budget(self, now: float, open_steps: int) -> float:
        """Seconds until the budget would have to end the run at the present prices; infinite without a budget."""
        left_usd = self._setup.limits.budget_usd - self._usd_if_stopped(now, open_steps)
        usd_s = self._ledger.usd_h / 3600
        return left_usd / usd_s if usd_s and math.isfinite(left_usd) else math.inf

    def is_exhausted(self, now: float) -> bool:
        """Whether the budget is spent if the run ends at once."""
        return self._earlier_usd + self._ledger.usd_if_ended(now + _END_S) >= self._setup.limits.budget_usd

    def _usd_if_stopped(self, now: float, open_steps: int) -> float:
        return self._earlier_usd + self._ledger.usd_if_ended(now + self._stop_s(now, open_steps))

    def _stop_s(self, now: float, open_steps: int) -> float:
        """Seconds that it takes to stop: the open steps, each as long as the open one at least, the checkpoint, the
        end."""
        open_s = 0.0 if self._last_commit_at is None else now - self._last_commit_at
        step_s = max((self.full_step_s if self._full_steps else 0.0) or self._first_step_s, open_s)
        checkpoint_s = self._checkpoint_s
        if checkpoint_s is None:
            state = sum(each.parameter_bytes + each.state_bytes for each in self._setup.layers)
            checkpoint_s = _DEFAULT_CHECKPOINT_S + state / self._setup.workers / _CHECKPOINT_BYTES_S
        return open_steps * step_s + checkpoint_s + _END_S

    @property
    def full_step_s(self) -> float | None:
        """Mean duration of a failure-free step with all nodes. While there was none: at least so long, judging
        from those with fewer nodes. None: there was no failure-free step."""
        if self._full_steps:
            return self._full_s / self._full_steps
        return self._partial_s / self._partial_steps if self._partial_steps else None

    def usd(self, now: float) -> float:
        """Dollars spent so far, with those before a resume."""
        return self._earlier_usd + self._ledger.usd(now)

    @property
    def _earlier_usd(self) -> float:
        return math.fsum(each.usd for each in self._setup.earlier_rentals)

    def progress(
        self, now: float, started_at: float, *, steps_done: int, trained_steps: int, open_steps: int, present: int
    ) -> FleetProgress:
        """The state of the run for a fleet controller. `trained_steps`: useful steps of this run. `present`: nodes with
        a slot; those without a price count as on-demand nodes."""
        spot, on_demand = self._present_by_market() if self._ledger.rentals else (0, present)
        return FleetProgress(
            elapsed_s=now - started_at,
            steps_done=steps_done,
            steps=self._setup.steps,
            nodes=self._setup.nodes,
            full_step_s=self.full_step_s,
            spot_shares=self._history.spot_shares(now),
            efficiency=self._history.efficiency(now, trained_steps * self.full_step_s) if self.full_step_s else 1.0,
            spot_nodes=spot,
            on_demand_nodes=on_demand,
            cost_usd=self.usd(now),
            cost_if_stopped_usd=self._usd_if_stopped(now, open_steps),
        )

    def _present_by_market(self) -> tuple[int, int]:
        open_names = self._ledger.open_names
        markets = [each.market for each in self._ledger.rentals if each.name in open_names]
        return markets.count("spot"), markets.count("on-demand")

    def _count_spot(self, now: float) -> None:
        spot, on_demand = self._present_by_market()
        self._history.update(now, spot, on_demand)

    def record(
        self, now: float, started_at: float, *, steps: int, samples: int, redone: int, ended: bool = False
    ) -> CostRecord:
        """The account as data. `redone`: samples of steps that were run again. `ended`: all nodes are released."""
        self.changed = False
        if ended:
            for name in tuple(self._ledger.open_names):
                self._ledger.release(name, now)
            self._names.clear()
        rentals = self._ledger.rentals_at(now)
        done = steps if not self._setup.earlier_rentals else self._setup.start + steps
        price = mean_on_demand_usd_h((*self._setup.earlier_rentals, *rentals))
        step_s, nodes = self.full_step_s, self._setup.nodes
        known = price is not None and step_s is not None
        return CostRecord(
            started_at=started_at,
            updated_at=now,
            ended=ended,
            rentals=rentals,
            earlier=self._setup.earlier_rentals,
            steps=done,
            samples=samples if not self._setup.earlier_rentals else round(samples * done / max(1, steps)),
            redone_share=redone / (samples + redone) if redone else 0.0,
            on_demand_usd=on_demand_equivalent(steps=done, step_s=step_s, nodes=nodes, on_demand_usd_h=price)
            if known and price is not None and step_s is not None
            else None,
        )

    def snapshot(self, now: float) -> SpendingSnapshot | None:
        """The account for the next leader; None: there is nothing to account for."""
        if not self.is_active and not self._full_steps:
            return None
        self._count_spot(now)
        return SpendingSnapshot(
            rentals=self._ledger.open_rentals_at(now),
            names=dict(self._names),
            full_steps=self._full_steps,
            full_s=self._full_s,
            history=self._history.state,
            checkpoint_s=self._checkpoint_s,
            stop_reason=self.stop_reason,
        )

    @property
    def ended_rentals(self) -> tuple[Rental, ...]:
        return self._ledger.ended_rentals

    def restore(self, found: SpendingSnapshot, ended: tuple[Rental, ...], now: float) -> None:
        """Continue the account of the previous leader. Its nodes are rented until they are released."""
        known = self._names
        self._ledger.restore(sorted((*ended, *found.rentals), key=lambda rental: rental.started_at))
        self._names = {**found.names, **known}
        self._full_steps, self._full_s = found.full_steps, found.full_s
        self._history.restore(found.history)
        self._checkpoint_s = found.checkpoint_s
        self.stop_reason = found.stop_reason
        self._count_spot(now)
