"""`auto`: which strategy a run should have, by what each would leave of its speed. Pure.

Peers hold every layer where there are several pipelines, and nothing has to be done ahead. With one pipeline a layer
would have one holder alone: shadows give it a second. Under both lies a checkpoint, for the day when all holders of a
layer go at once; how often one is worth its while follows from how often nodes are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.plan.goodput import Held, Risk, held

if TYPE_CHECKING:
    from culm.plan.failures import Case

_ORDER = {"reroute": "reroute", "shadow": "shadow-lazy", "checkpoint": "checkpoint"}
"""What is compared, and as what it is priced: culm's shadows run ahead only in bubbles that are long enough, so they
cost what lazy ones do. Of equals the first is taken: it has the least to do ahead."""
_NEAR = 0.02
"""Estimates that differ by less than this share count as equal."""
_REASONS = {
    "reroute": "peers hold every layer, and nothing has to be done ahead",
    "shadow": "with one pipeline nobody else would hold a lost node's layers",
    "checkpoint": "it costs least where so few nodes are lost",
}


@dataclass(frozen=True)
class Chosen:
    """A strategy for a run, and why."""

    strategy: str
    why: str
    checkpoint_s: float | None = None
    """The best time between two checkpoints; None: there is no place for them."""


def choose_strategy(case: Case, step_s: float, *, state_bytes: float, risk: Risk, saves: bool) -> Chosen:
    """The strategy that leaves most of the speed of an undisturbed run, whose step takes `step_s`.

    `saves` says whether checkpoints have a place to go to; without one a checkpoint is no choice. On a single node
    nothing can be done.
    """
    nodes = case.pipelines * case.stages
    if nodes == 1:
        return Chosen("none", "strategy none: on one node there is nobody to go on")
    usable = [name for name in _ORDER if saves or name != "checkpoint"]
    priced = {
        name: held(_ORDER[name], case, step_s, nodes=nodes, state_bytes=state_bytes, risk=risk) for name in usable
    }
    found = {name: cost for name, cost in priced.items() if cost is not None}
    worth = {name: _worth(cost, step_s) for name, cost in found.items()}
    best = next(name for name in found if worth[name] >= (1 - _NEAR) * max(worth.values()))
    others = ", ".join(f"{name} {share:.0%}" for name, share in worth.items() if name != best)
    compared = f"{worth[best]:.0%} of an undisturbed run by estimate at {risk.losses:.0%} of the nodes lost an hour"
    why = f"strategy {best}: {_REASONS[best]}; {compared}{f' ({others})' if others else ''}"
    if best == "shadow" and "reroute" in found:
        why = why.replace(_REASONS[best], "copies cost less here than peers that are missing")
    return Chosen(best, why, found[best].checkpoint_s if saves else None)


def interval(case: Case, step_s: float, *, state_bytes: float, risk: Risk) -> float:
    """Seconds between two checkpoints that cost least where every loss goes back to one."""
    nodes = case.pipelines * case.stages
    found = held("checkpoint", case, step_s, nodes=nodes, state_bytes=state_bytes, risk=risk)
    assert found is not None, "a checkpoint can be written for any shape"
    return found.checkpoint_s


def _worth(cost: Held, step_s: float) -> float:
    """The share of an undisturbed run's speed that is left."""
    return cost.share * step_s / cost.step_s if cost.step_s else cost.share
