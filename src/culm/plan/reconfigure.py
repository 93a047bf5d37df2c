"""Whether to reconfigure now, and into what: a pure policy for the leader of a cluster and for the simulator alike.

    layouts    what could be made of the nodes that are there
    decide     of these what will have trained most when the next loss is due
    bamboo     the rule that Bamboo published, under that name

A loss leaves holes in slots, a grant leaves nodes standing by. Filling a hole, adding a pipeline or cutting the model
anew costs a pause, and gains until the next event puts everything into question again.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from culm.errors import PlanError
from culm.plan.failures import Slot
from culm.plan.partition import count

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind: TypeAlias = Literal["stay", "fill", "grow", "shrink", "depth", "uneven"]
MOVING: tuple[Kind, ...] = ("shrink", "depth", "uneven")
"""Kinds in which layers go to new holders."""


class Layout(NamedTuple):
    """Pipelines by their depths, and how many of their slots are empty."""

    depths: tuple[int, ...]
    holes: int = 0

    @property
    def nodes(self) -> int:
        return sum(self.depths) - self.holes

    def __str__(self) -> str:
        parts = [f"{many} x {depth}" for depth, many in sorted(Counter(self.depths).items(), reverse=True)]
        return " + ".join(parts) + (f" less {self.holes}" if self.holes else "")


@dataclass(frozen=True, kw_only=True)
class State:
    """What is there: plain values that a leader reads from its store and a simulator from its own."""

    alive: Mapping[str, str]
    """Every node that could take part, with its zone."""
    slots: Mapping[Slot, str]
    """The node in each slot that is filled."""
    depths: tuple[int, ...]
    """Of the pipelines as they are now; () before the start."""
    most: int = 0
    """Pipelines there may be at most; 0: as many as there are nodes for."""

    @property
    def holes(self) -> list[Slot]:
        every = (Slot(pipeline, stage) for pipeline, depth in enumerate(self.depths) for stage in range(depth))
        return [slot for slot in every if self.slots.get(slot) not in self.alive]

    @property
    def standby(self) -> list[str]:
        placed = set(self.slots.values())
        return [node for node in self.alive if node not in placed]

    @property
    def layout(self) -> Layout:
        return Layout(self.depths, len(self.holes))

    @property
    def even(self) -> int:
        """The depth of all pipelines; 0 if they differ."""
        return self.depths[0] if len(set(self.depths)) == 1 else 0


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What things cost, in seconds."""

    steps: Mapping[Layout, float]
    """How long a step takes in each layout; one that is missing is not considered."""
    next_event: float
    """When the next loss is due, on the clock of `now`."""
    fill_s: float = 0.0
    """A pause in which nodes that have their layers already take slots."""
    move_s: float = 0.0
    """A pause in which layers go to new holders: for another depth, or fewer pipelines."""


@dataclass(frozen=True)
class Decision:
    """What to do. `slots` is complete: the node of every slot that will be filled."""

    kind: Kind
    layout: Layout
    slots: Mapping[Slot, str] = field(default_factory=dict)

    @property
    def reshapes(self) -> bool:
        """Whether pipelines are made anew; holes are filled in any case, as soon as somebody stands by."""
        return self.kind not in ("stay", "fill")


Policy: TypeAlias = Callable[[State, Outlook, float], tuple[Decision, str]]


