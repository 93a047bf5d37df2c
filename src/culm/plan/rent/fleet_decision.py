"""How many spot and on-demand nodes a run should have now, so that it keeps its budget and its deadline. Pure.

`decide_fleet` is the one decision that real runs (`culm launch`) and the simulator (`culm simulate --deadline
--budget`) share. It is called again and again, at least every few minutes and after every change of the fleet.

The policy, in this order:

1. **Budget.** If ending the run now, with the last steps and a checkpoint, would reach the budget, it stops.
2. **Deadline.** The pace that is needed is the work that is left over the time that is left, without a reserve for
   starting machines. The pace to expect of spot nodes follows from how many of them were present lately, and for which
   share of the time. If it is below the needed pace, on-demand nodes are rented whenever fewer nodes than a *floor* are
   present: the lowest floor with which the expected pace suffices. So on-demand nodes work while spot nodes are missing
   and not beside them. They are given back when more nodes are present than a floor for a somewhat higher pace.
3. **Last moment.** If the time that is left is only just enough for a full fleet, all nodes that are missing are
   rented on demand, whatever the spot nodes were like lately. If it is not even enough for a full fleet without any
   loss, the deadline is missed whatever it costs, and the run goes on with spot nodes alone.
4. **Price.** On-demand nodes are rented only as far as the budget lasts to the end, and offers above the highest price
   are not used. Where an on-demand node costs no more than a spot node, it is preferred.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

_HOUR_S = 3600.0
START_RESERVE_S = 300.0
"""Time that renting and starting on-demand machines takes, kept in reserve before a deadline."""
PACE_RESERVE = 0.05
"""Share by which a run should be faster than needed: recoveries and checkpoints cost time."""
_EFFICIENCY_PRIOR_S = 600.0
"""Weight of the assumption that everything is useful, before enough is known."""
_LEAST_EFFICIENCY = 0.1
_SHARE_STEPS = 32
_NEGLIGIBLE = 1e-4
"""Shares of spot nodes are rounded to a 32nd, and forgotten when they made up less of the time than this."""
GIVE_BACK_MARGIN = 0.10
"""On-demand nodes are given back when the others would be faster than needed by this share."""


class FleetProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, as the leader publishes it under the key `progress` after a commit."""

    elapsed_s: float
    """Since the start of the run."""
    steps_done: int
    steps: int
    """The last step of the run, as a number of steps."""
    nodes: int
    """Nodes of the run's shape."""
    full_step_s: float | None
    """Seconds of a step with all nodes and without a disturbance; None: not known yet."""
    spot_shares: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """Shares of the wanted spot nodes that were present lately, each with its share of the time."""
    efficiency: float = 1.0
    """Share of the present nodes' time that became useful steps so far."""
    spot_nodes: int = 0
    """Spot nodes that are present now."""
    on_demand_nodes: int = 0
    """On-demand nodes that are present now."""
    cost_usd: float = 0.0
    """Spent so far."""
    cost_if_stopped_usd: float = 0.0
    """What the run would have cost if it stopped now: with the open steps, the checkpoint and shortest billed times."""

    @property
    def steps_left(self) -> int:
        return max(0, self.steps - self.steps_done)


class FleetLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has asked for; infinite: no limit."""

    budget_usd: float = math.inf
    deadline_s: float = math.inf
    """Since the start of the run."""
    max_price_usd_h: float = math.inf
    """The highest price of one node."""


@dataclass(frozen=True, kw_only=True)
class NodeOffers:
    """What one more node costs now, in dollars per hour; None: no such offer."""

    spot_usd_h: float | None
    on_demand_usd_h: float | None

    def within(self, max_price_usd_h: float) -> NodeOffers:
        """The offers that cost no more than a price."""
        return NodeOffers(
            spot_usd_h=_at_most(self.spot_usd_h, max_price_usd_h),
            on_demand_usd_h=_at_most(self.on_demand_usd_h, max_price_usd_h),
        )


class FleetDecision(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes the run should have from now on."""

    spot: int
    """Wanted spot nodes. The market may have fewer."""
    on_demand: int
    stop: bool = False
    """Whether the run is to stop, with a checkpoint."""
    why: str
    """The reason, as a sentence for users."""


def decide_fleet(progress: FleetProgress, limits: FleetLimits, offers: NodeOffers) -> FleetDecision:
    """How many spot and on-demand nodes to have from now on, and whether to stop. See the policy above."""
    nodes, allowed = progress.nodes, offers.within(limits.max_price_usd_h)
    if (why := budget_stop_reason(progress.cost_usd, progress.cost_if_stopped_usd, limits.budget_usd)) is not None:
        return FleetDecision(spot=0, on_demand=0, stop=True, why=why)
    spot, on_demand = allowed.spot_usd_h, allowed.on_demand_usd_h
    if spot is None and on_demand is None:
        why = f"no offer is at most {limits.max_price_usd_h:g} $/h: the run waits for lower prices"
        return FleetDecision(spot=0, on_demand=0, why=why)
    if on_demand is not None and (spot is None or on_demand <= spot):
        instead = "there is no spot offer" if spot is None else f"spot costs {spot:g} $/h"
        return FleetDecision(
            spot=0, on_demand=nodes, why=f"all nodes are rented on demand at {on_demand:g} $/h: {instead}"
        )
    assert spot is not None
    if on_demand is None or math.isinf(limits.deadline_s):
        return FleetDecision(spot=nodes, on_demand=0, why="spot nodes alone: " + _without_on_demand(offers, limits))
    if progress.full_step_s is None:
        return FleetDecision(spot=nodes, on_demand=0, why="spot nodes alone until the speed of the run is known")
    floor, wanted = _for_deadline(progress, limits)
    return _within_budget(progress, limits, floor, wanted, spot, on_demand)


