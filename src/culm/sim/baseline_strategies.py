"""Baselines in the simulator. Which pipelines run, rest, restart or are formed anew is decided by the functions that
decide it for the leader of a real run: `culm.plan.reshape`, `culm.plan.recover.role_assignment`, and the strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from culm.plan import Slot
from culm.plan.recover.role_assignment import SurvivingCluster, complete_pipelines
from culm.plan.reshape.reconfigure_policy import (
    PipelineLayout,
    ReconfigureCosts,
    ReconfigureKind,
    ReconfigureState,
    decide_by_cost,
)
from culm.plan.reshape.whole_pipelines import choose_whole_pipelines, completes_another_pipeline
from culm.schedule import generate_plan, split_micro_batches
from culm.sim.culm_strategies import ReconfiguringStrategy
from culm.sim.engine import StrategyResponse
from culm.sim.simulated_strategy import FixedDepthStrategy, SimulationContext

if TYPE_CHECKING:
    from culm.sim.engine import SimulatedNode
    from culm.strategies.strategy import Strategy


class SimulatedNone(FixedDepthStrategy):
    """A loss ends the run, and the user starts it again from the first step."""

    def __init__(self, context: SimulationContext) -> None:
        super().__init__(context)
        self.checkpoint_every_s = 0.0

    def after_loss(self) -> StrategyResponse:
        self.slots.rebuild_pipelines()
        pauses = {"detect": self.cluster_costs.detect_s, "restart": self.cluster_costs.restart_s}
        return StrategyResponse(self.samples_per_s(), pauses, "start", "start again")

    def after_join(self) -> StrategyResponse | None:
        return None


class FixedShapeStrategy(ReconfiguringStrategy):
    """Keeps the planned slots, of which some are empty. A return to the checkpoint fills whole pipelines."""

    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        self.hands_over = self.cluster_costs.can_hand_over(self.workload)
        return super().on_nodes_lost(nodes)

    def _recover(self, lost_slots: Sequence[Slot]) -> StrategyResponse | None:
        without_notice = () if self.hands_over else range(len(lost_slots))
        if self.strategy.returns_to_checkpoint(without_notice):
            return self.start_or_reload()
        return super()._recover(lost_slots)

    def start_or_reload(self) -> StrategyResponse | None:
        """Start, or restart from the checkpoint, on as many whole pipelines as there are nodes for."""
        w = self.workload
        if not self.alive or (not self.has_started and len(self.alive) < w.stages):
            self.depths = ()
            return StrategyResponse(0.0, rollback_to="checkpoint", reason="too few nodes") if self.has_started else None
        kept = {slot.pipeline * w.stages + slot.stage: node for slot, node in self.node_of_slot.items()}
        chosen = choose_whole_pipelines(w.pipelines, w.stages, kept.keys(), len(self.alive) - len(kept))
        kept = {slot: kept[slot] for slot in chosen if slot in kept}
        free = iter([node for node in self.alive if node not in set(kept.values())])
        filled = kept | dict(zip([slot for slot in chosen if slot not in kept], free, strict=False))
        self._assign_nodes({})
        self._set_depths((w.stages,) * w.pipelines)
        self._assign_nodes({Slot(*divmod(slot, w.stages)): node for slot, node in filled.items()})
        if self.has_started:
            return self.reload_checkpoint(self.samples_per_s)
        self.has_started = True
        return StrategyResponse(self.samples_per_s, {"start": self.cluster_costs.restart_s}, reason="start")


class SimulatedCheckpoint(FixedShapeStrategy):
    """Every loss goes back to the newest checkpoint; newcomers wait until they complete another pipeline."""

    def _fill_with_newcomers(self) -> StrategyResponse | None:
        w = self.workload
        filled = {slot.pipeline * w.stages + slot.stage for slot in self.node_of_slot}
        if not completes_another_pipeline(w.pipelines, w.stages, filled, len(self.spare_nodes)):
            return None
        response = self.start_or_reload()
        return response and replace(
            response, pauses={kind: s for kind, s in response.pauses.items() if kind in ("restart", "load")}
        )


class SimulatedMigrate(FixedShapeStrategy):
    """A node hands its state over within its notice, and peers run its work; if the notice is too short, back to the
    checkpoint."""

    def __init__(self, context: SimulationContext, strategy: Strategy) -> None:
        super().__init__(context, strategy)
        self.cluster_costs = replace(self.cluster_costs, notice_s=self.cluster_costs.notice_s or DEFAULT_NOTICE_S)

    def _recover(self, lost_slots: Sequence[Slot]) -> StrategyResponse | None:
        response = super()._recover(lost_slots)
        if response is None or response.rollback_to:
            return response
        return replace(
            response,
            pauses={**response.pauses, "join": self.cluster_costs.join_s},
            reason="move away within the notice",
        )


class SimulatedDrop(FixedShapeStrategy):
    """A pipeline that has lost a node pauses, and its samples of each step are dropped, which changes training."""

    @property
    def samples_per_s(self) -> float:
        w = self.workload
        shape = {"pipelines": w.pipelines, "stages": w.stages, "micro_batches": w.pipelines}
        held = {slot.pipeline * w.stages + slot.stage: frozenset((slot.stage,)) for slot in self.node_of_slot}
        complete = complete_pipelines(
            SurvivingCluster(full_plan=generate_plan("gpipe", **shape), policy=self.strategy, held_stages=held)
        )
        if not self.depths or not complete:
            return super().samples_per_s
        shares = split_micro_batches(w.pipelines, w.micro_batches)
        trained = sum(len(shares[pipeline]) for pipeline in complete) * w.micro_batch
        return trained / self.step_times.healthy(w.pipelines)

    def _recovery_s(self, _lost_slots: Sequence[Slot]) -> float:
        """The samples of the damaged pipeline are dropped in the open step, too: nothing is run again."""
        return 0.0


class SimulatedTemplates(ReconfiguringStrategy):
    """All nodes form pipelines of unequal depth, anew after each loss; the open step is repeated. After nodes joined
    they are formed anew if the policy of the leader says so, once the members have settled."""

    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        self.rate_before_loss = self.samples_per_s
        return super().on_nodes_lost(nodes)

    def _recover(self, lost_slots: Sequence[Slot]) -> StrategyResponse | None:
        held, self.last_loss_at = self._has_all_layers(lost_slots), self.now
        depths = self._template()
        if not held or not depths:
            return self.start_or_reload()
        layout = PipelineLayout(depths)
        only = ReconfigureCosts(step_s_by_layout={layout: 1.0}, next_loss_at=math.inf)
        decision, _ = decide_by_cost(self._cluster_state(), only, self.now, candidates={layout: "uneven"})
        formed = self._reshape(decision)
        done = self.phase * self.workload.samples / self.rate_before_loss if self.rate_before_loss else 0.0
        redo = 0.0 if self.cluster_costs.notice_s else done
        pauses = {**self.cluster_costs.detection_pauses, "redo": redo, **formed.pauses}
        return replace(formed, pauses=pauses, reason="re-instantiate")

    def candidate_layouts(self, state: ReconfigureState) -> Mapping[PipelineLayout, ReconfigureKind]:
        kinds: dict[PipelineLayout, ReconfigureKind] = {state.layout: "stay"}
        kinds.setdefault(PipelineLayout(self._template()), "uneven")
        return kinds

    def _template(self) -> tuple[int, ...]:
        """The depths for the present nodes; none if they cannot hold the model."""
        return self.context.shape_step_times.template(len(self.alive))


DEFAULT_NOTICE_S = 120.0
"""Notice that is assumed where none is given: that of AWS."""