def layouts(state: State, depths: Iterable[int] = ()) -> dict[Layout, Kind]:
    """What could be made of the nodes: those that `Outlook.steps` should know, each with what it would be.

    As it is; holes filled from those standing by; further pipelines; whole pipelines only; each of `depths` instead
    of the depth there is; and all nodes in pipelines whose depths differ by one.
    """
    nodes, P = len(state.alive), state.even
    found: dict[Layout, Kind] = {}
    if state.depths:
        found[state.layout] = "stay"
        left = max(0, len(state.holes) - len(state.standby))
        found.setdefault(Layout(state.depths, left), "fill")
    if P:
        spare = len(state.standby) - len(state.holes)
        for more in range(1, spare // P + 1):
            _add(found, state, Layout((P,) * (len(state.depths) + more)), "grow")
        if state.holes:
            _add(found, state, Layout((P,) * (nodes // P)), "shrink")
    for depth in depths:
        _add(found, state, Layout((depth,) * (nodes // depth)), "depth")
        if nodes // depth:
            _add(found, state, Layout(_uneven(nodes, nodes // depth)), "uneven")
    return found


def _add(found: dict[Layout, Kind], state: State, layout: Layout, kind: Kind) -> None:
    if state.most and len(layout.depths) > state.most:
        layout = Layout(layout.depths[: state.most])
    if layout.depths:
        found.setdefault(layout, kind)


def _uneven(nodes: int, pipelines: int) -> tuple[int, ...]:
    return tuple(nodes // pipelines + (i < nodes % pipelines) for i in range(pipelines))


def decide(
    state: State,
    outlook: Outlook,
    now: float,
    *,
    depths: Iterable[int] = (),
    among: Mapping[Layout, Kind] | None = None,
    near: float = 0.0,
) -> tuple[Decision, str]:
    """The layout that will have trained most when the next loss is due; of equals that with less to move. `among` are
    those to choose from: by default what `layouts` lists. Where layers have to move anyway, layouts that are worth the
    same but for a share of `near` count as equal, and the one that leaves the fewest nodes idle is taken.

    Where a stage is down to one holder and a node stands by, a hole there is filled whatever it gains: the next loss
    could take the layers away. Raises PlanError when the model can not be held at all.
    """
    left_s = max(0.0, outlook.next_event - now)
    known = layouts(state, depths) if among is None else among
    offers = {layout: kind for layout, kind in known.items() if layout in outlook.steps}
    if not offers:
        raise PlanError(
            f"no layout of {count(len(state.alive), 'node')} has a step time: give Outlook.steps those that "
            "`layouts` lists"
        )
    worth = {layout: _trained(layout, kind, outlook, left_s) for layout, kind in offers.items()}
    filled, endangered = [layout for layout, kind in offers.items() if kind == "fill"], _endangered(state)
    if filled and endangered:
        return _decision(state, filled[0], "fill"), f"stage {endangered[0]} has one holder left: protection first"
    best = max(offers, key=lambda layout: worth[layout])  # the first of equals, and these are in order of effort
    if offers[best] in MOVING:
        equal = [each for each in offers if offers[each] in MOVING and worth[each] >= (1 - near) * worth[best]]
        best = max(equal, key=lambda layout: layout.nodes)
    return _decision(state, best, offers[best]), _why(best, offers, worth, left_s)


def _trained(layout: Layout, kind: Kind, outlook: Outlook, horizon_s: float) -> float:
    """Steps until the next event."""
    pause = {"stay": 0.0, "fill": outlook.fill_s, "grow": outlook.fill_s}.get(kind, outlook.move_s)
    return max(0.0, horizon_s - pause) / outlook.steps[layout]


def _why(best: Layout, offers: Mapping[Layout, Kind], worth: Mapping[Layout, float], horizon_s: float) -> str:
    others = [layout for layout in offers if layout != best]
    if not others:
        return f"{best}: nothing else is possible"
    second = max(others, key=lambda layout: worth[layout])
    return (
        f"{offers[best]} to {best}: {worth[best]:.4g} steps in the {horizon_s:.4g} s until the next loss is due, "
        f"against {worth[second]:.4g} with {second} ({offers[second]})"
    )


def _endangered(state: State) -> list[int]:
    """Stages with a hole and a single holder, where pipelines are alike and there are several."""
    holders = Counter(slot.stage for slot, node in state.slots.items() if node in state.alive)
    return sorted({hole.stage for hole in state.holes if state.even and holders[hole.stage] == 1})


def bamboo(state: State, _outlook: Outlook, _now: float) -> tuple[Decision, str]:
    """Bamboo's rule: rebalance if those standing by can relieve all that carry two stages, if more than 5 % of the
    losses would be fatal, or if a further pipeline fits; pipelines = nodes // P. It looks at no cost and no clock."""
    P = state.even or (state.depths[0] if state.depths else 0)
    if not P:
        raise PlanError("the rule bamboo needs pipelines to begin with: give State.depths")
    overloaded, standby, active = len(state.holes), len(state.standby), len(state.alive) - len(state.standby)
    pipelines = min(len(state.alive) // P, state.most or len(state.alive))
    reasons = {
        f"{standby} standing by relieve {overloaded} that carry two stages": 0 < overloaded <= standby,
        f"{2 * overloaded} of {active} losses would be fatal": active and 2 * overloaded / active > 0.05,
        f"a further pipeline fits: {pipelines}": pipelines > len(state.depths),
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if not why or not pipelines:
        return _decision(state, state.layout, "stay"), why or "nothing that the rule looks at"
    layout = Layout((P,) * pipelines)
    kinds: dict[int, Kind] = {-1: "shrink", 0: "fill", 1: "grow"}
    change = (pipelines > len(state.depths)) - (pipelines < len(state.depths))
    return _decision(state, layout, kinds[change]), why


def never(state: State, _outlook: Outlook, _now: float) -> tuple[Decision, str]:
    """Leave everything as it is, but for holes that somebody standing by can fill."""
    offers = layouts(state)
    filled = next((layout for layout, kind in offers.items() if kind == "fill"), state.layout)
    return _decision(state, filled, offers[filled]), "other shapes are not looked at"


POLICIES: Mapping[str, Policy] = {"cost": decide, "bamboo": bamboo, "never": never}
"""By name."""


def policy(name: str) -> Policy:
    """The policy of that name. Raises PlanError, with the nearest, when there is none."""
    if name not in POLICIES:
        close = difflib.get_close_matches(name, POLICIES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(POLICIES)}"
        raise PlanError(f"there is no policy {name!r}: {hint}")
    return POLICIES[name]


def _decision(state: State, layout: Layout, kind: Kind) -> Decision:
    return Decision(kind, layout, _placed(state, layout) if kind != "stay" else _kept(state, layout))


def _kept(state: State, layout: Layout) -> dict[Slot, str]:
    """Who stays where it is: live nodes in slots that the layout still has, at the same depth."""
    return {
        slot: node
        for slot, node in state.slots.items()
        if node in state.alive
        and slot.pipeline < len(layout.depths)
        and slot.pipeline < len(state.depths)
        and layout.depths[slot.pipeline] == state.depths[slot.pipeline]
    }


def _placed(state: State, layout: Layout) -> dict[Slot, str]:
    """Slots filled with as few nodes moved as can be, and with the holders of a stage in as many zones as can be."""
    placed = _kept(state, layout)
    free = sorted(set(state.alive) - set(placed.values()))
    zones: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for slot, node in placed.items():
        zones[slot.stage][state.alive[node]] += 1
    empty = [Slot(d, s) for d, depth in enumerate(layout.depths) for s in range(depth) if Slot(d, s) not in placed]
    # The stages with the fewest holders first: should nodes run out, the holes are where there are most.
    for slot in sorted(empty, key=lambda slot: (zones[slot.stage].total(), slot)):
        if free:
            node = min(free, key=lambda node: (zones[slot.stage][state.alive[node]], node))
            free.remove(node)
            placed[slot] = node
            zones[slot.stage][state.alive[node]] += 1
    return placed
