"""What is left of a step's speed when nodes are lost: goodput by strategy, in closed form.

A table of hundreds of choices can not be simulated. Rows that matter should be: `culm simulate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import PlanError
from culm.plan.bound import bound
from culm.plan.normalize import placed
from culm.schedule import Kind

if TYPE_CHECKING:
    from culm.plan.failures import Case

STRATEGIES = ("reroute", "shadow-lazy", "shadow", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Risk:
    """How nodes are lost, and what a loss costs in seconds. Raises PlanError for a number that makes no sense."""

    losses: float = 0.10
    """Of a node, per hour."""
    group: float = 2.1
    """Nodes that go together, on average: as in the published p3 trace."""
    replace_s: float = 1500.0
    """From the loss of a node until another has its place: then 46 of 48 are there on average when 10 % are lost an
    hour, as Bamboo's authors report."""
    detect_s: float = 3.0
    decide_s: float = 0.5
    join_s: float = 2.0
    """A drained step boundary at which a newcomer takes its slot."""
    restart_s: float = 30.0
    """Ending and starting all processes."""
    stall_s: float = 1.0
    """How long an asynchronous checkpoint holds training up."""
    storage: float = 1e9
    """Bytes per second from and to checkpoint storage."""
    shadow: float = 0.07
    """What keeping a shadow current costs, as a share of the step (Bamboo, lazy)."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not (math.isfinite(value) and value >= 0) or (f.name in ("group", "storage") and not value):
                raise PlanError(f"Risk.{f.name} is {value}: use a finite number above 0")

    def events(self, nodes: int) -> float:
        """Losses of groups, per second."""
        return nodes * self.losses / self.group / 3600

    def missing(self, nodes: int) -> float:
        """Nodes that are lost and not replaced yet, on average."""
        return min(float(nodes), nodes * self.losses / 3600 * self.replace_s)


class Held(NamedTuple):
    """A choice as far as losses are concerned."""

    strategy: str
    step_s: float
    """On average, with nodes missing now and then."""
    share: float
    """Of all time in which steps are made that count."""
    checkpoint_s: float
    """Between two checkpoints."""


def held(strategy: str, case: Case, healthy_s: float, *, nodes: int, state_bytes: float, risk: Risk) -> Held | None:
    """A strategy on the case without failures, whose step takes `healthy_s`; None where it can not be used."""
    made = {"reroute": _reroute, "shadow": _shadow, "shadow-lazy": _lazy, "checkpoint": _checkpoint}[strategy]
    return made(case, healthy_s, nodes, state_bytes, risk)


def _reroute(case: Case, healthy_s: float, nodes: int, state_bytes: float, risk: Risk) -> Held | None:
    if case.pipelines < 2:
        return None
    per_node = case.pipelines * case.stages / nodes
    step_s = healthy_s * _slower(case, risk.missing(nodes) * per_node)
    redo = risk.group * per_node * _stage_s(case) * len(case.blocks[0]) / 2 / (case.pipelines - 1)
    pause = risk.detect_s + risk.decide_s + redo + risk.join_s
    # All holders of a stage: one goes, and the others are missing already.
    fatal = risk.events(nodes) * min(1.0, case.stages * (risk.missing(nodes) / nodes) ** (case.pipelines - 1))
    return _with_checkpoints("reroute", step_s, pause, fatal, nodes, state_bytes, risk)


def _slower(case: Case, missing: float) -> float:
    """How much longer a step is with so many workers missing, by the bound, between whole numbers in proportion."""
    most = case.stages * (case.pipelines - 1)
    low = min(most, math.floor(missing))
    ends = [_length(case, n) for n in (0, low, min(most, low + 1))]
    return (ends[1] + (ends[2] - ends[1]) * (missing - low)) / ends[0] if ends[0] else 1.0


def _length(case: Case, failures: int) -> float:
    """The bound with so many failures, spread evenly, the stages with the least work first."""
    price = case.prices
    order = sorted(range(case.stages), key=lambda s: price[Kind.F][s] + price[Kind.I][s] + price[Kind.W][s])
    lost = [0] * case.stages
    for n in range(failures):
        lost[order[n % case.stages]] += 1
    return bound(placed(case, lost))


def _shadow(case: Case, healthy_s: float, nodes: int, state_bytes: float, risk: Risk) -> Held | None:
    """Eager: F of the successor's layers is run ahead, but only while its worker would wait."""
    return _shadowed("shadow", case, healthy_s, nodes, state_bytes, risk)


