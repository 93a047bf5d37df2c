"""Cost handlers: nodes register and vanish, prices change, and the budget ends the run. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from culm.cluster.leader.events import BudgetTimer, WriteCost
from culm.cluster.run_setup import decode_fleet_decision, encode
from culm.errors import BudgetReached
from culm.market.cost_record import CostRecord
from culm.market.rental_cost import RentalTerms
from culm.plan.rent.fleet_decision import FleetDecision, deadline_risk
from culm.runtime import messages

if TYPE_CHECKING:
    from culm.cluster.leader.events import LeaderEvent
    from culm.cluster.leader.leader_state import LeaderState
    from culm.cluster.run_setup import NodeRecord

_PUBLISH_EVERY_S = 1.0
"""Shortest time between two publications of the progress for fleet controllers."""
_LONGEST_CHECK_S, _SHORTEST_CHECK_S = 30.0, 0.5
"""Between two checks of the budget while no step is committed."""


class CostHandlers:
    """Keeps the account of the run on behalf of the leader."""

    def __init__(self, state: LeaderState) -> None:
        self.state = state
        self._published_at = -math.inf
        self._present: set[int] = set()
        """Nodes whose key is in the store, according to the events so far."""
        self._announced: dict[int, RentalTerms] = {}
        """What nodes cost that have not registered yet. Numbers of nodes are never used again."""
        self._at_risk = False
        """Whether the last event about the deadline said that it will be missed."""

    def start(self, absent_nodes: Sequence[int]) -> None:
        """This node has become the leader. `absent_nodes`: those that have vanished since the previous leader."""
        for node in absent_nodes:
            self.handle_node(node, None)
        if math.isfinite(self.state.setup.limits.budget_usd):
            self._start_timer()

    def handle_node(self, node: int, record: NodeRecord | None) -> None:
        """The record of a node has changed; None: the node is gone."""
        state, spending = self.state, self.state.spending
        (self._present.discard if record is None else self._present.add)(node)
        if record is None:
            rental = spending.release(node, state.now)
            if rental is not None:
                state.log_event("released", node=node, rental=rental.name, hours=rental.seconds / 3600, usd=rental.usd)
        elif (terms := self._announced.pop(node, None) or record.rental) is not None:
            self._rent(node, terms)
        elif not spending.has_rental(node) and record.workers and math.isfinite(state.setup.limits.budget_usd):
            why = "it registered without a price, so that the budget does not count it: use culm agent --price"
            state.log_event("unpriced", node=node, why=why)
        self._write_change()

    def handle_rental(self, node: int, terms: RentalTerms) -> None:
        """The program that rents a node reports its price: the first one, or a new one."""
        if self.state.spending.has_rental(node):
            self._change_price(node, terms.usd_h)
        elif node in self._present:
            self._rent(node, terms)
            self._write_change()
        else:
            self._announced[node] = terms

    def _rent(self, node: int, terms: RentalTerms) -> None:
        state = self.state
        rental = state.spending.rent(node, terms, state.now)
        if rental is None:
            return
        known = {"instance": rental.instance, "market": rental.market, "zone": rental.zone, "usd_h": rental.usd_h}
        state.log_event("rented", node=node, rental=rental.name, **known, since_s=rental.seconds)
        self._warn_if_too_dear(node, rental.usd_h)

    def _write_change(self) -> None:
        """Write the account if a node was rented or released."""
        state = self.state
        if state.spending.changed:
            self._write_record()
            if state.epoch is None and state.setup.survives_losses:
                state.put_snapshot()  # a new leader must know of nodes that vanish early

    def handle_price(self, node: int, value: bytes | None) -> None:
        """The program that rents a node reports that its price has changed."""
        try:
            usd_h = float(value or b"")
        except ValueError:
            return
        self._change_price(node, usd_h)

    def _change_price(self, node: int, usd_h: float) -> None:
        if self.state.spending.change_price(node, usd_h, self.state.now):
            self.state.log_event("price_changed", node=node, usd_h=usd_h)
            self._warn_if_too_dear(node, usd_h)
            self._write_record()

    def _warn_if_too_dear(self, node: int, usd_h: float) -> None:
        limit = self.state.setup.limits.max_price_usd_h
        if usd_h > limit:
            why = f"it costs {usd_h:g} $/h, more than the highest price of {limit:g} $/h"
            self.state.log_event("too_dear", node=node, why=why)

    def handle_fleet_decision(self, value: bytes) -> None:
        """A fleet controller has decided how many nodes to have: record it with its reason, and stop if it says so."""
        found: FleetDecision = decode_fleet_decision(value)
        self.state.log_event("fleet", spot=found.spot, on_demand=found.on_demand, why=found.why)
        if found.stop and self.state.epoch is not None:
            self.state.spending.stop_reason = found.why
            self._stop()

    def handle_event(self, event: LeaderEvent) -> None:
        """After each event: note what the run does now."""
        state, spending = self.state, self.state.spending
        if not spending.is_active or (
            spending.is_training and isinstance(event, messages.StepReport | messages.Heartbeat)
        ):
            return
        members = () if state.epoch is None else state.members.present_members(state.epoch)
        spending.observe(state.phase, (member.node for member in members), state.now)

    def handle_commit(self, step: int, *, failure_free: bool) -> None:
        """A step was committed: measure the pace, end the run before the budget does, publish the progress."""
        state, spending = self.state, self.state.spending
        if not spending.is_active and not spending.has_limits:
            return
        spending.record_commit(step, state.now, failure_free=failure_free, nodes=self._present_nodes)
        if state.end_step is None and spending.check_budget(state.now, self._open_steps):
            self._stop()
        self._publish_progress()

    @property
    def _present_nodes(self) -> int:
        """Nodes with a slot."""
        epoch = self.state.epoch
        return 0 if epoch is None else len({member.node for member in epoch.present_members})

    @property
    def _open_steps(self) -> int:
        """Steps from now until the run can end, and the one until the next check."""
        return self.state.earliest_end_step - self.state.ledger.next_step + 1

    def _stop(self) -> None:
        """End the run before the first step that no worker has begun, with a checkpoint."""
        state = self.state
        if state.end_step is None and state.earliest_end_step < state.setup.steps:
            state.end_before_step(state.earliest_end_step)
            state.log_event("stopped", step=state.earliest_end_step - 1, why=state.spending.stop_reason)

    def check_budget(self) -> None:
        """While no step is committed: end the run before waiting or recovering costs more than the budget.

        Raises BudgetReached if no step can be completed any more: then the newest checkpoint is that of before. A run
        that is stopping and that a loss delays until the budget is spent ends like that, too.
        """
        state, spending = self.state, self.state.spending
        if state.end_step is None and spending.check_budget(state.now, self._open_steps):
            if state.epoch is None or not state.handlers.epoch_change.is_idle or not state.members.all_ready:
                raise BudgetReached(state.budget_message())
            self._stop()
        elif spending.stop_reason and not state.all_steps_committed and spending.is_exhausted(state.now):
            raise BudgetReached(state.budget_message())
        self._start_timer()

    def _start_timer(self) -> None:
        open_steps = 0 if self.state.spending.stop_reason else self._open_steps
        left_s = self.state.spending.seconds_to_budget(self.state.now, open_steps)
        self.state.start_timer(min(_LONGEST_CHECK_S, max(_SHORTEST_CHECK_S, left_s / 2)), BudgetTimer())

    def _publish_progress(self) -> None:
        """Publish the progress under the key `progress`, and an event when the deadline is or is no longer at risk."""
        state = self.state
        if state.now - self._published_at < _PUBLISH_EVERY_S:
            return
        self._published_at = state.now
        found = state.spending.progress(
            state.now,
            state.started_at,
            steps_done=state.ledger.next_step,
            trained_steps=state.ledger.steps,
            open_steps=self._open_steps,
            present=self._present_nodes,
        )
        state.put_key("progress", encode(found))
        why = deadline_risk(found, state.setup.limits)
        if (why is not None) != self._at_risk:
            self._at_risk = why is not None
            state.log_event("deadline_at_risk" if why else "deadline_safe", why=why or "the pace suffices again")

    def _write_record(self) -> None:
        self.state.emit(WriteCost(self.record(self.state.now)))

    def write_record_at_checkpoint(self) -> None:
        """With every checkpoint, so that a run that is resumed from it knows what was spent."""
        if self.state.spending.is_active:
            self._write_record()

    def record(self, now: float, *, ended: bool = False) -> CostRecord:
        """The account so far. `ended`: the run ends now, and all nodes with it."""
        state, ledger = self.state, self.state.ledger
        return state.spending.record(
            now,
            state.started_at,
            steps=ledger.steps,
            samples=ledger.samples,
            redone=ledger.samples_redone,
            ended=ended,
        )
