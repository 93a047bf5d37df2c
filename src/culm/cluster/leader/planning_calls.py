"""Planning calls: plan epochs, reshapes and shapes in threads, with a cache of plans and without pauses for garbage
collection."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from culm.cluster.leader import events
from culm.cluster.leader.next_epoch import NextEpoch, nodes_by_slot, recovery_epoch, surviving_cluster
from culm.cluster.leader.plan_improver import search_plan
from culm.cluster.leader.policy_case import PolicyCase
from culm.cluster.leader.reshaped_epoch import ReshapeInputs, layer_model_of, reshaped_epoch, template_epoch
from culm.errors import CulmError
from culm.plan.recover.role_assignment import precompute_next_plans
from culm.plan.replan.plan_cache import PlanCache
from culm.plan.reshape.pipeline_shape import build_shape

if TYPE_CHECKING:
    from culm.cluster.leader.leader_state import LeaderState
    from culm.cluster.leader.output.storage_health import LogEvent
    from culm.cluster.run_setup import RunSetup
    from culm.plan.reshape.pipeline_shape import Depths, PipelineShape
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import Epoch

_MAX_PLANS = 512
"""Plans that a leader keeps. Each node that becomes slow has other costs, and with them other plans."""


class PlanningCalls:
    """Plans in threads. It reads the leader's state when a call begins, and does not change it."""

    def __init__(self, state: LeaderState, clock: Clock, log_event: LogEvent, *, simulated: bool) -> None:
        """`simulated`: many runs follow each other in one process, so that nothing is exempted from collection."""
        self._state, self._clock, self._log_event, self._simulated = state, clock, log_event, simulated
        self._cache = PlanCache(max_solutions=_MAX_PLANS)

    # Calls: the leader needs the result to continue.

    async def plan_recovery(self, order: events.PlanRecovery) -> events.PlannedEpoch:
        """Plan the next epoch in the same shape."""
        return await self._clock.run_in_thread(self._plan_recovery, order, self._state.setup, self._state.epoch)

    def _plan_recovery(self, order: events.PlanRecovery, setup: RunSetup, old: Epoch | None) -> events.PlannedEpoch:
        assert old is not None
        self._collect_garbage()
        hits = self._cache.hits
        with paused_collection():
            planned = self._plan_epoch(order, setup, old)
        self._exempt_plans_from_collection()
        return events.PlannedEpoch(planned.epoch, planned.why, planned.source, self._cache.hits > hits)

    def _plan_epoch(self, order: events.PlanRecovery, setup: RunSetup, old: Epoch) -> NextEpoch:
        return recovery_epoch(
            setup,
            old,
            order.number,
            self._state.address,
            order.inventories,
            order.committed,
            plans=self._cache,
            moving_slots=order.moving_slots,
            arrivals=order.arrivals,
            leaving_slots=order.leaving_slots,
            zones=order.zones,
            departure_steps=order.departure_steps,
            slow_slots=order.slow_slots,
            slow_reason=order.slow_reason,
            limits_activations=order.limits_activations,
            failed_slots=order.failed_slots,
        )

    async def plan_reshape(self, order: events.PlanReshape) -> events.PlannedEpoch:
        """Plan the next epoch in another shape. Raises PlanError if that is impossible."""
        return await self._clock.run_in_thread(self._plan_reshape, order, self._state.initial_setup, self._state.epoch)

    def _plan_reshape(self, order: events.PlanReshape, setup: RunSetup, old: Epoch | None) -> events.PlannedEpoch:
        assert old is not None
        inputs = ReshapeInputs(
            setup=setup,
            old_epoch=old,
            epoch_number=order.number,
            leader=self._state.address,
            workers=order.workers,
            inventories=order.inventories,
            step=order.step,
            zones=order.zones,
        )
        with paused_collection():
            if order.depths is None:
                planned = template_epoch(inputs)
            else:
                planned = reshaped_epoch(inputs, order.depths, order.why, order.shape)
        self._exempt_plans_from_collection()
        return events.PlannedEpoch(planned.epoch, planned.why, planned.source, planned_ahead=False)

    async def find_smaller_stages(self) -> events.ReshapeVerdict | None:
        """The fastest shape of the present nodes whose stages need less memory; None: there is none."""
        return await self._clock.run_in_thread(self.policy_case().find_smaller_stages)

    # In the background, while training goes on.

    def policy_case(self) -> PolicyCase:
        """The inputs of a decision about the shape, as they are now."""
        return self._state.handlers.epoch_change.reshape_controller.policy_case()

    async def decide_reshape(self, epoch: int, case: PolicyCase) -> events.ReshapeDecided:
        """Apply the policy of the run."""
        return events.ReshapeDecided(epoch, await self._clock.run_in_thread(case.decide))

    async def build_shape(self, depths: Depths) -> events.ShapeBuilt:
        """Partition and plan pipelines of these depths."""
        try:
            model = layer_model_of(self._state.initial_setup)
            return events.ShapeBuilt(depths, await self._clock.run_in_thread(build_shape, model, depths))
        except CulmError as error:
            return events.ShapeBuilt(depths, None, str(error))

    async def precompute_plans(self, order: events.PrecomputePlans) -> None:
        """Precompute, one at a time in a thread, the plans for the next possible losses, so that a loss finds its plan
        in the cache. A failure only costs that head start: it is logged as an event and the run continues."""
        state = self._state
        try:
            cluster = surviving_cluster(state.setup, order.inventories, order.committed, order.old_epoch, self._cache)
            members = state.epoch.members if state.epoch is not None else ()
            self._collect_garbage()
            plans = precompute_next_plans(replace(cluster, nodes=nodes_by_slot(members)))
            while await self._clock.run_in_thread(next, plans, None) is not None:
                pass
            self._exempt_plans_from_collection()
        except Exception as error:
            self._log_event("unplanned", why=f"cannot precompute plans: {type(error).__name__}: {error}")

    async def improve_plan(self, shape: PipelineShape) -> events.PlanSearched | None:
        """Search for a better plan. None: the search failed, which leaves the plan as it is."""
        try:
            return await self._clock.run_in_thread(search_plan, self._state.initial_setup, shape)
        except Exception as error:
            self._log_event("unplanned", why=f"cannot improve the plan: {type(error).__name__}: {error}")
            return None

    # Garbage collection.

    def _collect_garbage(self) -> None:
        """Free what would otherwise be exempted from collection, and never be freed, with the plans that are made next.
        Takes a millisecond: what lives for long has been exempted already."""
        if not self._simulated:
            gc.collect()

    def _exempt_plans_from_collection(self) -> None:
        """Plans stay for long, and looking through them for garbage stops the leader for tenths of a second. In a
        simulation many runs follow each other in one process, so that their values are not exempted."""
        if not self._simulated:
            gc.freeze()


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Do not look for garbage meanwhile: planning for a thousand workers creates hundreds of thousands of values and no
    cycles, and looking through them takes longer than planning itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
