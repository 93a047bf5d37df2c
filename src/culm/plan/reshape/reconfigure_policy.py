"""Whether to reconfigure now, and into which layout: a pure policy used by the leader and by the simulator.

    possible_layouts        the layouts that the available nodes allow
    decide_by_cost          the layout that trains most until the next expected loss
    decide_by_bamboo_rule   the rule that Bamboo published

A loss leaves empty slots, new nodes stand by. Filling a slot, adding a pipeline or partitioning the model again costs a
pause, and pays until the next event requires a new decision.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from culm.errors import PlanError
from culm.plan.model.shape_prediction import near_equal_depths
from culm.plan.replan.plan_case import Slot
from culm.text_format import count_noun

if TYPE_CHECKING:
    from collections.abc import Iterable

ReconfigureKind: TypeAlias = Literal["stay", "fill", "grow", "shrink", "depth", "uneven"]
MOVING_KINDS: tuple[ReconfigureKind, ...] = ("shrink", "depth", "uneven")
"""Kinds that move layers to new holders."""


class PipelineLayout(NamedTuple):
    """Depths of the pipelines, and how many of their slots are empty."""

    depths: tuple[int, ...]
    empty_slot_count: int = 0

    @property
    def nodes(self) -> int:
        return sum(self.depths) - self.empty_slot_count

    def __str__(self) -> str:
        parts = [f"{many} x {depth}" for depth, many in sorted(Counter(self.depths).items(), reverse=True)]
        empty = f" with {count_noun(self.empty_slot_count, 'empty slot')}" if self.empty_slot_count else ""
        return " + ".join(parts) + empty


@dataclass(frozen=True, kw_only=True)
class ReconfigureState:
    """The current nodes and slots: plain values, from the leader's store or from the simulator."""

    zone_by_node: Mapping[str, str]
    """Every available node with its zone."""
    node_by_slot: Mapping[Slot, str]
    """The node of each filled slot."""
    depths: tuple[int, ...]
    """Current depths of the pipelines; () before the start."""
    max_pipelines: int = 0
    """Maximum number of pipelines; 0: as many as there are nodes for."""
    machine_by_node: Mapping[str, str] = field(default_factory=dict)
    """Where several of the nodes above share a machine: the machine of each. Empty: none do."""

    @property
    def empty_slots(self) -> list[Slot]:
        every = (Slot(pipeline, stage) for pipeline, depth in enumerate(self.depths) for stage in range(depth))
        return [slot for slot in every if self.node_by_slot.get(slot) not in self.zone_by_node]

    @property
    def standby_nodes(self) -> list[str]:
        placed = set(self.node_by_slot.values())
        return [node for node in self.zone_by_node if node not in placed]

    @property
    def layout(self) -> PipelineLayout:
        return PipelineLayout(self.depths, len(self.empty_slots))

    @property
    def common_depth(self) -> int:
        """The depth of all pipelines; 0 if they differ."""
        return self.depths[0] if len(set(self.depths)) == 1 else 0


@dataclass(frozen=True, kw_only=True)
class ReconfigureCosts:
    """Times of steps and pauses, in seconds."""

    step_s_by_layout: Mapping[PipelineLayout, float]
    """Step time of each layout; layouts that are missing are not considered."""
    next_loss_at: float
    """When the next loss is expected, on the clock of `now`."""
    fill_s: float = 0.0
    """Pause in which nodes that already have their layers take slots."""
    move_s: float = 0.0
    """Pause in which layers move to new holders: for another depth, or fewer pipelines."""


@dataclass(frozen=True)
class ReconfigureDecision:
    """What to do. `node_by_slot` is complete: it has the node of every slot that will be filled."""

    kind: ReconfigureKind
    layout: PipelineLayout
    node_by_slot: Mapping[Slot, str] = field(default_factory=dict)

    @property
    def changes_shape(self) -> bool:
        """Whether pipelines change; empty slots are filled in any case as soon as a node stands by."""
        return self.kind not in ("stay", "fill")


