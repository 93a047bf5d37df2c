"""Simulate recovery by replicas: lost work is run again, empty slots are filled, and the shape changes.

Decisions are made by `culm.plan.reshape.reshape_decision`, as in the leader of a real run: some steps after nodes
joined or were lost, from the speed, the losses and the remaining time that a leader would know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from culm.plan import Slot
from culm.plan.reshape.reconfigure_policy import (
    PipelineLayout,
    ReconfigureCosts,
    ReconfigureDecision,
    ReconfigureKind,
    ReconfigureState,
    decide_fill_only,
)
from culm.plan.reshape.reshape_decision import (
    RESHAPE_DELAY_STEPS,
    RunSpeed,
    SettleTimer,
    ShapeLimits,
    decide_reshape,
    estimate_reshape_costs,
    reshape_options,
    settle_steps,
)
from culm.sim.engine import SimulatedNode, StrategyResponse
from culm.sim.shape_step_times import max_uncovered_pipelines, unheld_parts
from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext
from culm.sim.slot_table import interleave_zones
from culm.strategies.strategy import Strategy

_NO_OUTLOOK = ReconfigureCosts(step_s_by_layout={}, next_loss_at=0.0)
"""Filling an empty slot does not depend on costs."""


@dataclass(frozen=True, kw_only=True)
class CachedClusterState(ReconfigureState):
    """The same state with empty slots and standby nodes given, because they are needed often."""

    unfilled: frozenset[Slot]
    spare_nodes: tuple[str, ...]

    @property
    def empty_slots(self) -> list[Slot]:
        return sorted(self.unfilled)

    @property
    def standby_nodes(self) -> list[str]:
        return list(self.spare_nodes)


class ReconfiguringStrategy(SimulatedStrategy):
    """Nodes in pipelines of any depths, and a leader that fills slots and changes the shape."""

    def __init__(self, context: SimulationContext, strategy: Strategy) -> None:
        super().__init__(context)
        self.strategy = strategy
        self.alive: dict[str, str] = {}
        self.node_of_slot: dict[Slot, str] = {}
        self.slot_of_node: dict[str, Slot] = {}
        self.depths: tuple[int, ...] = ()
        self.holes: set[Slot] = set()
        self.spare_nodes: dict[str, None] = {}
        self.has_started = False
        self.quiet_period = SettleTimer()
        self.reshape_count = 0
        self.lost_count = 0
        self.last_loss_at = 0.0
        """Time of the last loss: since then stages with one holder have been copied."""
        self.mean_reshape_s: float | None = None

    # Events.

    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        lost_slots = [self.slot_of_node.pop(node.name) for node in nodes if node.name in self.slot_of_node]
        for node in nodes:
            self.alive.pop(node.name, None)
            self.spare_nodes.pop(node.name, None)
        for slot in lost_slots:
            del self.node_of_slot[slot]
        self.holes.update(lost_slots)
        self.lost_count += len(lost_slots)
        response = self._recover(lost_slots) if lost_slots else None
        self._schedule_recheck()
        return response

    def _recover(self, lost_slots: Sequence[Slot]) -> StrategyResponse | None:
        """Complete the open step on nodes that hold the lost layers; restart if a layer has no holder."""
        pauses = {**self.cluster_costs.detection_pauses, "redo": self._recovery_s(lost_slots)}
        held, self.last_loss_at = self._has_all_layers(lost_slots), self.now
        if not held:
            return self.start_or_reload()
        filled = self._fill_holes()
        return StrategyResponse(
            self.samples_per_s, {**pauses, **filled}, reason="fill" if filled else "stay", completes_step=True
        )

    def _recovery_s(self, lost_slots: Sequence[Slot]) -> float:
        """Delay of the open step because these slots are empty; with a notice there is none."""
        if self.cluster_costs.notice_s:
            return 0.0
        return self.context.recovery_cost.recovery_s(self.strategy, len(self.depths), lost_slots, self.phase)

    def _has_all_layers(self, lost_slots: Sequence[Slot]) -> bool:
        """Whether every part of the model has a holder left, or was copied before its last holder was lost: within a
        notice, or because it had one holder for longer than a copy takes."""
        shadows = self.strategy.shadows_every_stage
        if max_uncovered_pipelines(self.depths, self.holes, shadows=shadows) < len(self.depths):
            return True
        if len(self.depths) > 1 or shadows:
            copied = self.now - self.last_loss_at >= self.cluster_costs.move_s(self.workload)
            lost = [part.intersection(lost_slots) for part in unheld_parts(self.depths, self.holes, shadows=shadows)]
            if copied and all(len(part) < 2 for part in lost):
                return True
        return self.cluster_costs.can_hand_over(self.workload)

    def on_nodes_joined(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        self.alive.update((node.name, node.zone) for node in nodes)
        self.spare_nodes.update((node.name, None) for node in nodes)
        response = self._fill_with_newcomers() if self.depths else self.start_or_reload()
        self._schedule_recheck()
        return response

    def _fill_with_newcomers(self) -> StrategyResponse | None:
        filled = self._fill_holes()
        return StrategyResponse(self.samples_per_s, filled, reason="fill") if filled else None

    def on_recheck(self) -> StrategyResponse | None:
        """The members have settled: let the policy decide on the shape."""
        self.recheck_after_steps = 0
        if self.quiet_period.is_decided or not self.has_mismatch or self.context.reconfigure_policy == "never":
            return None
        self.quiet_period.is_decided = True
        policy = self.strategy.reshape_policy(self.context.reconfigure_policy)
        state = self._cluster_state()
        candidates = self.candidate_layouts(state)
        costs = estimate_reshape_costs(
            state,
            candidates,
            self._pace(),
            lambda layout: self.context.shape_step_times.predicted_step_s(layout.depths),
            self.now,
        )
        decision, _ = decide_reshape(policy, state, candidates, costs, self.now)
        response = self._reshape(decision) if decision.changes_shape else None
        self._schedule_recheck()
        return response

    def candidate_layouts(self, state: ReconfigureState) -> Mapping[PipelineLayout, ReconfigureKind]:
        """The layouts that the policy chooses from."""
        return reshape_options(state, self._bounds)

    @property
    def has_mismatch(self) -> bool:
        """Whether a slot is empty, or more workers have no slot than in the planned shape."""
        return bool(self.depths and (self.holes or len(self.spare_nodes) > self.workload.spare_workers))

    def _schedule_recheck(self) -> None:
        """Ask for a recheck once the members have settled, unless it was decided for them already."""
        self.quiet_period.observe((frozenset(self.alive), self.reshape_count), self.step, self.now)
        self.recheck_after_steps = (
            settle_steps(self.step_s()) + RESHAPE_DELAY_STEPS - 1
            if self.strategy.reshapes and self.has_mismatch and not self.quiet_period.is_decided
            else 0
        )

    # State.

    def _cluster_state(self) -> CachedClusterState:
        return CachedClusterState(
            zone_by_node=self.alive,
            node_by_slot=self.node_of_slot,
            depths=self.depths,
            max_pipelines=self.workload.micro_batches,
            unfilled=frozenset(self.holes),
            spare_nodes=tuple(self.spare_nodes),
        )

    @property
    def _bounds(self) -> ShapeLimits:
        w = self.workload
        return ShapeLimits(
            min_depth=w.min_stages,
            max_depth=w.layers or 2 * w.min_stages,
            allows_one_pipeline=self.strategy.allows_one_pipeline,
        )

    def _pace(self) -> RunSpeed:
        step_s = self.step_s()
        steps_left = self.workload.steps - self.step + RESHAPE_DELAY_STEPS - 1
        return RunSpeed(
            measured_step_s=step_s,
            predicted_step_s=self.context.shape_step_times.predicted_running_step_s(
                self.depths, frozenset(self.holes), self.strategy
            ),
            remaining_s=steps_left * step_s if self.workload.steps else self.remaining_s,
            time_between_losses_s=self.now / self.lost_count if self.lost_count else math.inf,
            state_bytes=self.workload.state_bytes,
            measured_reshape_s=self.mean_reshape_s,
        )

    def step_s(self) -> float:
        """Seconds of a step in the current state."""
        return self.context.shape_step_times.actual_step_s(self.depths, frozenset(self.holes), self.strategy)

    @property
    def samples_per_s(self) -> float:
        return self.context.samples_per_s(self.step_s()) if self.depths else 0.0

    # Changes.

    def start_or_reload(self) -> StrategyResponse | None:
        """Start in the planned shape; or restart from the checkpoint, in the last shape if there are nodes for it."""
        self.node_of_slot, self.slot_of_node, self.spare_nodes = {}, {}, dict.fromkeys(self.alive)
        self._set_depths(self._restart_depths() if self.has_started else self._initial_depths())
        self._fill_holes()
        again, self.has_started = self.has_started, self.has_started or bool(self.depths)
        if not self.depths:
            return StrategyResponse(0.0, rollback_to="checkpoint", reason="too few nodes") if again else None
        return (
            self.reload_checkpoint(self.samples_per_s)
            if again
            else StrategyResponse(self.samples_per_s, {"start": self.cluster_costs.restart_s}, reason="start")
        )

    def _initial_depths(self) -> tuple[int, ...]:
        P = self.workload.stages
        return (P,) * min(self.workload.pipelines, len(self.alive) // P)

    def _restart_depths(self) -> tuple[int, ...]:
        """The last depths if every stage can have a node; else the planned depth, or one pipeline of all nodes."""
        nodes = len(self.alive)
        if self.depths and nodes >= max(self.depths):
            return self.depths
        return self._initial_depths() or ((nodes,) if nodes >= self.workload.min_stages else ())

    def _set_depths(self, depths: tuple[int, ...]) -> None:
        self.depths, self.reshape_count = depths, self.reshape_count + 1
        every = (Slot(d, s) for d, depth in enumerate(depths) for s in range(depth))
        self.holes = {slot for slot in every if slot not in self.node_of_slot}

    def _fill_holes(self) -> dict[str, float]:
        """Give empty slots to standby nodes. Returns the pause that this takes."""
        if not self.holes or not self.spare_nodes:
            return {}
        decision, _ = decide_fill_only(self._cluster_state(), _NO_OUTLOOK, self.now)
        self._assign_nodes(self.assign_slots(decision))
        return {"join": self.cluster_costs.join_s}

    def _assign_nodes(self, slots: dict[Slot, str]) -> None:
        self.node_of_slot = slots
        self.slot_of_node = {node: slot for slot, node in slots.items()}
        self.holes.difference_update(slots)
        self.spare_nodes = {node: None for node in self.alive if node not in self.slot_of_node}

    def assign_slots(self, decision: ReconfigureDecision) -> dict[Slot, str]:
        """The node of every slot to fill. Without shadow replicas: as decided, holders of a stage in as many zones as
        possible. With them: in a new shape the neighbours of a pipeline are in different zones."""
        if self.node_of_slot or not self.strategy.shadows_every_stage:
            return dict(decision.node_by_slot)
        order = iter(interleave_zones(SimulatedNode(name, zone) for name, zone in self.alive.items()))
        return {slot: next(order).name for slot in sorted(decision.node_by_slot)}

    def _reshape(self, decision: ReconfigureDecision) -> StrategyResponse:
        """Form other pipelines, after a pause in which the last step drains and layers move to their new holders."""
        self.node_of_slot = {}
        self._set_depths(decision.layout.depths)
        self._assign_nodes(self.assign_slots(decision))
        change = {"move": self.cluster_costs.move_s(self.workload), "join": self.cluster_costs.join_s}
        took = sum(change.values())
        self.mean_reshape_s = took if self.mean_reshape_s is None else (self.mean_reshape_s + took) / 2
        return StrategyResponse(self.samples_per_s, change, reason=decision.kind)