def budget_stop_reason(cost_usd: float, cost_if_stopped_usd: float, budget_usd: float) -> str | None:
    """Why a run has to stop now to keep its budget, as a sentence; None: it can go on."""
    if cost_if_stopped_usd < budget_usd:
        return None
    return (
        f"the budget of ${budget_usd:,.2f} is reached: ${cost_usd:,.2f} are spent, and with the last steps and the "
        f"checkpoint it is ${cost_if_stopped_usd:,.2f}"
    )


def needed_pace(progress: FleetProgress, limits: FleetLimits, *, reserve_s: float = START_RESERVE_S) -> float:
    """The share of a full fleet's speed that the rest of the run needs to keep the deadline; infinite: it cannot."""
    left_s = limits.deadline_s - progress.elapsed_s - reserve_s
    work_s = _work_s(progress) * (1 + PACE_RESERVE)
    if not work_s:
        return 0.0
    return work_s / left_s if left_s > 0 else math.inf


def _work_s(progress: FleetProgress) -> float:
    """Seconds that all nodes need for the rest of the run, with recoveries as often as so far."""
    return progress.steps_left * (progress.full_step_s or 0.0) / max(progress.efficiency, _LEAST_EFFICIENCY)


def _for_deadline(progress: FleetProgress, limits: FleetLimits) -> tuple[int, FleetDecision]:
    """The floor that keeps the deadline, whatever it costs, and the fleet with it."""
    nodes, present, needed = progress.nodes, progress.spot_nodes, needed_pace(progress, limits)
    left_s = limits.deadline_s - progress.elapsed_s
    least_s = progress.steps_left * (progress.full_step_s or 0.0)
    left, work = _hours(left_s), _hours(_work_s(progress))
    if least_s > left_s:
        why = (
            f"the deadline cannot be kept any more: {_hours(least_s)} of work with all nodes and {left} are left; "
            "spot nodes alone"
        )
        return 0, FleetDecision(spot=nodes, on_demand=0, why=why)
    if needed >= 1.0:
        missing = max(0, nodes - present)
        why = f"{work} of work with all nodes are left and {left} until the deadline: "
        why += "every missing node is rented on demand"
        return nodes, FleetDecision(spot=nodes - missing, on_demand=missing, why=why)
    expected = expected_pace(progress.spot_shares, 0.0)
    floor, keep = (_floor(progress, pace) for pace in (needed, needed * (1 + GIVE_BACK_MARGIN)))
    on_demand = min(max(progress.on_demand_nodes, floor - present, 0), max(0, keep - present))
    paces = f"spot nodes are expected at {expected:.0%} of full speed, and {needed:.0%} keep the deadline"
    if not on_demand:
        why = paces if not floor else f"{paces}: with {present} of {nodes} nodes on spot now, none is needed on demand"
        return floor, FleetDecision(spot=nodes, on_demand=0, why=why)
    why = (
        f"spot nodes alone would miss the deadline: they are expected at {expected:.0%} of full speed, and "
        f"{needed:.0%} are needed ({work} of work with all nodes, {left} left); {present} of {nodes} are present, and "
        f"on-demand nodes make it {present + on_demand}"
    )
    return floor, FleetDecision(spot=nodes - on_demand, on_demand=on_demand, why=why)


def expected_pace(shares: Iterable[tuple[float, float]], floor: float) -> float:
    """The expected share of full speed, with on-demand nodes whenever a smaller share than `floor` is present.

    `shares`: shares of spot nodes that were present, each with its share of the time.
    """
    return math.fsum(weight * max(share, floor) for share, weight in shares)


def _floor(progress: FleetProgress, pace: float) -> int:
    """The lowest number of present nodes to keep up so that a pace is expected."""
    nodes = progress.nodes
    low, high = 0, nodes
    while low < high:
        middle = (low + high) // 2
        if expected_pace(progress.spot_shares, middle / nodes) >= pace:
            high = middle
        else:
            low = middle + 1
    return low