ReconfigurePolicy: TypeAlias = Callable[[ReconfigureState, ReconfigureCosts, float], tuple[ReconfigureDecision, str]]


def possible_layouts(state: ReconfigureState, depths: Iterable[int] = ()) -> dict[PipelineLayout, ReconfigureKind]:
    """The layouts that the nodes allow, each with the kind of change: `ReconfigureCosts.step_s_by_layout` needs these.

    The current layout; empty slots filled from standby nodes; more pipelines; whole pipelines only; each of `depths`
    instead of the current depth; and all nodes in pipelines whose depths differ by one.
    """
    nodes, P = len(state.zone_by_node), state.common_depth
    layouts: dict[PipelineLayout, ReconfigureKind] = {}
    if state.depths:
        layouts[state.layout] = "stay"
        still_empty = max(0, len(state.empty_slots) - len(state.standby_nodes))
        layouts.setdefault(PipelineLayout(state.depths, still_empty), "fill")
    if P:
        spare = len(state.standby_nodes) - len(state.empty_slots)
        for more in range(1, spare // P + 1):
            _add_layout(layouts, state, PipelineLayout((P,) * (len(state.depths) + more)), "grow")
        if state.empty_slots:
            _add_layout(layouts, state, PipelineLayout((P,) * (nodes // P)), "shrink")
    for depth in depths:
        _add_layout(layouts, state, PipelineLayout((depth,) * (nodes // depth)), "depth")
        if nodes // depth:
            _add_layout(layouts, state, PipelineLayout(near_equal_depths(nodes, nodes // depth)), "uneven")
    return layouts


def _add_layout(
    layouts: dict[PipelineLayout, ReconfigureKind],
    state: ReconfigureState,
    layout: PipelineLayout,
    kind: ReconfigureKind,
) -> None:
    if state.max_pipelines and len(layout.depths) > state.max_pipelines:
        layout = PipelineLayout(layout.depths[: state.max_pipelines])
    if layout.depths:
        layouts.setdefault(layout, kind)


def decide_by_cost(
    state: ReconfigureState,
    costs: ReconfigureCosts,
    now: float,
    *,
    depths: Iterable[int] = (),
    candidates: Mapping[PipelineLayout, ReconfigureKind] | None = None,
    tolerance: float = 0.0,
) -> tuple[ReconfigureDecision, str]:
    """The layout that trains most until the next expected loss; ties: the one that moves less.

    `candidates` are the layouts to choose from, by default those of `possible_layouts`. If layers have to move anyway,
    layouts within a share of `tolerance` count as equal. Of these the one is taken that has the smallest share of
    neighbouring stages on different machines and, among equals, the fewest idle nodes.

    If a stage has one holder left and a node stands by, an empty slot of that stage is filled whatever the gain: the
    next loss could take its layers. Raises PlanError if no layout has a step time.
    """
    horizon_s = max(0.0, costs.next_loss_at - now)
    layouts = possible_layouts(state, depths) if candidates is None else candidates
    candidate_kinds = {layout: kind for layout, kind in layouts.items() if layout in costs.step_s_by_layout}
    if not candidate_kinds:
        raise PlanError(
            f"no layout of {count_noun(len(state.zone_by_node), 'node')} has a step time: "
            "pass those of `possible_layouts` in ReconfigureCosts.step_s_by_layout"
        )
    steps_by_layout = {
        layout: _steps_until_next_loss(layout, kind, costs, horizon_s) for layout, kind in candidate_kinds.items()
    }
    filled, single_holder_stages = (
        [layout for layout, kind in candidate_kinds.items() if kind == "fill"],
        _stages_with_one_holder(state),
    )
    if filled and single_holder_stages:
        return _make_decision(
            state, filled[0], "fill"
        ), f"stage {single_holder_stages[0]} has one holder left: its empty slot is filled first"
    best = max(
        candidate_kinds, key=lambda layout: steps_by_layout[layout]
    )  # the first of equals: candidates are in order of effort
    if candidate_kinds[best] in MOVING_KINDS:
        near_best = [
            each
            for each in candidate_kinds
            if candidate_kinds[each] in MOVING_KINDS
            and steps_by_layout[each] >= (1 - tolerance) * steps_by_layout[best]
        ]
        best = max(near_best, key=lambda layout: (-_remote_share(layout, state), layout.nodes))
    return _make_decision(state, best, candidate_kinds[best]), _explain_decision(
        best, candidate_kinds, steps_by_layout, horizon_s
    )


def _remote_share(layout: PipelineLayout, state: ReconfigureState) -> float:
    """The share of neighbouring stages on different machines, if pipelines fill one machine after the other."""
    boundaries = sum(layout.depths) - len(layout.depths)
    if not boundaries or not state.machine_by_node:
        return 0.0
    machines = Counter(state.machine_by_node.get(node, node) for node in state.zone_by_node)
    return count_remote_neighbours(layout.depths, list(machines.values())) / boundaries


def count_remote_neighbours(depths: Sequence[int], workers_by_machine: Sequence[int]) -> int:
    """How many neighbouring stages are on different machines. Each pipeline, the deepest first, takes the machine whose
    workers it needs most exactly: the smallest that suffices for the rest of it, else the largest."""
    free, remote = sorted(workers_by_machine), 0
    for depth in sorted(depths, reverse=True):
        left = depth
        while left > 0 and free:
            index = bisect_left(free, left)
            workers = free.pop(min(index, len(free) - 1))
            if workers > left:
                insort(free, workers - left)
            left -= min(left, workers)
            remote += left > 0
    return remote


def _steps_until_next_loss(
    layout: PipelineLayout, kind: ReconfigureKind, costs: ReconfigureCosts, horizon_s: float
) -> float:
    """Steps until the next expected loss."""
    pause = {"stay": 0.0, "fill": costs.fill_s, "grow": costs.fill_s}.get(kind, costs.move_s)
    return max(0.0, horizon_s - pause) / costs.step_s_by_layout[layout]


def _explain_decision(
    best: PipelineLayout,
    candidates: Mapping[PipelineLayout, ReconfigureKind],
    steps_by_layout: Mapping[PipelineLayout, float],
    horizon_s: float,
) -> str:
    others = [layout for layout in candidates if layout != best]
    if not others:
        return f"{best}: no other layout is possible"
    second = max(others, key=lambda layout: steps_by_layout[layout])
    shape, other = (f"the present {each}" if candidates[each] == "stay" else str(each) for each in (best, second))
    return (
        f"{shape} trains {steps_by_layout[best]:.4g} steps in the {horizon_s:.4g} s until the next expected loss, "
        f"{other} {steps_by_layout[second]:.4g}"
    )


def _stages_with_one_holder(state: ReconfigureState) -> list[int]:
    """Stages with an empty slot and a single holder, if there are several pipelines of equal depth."""
    holders = Counter(slot.stage for slot, node in state.node_by_slot.items() if node in state.zone_by_node)
    return sorted({hole.stage for hole in state.empty_slots if state.common_depth and holders[hole.stage] == 1})


def decide_by_bamboo_rule(
    state: ReconfigureState, _costs: ReconfigureCosts, _now: float
) -> tuple[ReconfigureDecision, str]:
    """Bamboo's rule: rebalance if standby nodes can relieve all nodes that run two stages, if more than 5 % of the
    losses would be fatal, or if another pipeline fits; pipelines = nodes // P. It ignores costs and time."""
    P = state.common_depth or (state.depths[0] if state.depths else 0)
    if not P:
        raise PlanError("the rule bamboo needs existing pipelines: set ReconfigureState.depths")
    overloaded, standby, active = (
        len(state.empty_slots),
        len(state.standby_nodes),
        len(state.zone_by_node) - len(state.standby_nodes),
    )
    pipelines = min(len(state.zone_by_node) // P, state.max_pipelines or len(state.zone_by_node))
    reasons = {
        f"{standby} standby nodes relieve {overloaded} that run two stages": 0 < overloaded <= standby,
        f"{2 * overloaded} of {active} losses would be fatal": active and 2 * overloaded / active > 0.05,
        f"a further pipeline fits: {pipelines}": pipelines > len(state.depths),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if not why or not pipelines:
        return _make_decision(state, state.layout, "stay"), why or "no condition of the rule holds"
    layout = PipelineLayout((P,) * pipelines)
    kinds: dict[int, ReconfigureKind] = {-1: "shrink", 0: "fill", 1: "grow"}
    change = (pipelines > len(state.depths)) - (pipelines < len(state.depths))
    return _make_decision(state, layout, kinds[change]), why


def decide_fill_only(state: ReconfigureState, _costs: ReconfigureCosts, _now: float) -> tuple[ReconfigureDecision, str]:
    """Keep the layout, and only fill empty slots from standby nodes."""
    layouts = possible_layouts(state)
    filled = next((layout for layout, kind in layouts.items() if kind == "fill"), state.layout)
    return _make_decision(state, filled, layouts[filled]), "other shapes are not considered"


RECONFIGURE_POLICIES: Mapping[str, ReconfigurePolicy] = {
    "cost": decide_by_cost,
    "bamboo": decide_by_bamboo_rule,
    "never": decide_fill_only,
}
"""The policies by name."""


def find_reconfigure_policy(name: str) -> ReconfigurePolicy:
    """The policy called `name`. Raises PlanError with the nearest known name if there is none."""
    if name not in RECONFIGURE_POLICIES:
        close = difflib.get_close_matches(name, RECONFIGURE_POLICIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(RECONFIGURE_POLICIES)}"
        raise PlanError(f"there is no policy {name!r}: {hint}")
    return RECONFIGURE_POLICIES[name]


def _make_decision(state: ReconfigureState, layout: PipelineLayout, kind: ReconfigureKind) -> ReconfigureDecision:
    return ReconfigureDecision(
        kind, layout, _fill_slots(state, layout) if kind != "stay" else _unmoved_nodes(state, layout)
    )


def _unmoved_nodes(state: ReconfigureState, layout: PipelineLayout) -> dict[Slot, str]:
    """Nodes that stay: live nodes in slots that the layout still has, at the same depth."""
    return {
        slot: node
        for slot, node in state.node_by_slot.items()
        if node in state.zone_by_node
        and slot.pipeline < len(layout.depths)
        and slot.pipeline < len(state.depths)
        and layout.depths[slot.pipeline] == state.depths[slot.pipeline]
    }


def _fill_slots(state: ReconfigureState, layout: PipelineLayout) -> dict[Slot, str]:
    """Fill the slots with as few moved nodes as possible, and with the holders of a stage in many zones."""
    node_by_slot = _unmoved_nodes(state, layout)
    free = sorted(set(state.zone_by_node) - set(node_by_slot.values()))
    zones: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for slot, node in node_by_slot.items():
        zones[slot.stage][state.zone_by_node[node]] += 1
    empty = [
        Slot(d, s) for d, depth in enumerate(layout.depths) for s in range(depth) if Slot(d, s) not in node_by_slot
    ]
    # Stages with the fewest holders first: if nodes run out, slots stay empty where there are most holders.
    for slot in sorted(empty, key=lambda slot: (zones[slot.stage].total(), slot)):
        if free:
            node = min(free, key=lambda node: (zones[slot.stage][state.zone_by_node[node]], node))
            free.remove(node)
            node_by_slot[slot] = node
            zones[slot.stage][state.zone_by_node[node]] += 1
    return node_by_slot