def _lazy(case: Case, healthy_s: float, nodes: int, state_bytes: float, risk: Risk) -> Held | None:
    return _shadowed("shadow-lazy", case, healthy_s, nodes, state_bytes, risk)


def _shadowed(name: str, case: Case, healthy_s: float, nodes: int, state_bytes: float, risk: Risk) -> Held | None:
    """Every worker keeps the layers of its successor current; while one is missing another carries two stages, or the
    batch goes to the pipelines that are whole."""
    if case.stages < 2:
        return None
    price, m = case.prices, len(case.blocks[0])
    kept_s = healthy_s * (1 + risk.shadow)
    missing = min(1.0, risk.missing(nodes))
    hurt_s = min(kept_s + m * _stage_s(case), _fewer(case, kept_s, nodes, risk))
    redo = (_stage_s(case) - (max(price[Kind.F]) if name == "shadow" else 0.0)) * m / 2
    pause = risk.detect_s + risk.decide_s + redo + risk.join_s
    # Two neighbours at once: of a group of g in one zone, as likely as g - 1 of the others to be next to it.
    fatal = risk.events(nodes) * min(1.0, max(risk.group - 1, risk.missing(nodes)) * 2 / max(1, nodes - 1))
    step_s = kept_s + missing * (hurt_s - kept_s)
    return _with_checkpoints(name, step_s, pause, fatal, nodes, state_bytes, risk)


def _fewer(case: Case, step_s: float, nodes: int, risk: Risk) -> float:
    """A step on as many whole pipelines as the nodes that are there can fill."""
    workers = case.pipelines * case.stages
    left = max(1, math.floor((workers - risk.missing(nodes) * workers / nodes) / case.stages + 1e-9))
    return step_s * bound(replace(case, pipelines=min(left, case.pipelines))) / bound(case)


def _checkpoint(case: Case, healthy_s: float, nodes: int, state_bytes: float, risk: Risk) -> Held | None:
    """Whole pipelines only, and back to the newest checkpoint at every loss."""
    step_s = _fewer(case, healthy_s, nodes, risk)
    return _with_checkpoints("checkpoint", step_s, 0.0, risk.events(nodes), nodes, state_bytes, risk)


def _with_checkpoints(
    name: str, step_s: float, pause_s: float, fatal: float, nodes: int, state_bytes: float, risk: Risk
) -> Held:
    """The best interval after Young: what checkpoints hold up against what a fatal loss throws away."""
    write_s = state_bytes / risk.storage
    best = math.sqrt(2 * risk.stall_s / fatal) if fatal else _SELDOM_S
    every = max(write_s, min(max(best, _OFTEN_S), _SELDOM_S))
    lost = fatal * (risk.detect_s + risk.restart_s + write_s + every / 2) + risk.stall_s / every
    return Held(name, step_s, max(0.0, 1 - risk.events(nodes) * pause_s - lost), every)


_OFTEN_S, _SELDOM_S = 60.0, 3600.0
"""Checkpoints are written no more often, and no less: they are for what nobody thought of, too."""


def _stage_s(case: Case) -> float:
    """A micro-batch in the slowest stage, there and back."""
    price = case.prices
    return max(price[Kind.F][s] + price[Kind.I][s] + price[Kind.W][s] for s in range(case.stages))