def _within_budget(
    progress: FleetProgress,
    limits: FleetLimits,
    floor: int,
    wanted: FleetDecision,
    spot_usd_h: float,
    on_demand_usd_h: float,
) -> FleetDecision:
    """The wanted fleet, or one with a lower floor if the budget does not last to the end with it."""
    left_usd = limits.budget_usd - progress.cost_if_stopped_usd
    if not wanted.on_demand or math.isinf(left_usd):
        return wanted
    nodes, shares = progress.nodes, progress.spot_shares
    work_h = _work_s(progress) * (1 + PACE_RESERVE) / _HOUR_S
    spot = nodes * expected_pace(shares, 0.0)

    def is_affordable(floor: int) -> bool:
        pace = expected_pace(shares, floor / nodes)
        usd_h = spot * spot_usd_h + (nodes * pace - spot) * on_demand_usd_h
        return bool(pace) and work_h / pace * usd_h <= left_usd

    affordable = next((each for each in range(floor, 0, -1) if is_affordable(each)), 0)
    if affordable == floor:
        return wanted
    on_demand = max(0, affordable - progress.spot_nodes)
    why = f"{wanted.why}; the ${left_usd:,.2f} that are left of the budget pay for {on_demand} of them"
    return FleetDecision(spot=nodes - on_demand, on_demand=on_demand, why=why)


def deadline_risk(progress: FleetProgress, limits: FleetLimits) -> str | None:
    """Why the run will miss its deadline at its recent pace, as a sentence; None: it will not, or nothing is known."""
    if progress.full_step_s is None or math.isinf(limits.deadline_s):
        return None
    present = min(1.0, (progress.spot_nodes + progress.on_demand_nodes) / progress.nodes)
    if not present:
        return None
    end_s = progress.elapsed_s + _work_s(progress) / present
    if end_s <= limits.deadline_s:
        return None
    return f"at the present pace the run takes {_hours(end_s)}, and the deadline is {_hours(limits.deadline_s)}"


def _without_on_demand(offers: NodeOffers, limits: FleetLimits) -> str:
    if math.isinf(limits.deadline_s):
        return "there is no deadline"
    if offers.on_demand_usd_h is None:
        return "there is no on-demand offer"
    return f"on demand costs {offers.on_demand_usd_h:g} $/h, more than the highest price {limits.max_price_usd_h:g} $/h"


def _at_most(price: float | None, limit: float) -> float | None:
    return price if price is not None and price <= limit else None


def _hours(seconds: float) -> str:
    if abs(seconds) < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 2 * _HOUR_S else f"{seconds / _HOUR_S:.1f} h"


class FleetHistory:
    """What the fleet of a run was like: how many spot nodes lately, and what the present nodes could have done."""

    def __init__(self, nodes: int, *, window_s: float = _HOUR_S) -> None:
        """`nodes`: of the run's shape. `window_s`: what is older counts less. At first all are expected."""
        self._nodes, self._window_s = nodes, window_s
        self._shares: dict[float, float] = {1.0: 1.0}
        """Share of the time, weighted by how recent it is, by share of the wanted spot nodes."""
        self._present_s = 0.0
        self._since: float | None = None
        self._spot = self._on_demand = 0

    def update(self, now: float, spot: int, on_demand: int) -> None:
        """This many nodes are present from now on."""
        self._shares, self._present_s = self._shares_at(now), self._present_seconds(now)
        self._since, self._spot, self._on_demand = now, spot, on_demand

    def spot_shares(self, now: float) -> tuple[tuple[float, float], ...]:
        """Shares of the wanted spot nodes that were present lately, each with its share of the time: exponentially
        weighted. While no spot nodes are wanted, nothing is learned."""
        return tuple(sorted(self._shares_at(now).items()))

    def _shares_at(self, now: float) -> dict[float, float]:
        wanted = self._nodes - self._on_demand
        if self._since is None or wanted <= 0 or now <= self._since:
            return self._shares
        keep = math.exp(-(now - self._since) / self._window_s)
        shares = {share: weight * keep for share, weight in self._shares.items() if weight * keep > _NEGLIGIBLE}
        present = round(min(1.0, self._spot / wanted) * _SHARE_STEPS) / _SHARE_STEPS
        shares[present] = shares.get(present, 0.0) + 1 - math.fsum(shares.values())
        return shares

    def efficiency(self, now: float, useful_s: float) -> float:
        """The share of the present nodes' time that became useful steps; the rest are starts, recoveries, repeated
        work and checkpoints. `useful_s`: steps done, in seconds of failure-free work with all nodes."""
        return min(1.0, (useful_s + _EFFICIENCY_PRIOR_S) / (self._present_seconds(now) + _EFFICIENCY_PRIOR_S))

    def _present_seconds(self, now: float) -> float:
        """Seconds that all nodes would have needed for what the present nodes could do."""
        if self._since is None:
            return self._present_s
        share = min(1.0, (self._spot + self._on_demand) / self._nodes)
        return self._present_s + share * max(0.0, now - self._since)

    @property
    def state(self) -> HistoryState:
        """The history up to the last change, for the next leader."""
        return tuple(self._shares.items()), self._present_s

    def restore(self, state: HistoryState) -> None:
        """Continue the history of the previous leader."""
        shares, self._present_s = state
        self._shares = dict(shares)


HistoryState: TypeAlias = tuple[tuple[tuple[float, float], ...], float]
"""Shares of spot nodes with their weights, and present seconds."""


def share_window_s(deadline_s: float) -> float:
    """How long the share of spot nodes is averaged: an hour, but not more than a tenth of the time until the
    deadline."""
    return min(_HOUR_S, max(1.0, deadline_s / 10))
