"""What could be rented: shapes, micro-batches and strategies under a memory and a budget, best first, with why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import PlanError
from culm.plan.alike import solo
from culm.plan.bound import bound
from culm.plan.failures import Case
from culm.plan.goodput import STRATEGIES, Held, Risk, held
from culm.plan.greedy import greedy
from culm.plan.instances import DEVICES, USABLE
from culm.plan.partition import Cuts, count, fit, one_f_one_b, size, spans
from culm.schedule import Costs

if TYPE_CHECKING:
    from culm.plan.failures import Memory
    from culm.plan.profile import LayerCost, Profile

ROWS = 12
"""So many shapes are planned; the others are left at what their bound says, and out of the table."""

DEEP = 4_000
"""Pipelines with more forwards than that are taken at their bound, which is near for them."""

NEAR = 0.02
"""Of goodputs this close, as a share, the one that costs less is better."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A machine to rent: plain values, so that the prices can come from anywhere."""

    instance: str
    memory: int
    """Bytes of a worker that training can use."""
    bandwidth: float
    """Bytes per second of a worker to others."""
    usd_h: float
    """Of one node."""
    workers: int = 1
    """Of a node: one for each accelerator."""
    zones: int = 1


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for. Raises PlanError, one sentence, for what makes no sense."""

    profiles: Mapping[int, Profile]
    """By micro-batch: the choice of it is part of the answer."""
    batch: int
    """Samples of a step."""
    nodes: tuple[int, int]
    """At least, at most."""
    budget: float = math.inf
    """Dollars per hour."""
    pipelines: int | None = None
    stages: int | None = None
    risk: Risk = field(default_factory=Risk)

    def __post_init__(self) -> None:
        low, high = self.nodes
        if not 1 <= low <= high:
            raise PlanError(f"nodes is {low}..{high}: use whole numbers of at least 1, the smaller one first")
        if not self.budget > 0:
            raise PlanError(f"budget is {self.budget}/h: use a number of dollars above 0")
        for name, value in (("batch", self.batch), ("pipelines", self.pipelines), ("stages", self.stages)):
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}: use a whole number of at least 1")


@dataclass(frozen=True)
class Row:
    """A choice, with what to expect of it."""

    case: Case
    cuts: Cuts
    micro_batch: int
    nodes: int
    strategy: str
    checkpoint_s: float
    zones: int
    healthy_s: float
    """A step with every slot filled."""
    goodput: float
    """Samples per second, losses included."""
    usd_h: float
    """With every node there."""
    present: float
    """Share of the nodes that are there on average: nobody pays for the others."""
    memory: int
    """Bytes in the fullest stage."""

    @property
    def usd_per_million(self) -> float:
        """Dollars for a million samples."""
        return self.usd_h * self.present / 3600 / self.goodput * 1e6 if self.goodput else math.inf

    @property
    def shape(self) -> str:
        return f"{self.case.pipelines} x {self.case.stages}"


class Offers(NamedTuple):
    """The choices, best first, and why."""

    table: tuple[Row, ...]
    why: str


def offers(wish: Wish, offer: Offer) -> Offers:
    """Every shape that fits the memory, the nodes and the budget, with the strategy that leaves the most goodput.

    The highest goodput is best; among those within 2 % of it, the cheapest. Raises PlanError when nothing fits, with
    the nearest that would.
    """
    found = [drafted for drafted in _drafts(wish, offer) if drafted.cost(offer) <= wish.budget]
    if not found:
        raise PlanError(_nothing(wish, offer))
    rows = [row for drafted in _promising(found, wish) if (row := _row(drafted, wish, offer)) is not None]
    ranked = _ranked(rows)
    return Offers(ranked, _why(ranked, wish, offer))


@dataclass(frozen=True)
class _Draft:
    """A shape that fits, not planned yet."""

    case: Case
    cuts: Cuts
    micro_batch: int
    memory: int
    stacked: int
    """Bytes of the fullest stage if it held its successor's layers too."""
    nodes: int

    def cost(self, offer: Offer) -> float:
        return self.nodes * offer.usd_h


def _drafts(wish: Wish, offer: Offer) -> Iterator[_Draft]:
    low, high = wish.nodes[0] * offer.workers, wish.nodes[1] * offer.workers
    for micro_batch, profile in wish.profiles.items():
        M = wish.batch // micro_batch
        for P in _depths(wish, len(profile.layers), high):
            cut = cache(lambda m, P=P, layers=profile.layers: _cut(layers, P, m, offer.memory))
            for D in _widths(wish, P, low, high, M):
                cuts = cut(min(P, -(-M // D)))
                if cuts is not None:
                    yield _draft(profile.layers, cuts, micro_batch, D, M, offer)


def _depths(wish: Wish, layers: int, workers: int) -> list[int]:
    """The depths worth trying: a deeper pipeline must make the longest stage shorter."""
    if wish.stages:
        return [wish.stages] if wish.stages <= min(layers, workers) else []
    return [P for P in range(1, min(layers, workers) + 1) if P == 1 or -(-layers // P) < -(-layers // (P - 1))]


def _widths(wish: Wish, stages: int, low: int, high: int, micro_batches: int) -> range:
    if wish.pipelines:
        fits = wish.pipelines * stages <= high and wish.pipelines <= micro_batches
        return range(wish.pipelines, wish.pipelines + 1) if fits else range(0)
    return range(max(1, -(-low // stages)), min(high // stages, micro_batches) + 1)


def _cut(layers: tuple[LayerCost, ...], stages: int, micro: int, memory: int) -> Cuts | None:
    return fit(layers, stages, memory=memory, in_flight=one_f_one_b(micro))


def _draft(layers: tuple[LayerCost, ...], cuts: Cuts, micro_batch: int, D: int, M: int, offer: Offer) -> _Draft:
    segments = [layers[span.start : span.stop] for span in spans(cuts, len(layers))]
    P, m = len(segments), -(-M // D)
    resident = [sum(layer.resident_bytes for layer in segment) for segment in segments]
    activation = [sum(layer.activation_bytes for layer in segment) for segment in segments]
    need = [r + a * min(P - s, m) for s, (r, a) in enumerate(zip(resident, activation, strict=True))]
    case = Case(
        pipelines=D,
        stages=P,
        micro_batches=M,
        costs=costs_of(segments, D, offer.bandwidth),
        memory=_cap(resident, activation, offer.memory, P, m),
    )
    stacked = max(n + resident[(s + 1) % P] for s, n in enumerate(need))
    return _Draft(case, cuts, micro_batch, max(need), stacked, -(-D * P // offer.workers))


def costs_of(segments: list[tuple[LayerCost, ...]], pipelines: int, bandwidth: float) -> Costs:
    """What stages cost. R is a ring over the pipelines: everyone sends 2 (D - 1) / D of the gradient."""
    ring = 2 * (pipelines - 1) / pipelines / bandwidth
    return Costs(
        forward=tuple(sum(c.forward_s for c in segment) for segment in segments),
        input=tuple(sum(c.input_s for c in segment) for segment in segments),
        weight=tuple(sum(c.weight_s for c in segment) for segment in segments),
        reduce=tuple(ring * sum(c.parameter_bytes for c in segment) for segment in segments),
        step=tuple(sum(c.step_s for c in segment) for segment in segments),
        send=tuple(segment[-1].output_bytes / bandwidth for segment in segments[:-1]),
    )


def _cap(resident: list[int], activation: list[int], memory: int, stages: int, micro: int) -> Memory:
    """Activations that every stage has room for; where 1F1B needs more in the first stages, as many as that."""
    room = min((memory - r) // a if a else micro for r, a in zip(resident, activation, strict=True))
    if room >= micro:
        return None
    return room if room >= stages else "1f1b"


def _promising(found: list[_Draft], wish: Wish) -> list[_Draft]:
    """Those whose bound says that they are fastest; and of the others the fastest for their money.

    Of a shape with several micro-batches only the fastest.
    """
    speed = {id(draft): wish.batch / bound(draft.case) for draft in found}
    shapes: dict[tuple[int, int], _Draft] = {}
    for draft in sorted(found, key=lambda draft: (-speed[id(draft)], draft.nodes)):
        shapes.setdefault((draft.case.pipelines, draft.case.stages), draft)
    fast = list(shapes.values())[: ROWS - ROWS // 3]
    others = sorted(list(shapes.values())[len(fast) :], key=lambda draft: -speed[id(draft)] / draft.nodes)
    return fast + others[: ROWS // 3]


def _row(draft: _Draft, wish: Wish, offer: Offer) -> Row | None:
    healthy_s = _healthy_s(draft.case)
    best = _strategy(draft, healthy_s, wish, offer)
    if best is None:
        return None
    return Row(
        case=draft.case,
        cuts=draft.cuts,
        micro_batch=draft.micro_batch,
        nodes=draft.nodes,
        strategy=best.strategy,
        checkpoint_s=best.checkpoint_s,
        zones=min(offer.zones, _zones(best.strategy, draft.case)),
        healthy_s=healthy_s,
        goodput=wish.batch / best.step_s * best.share,
        usd_h=draft.cost(offer),
        present=1 - wish.risk.missing(draft.nodes) / draft.nodes,
        memory=draft.memory if "shadow" not in best.strategy else draft.stacked,
    )


def _zones(strategy: str, case: Case) -> int:
    """Over how many zones the holders of a stage should be spread: all peers, or owner and shadow."""
    return case.pipelines if strategy == "reroute" else 2 if "shadow" in strategy else 1


def _healthy_s(case: Case) -> float:
    """A step with every slot filled: planned, or of a very deep pipeline its bound."""
    one = solo(case)
    return greedy(one).slots if one.stages * one.micro_batches <= DEEP else bound(one)


def _strategy(draft: _Draft, healthy_s: float, wish: Wish, offer: Offer) -> Held | None:
    """That with the most goodput; shadows only where there is memory for them."""
    state = 12 / 16 * sum(layer.resident_bytes for layer in wish.profiles[draft.micro_batch].layers)
    usable = [name for name in STRATEGIES if "shadow" not in name or draft.stacked <= offer.memory]
    tried = [held(name, draft.case, healthy_s, nodes=draft.nodes, state_bytes=state, risk=wish.risk) for name in usable]
    return max(filter(None, tried), key=lambda way: way.share / way.step_s, default=None)


def _ranked(rows: list[Row]) -> tuple[Row, ...]:
    """The winner, then the others by goodput."""
    fastest = max(row.goodput for row in rows)
    winner = min((row for row in rows if row.goodput >= (1 - NEAR) * fastest), key=lambda row: row.usd_per_million)
    others = sorted((row for row in rows if row is not winner), key=lambda row: (-row.goodput, row.usd_h))
    return (winner, *others)


def _why(ranked: tuple[Row, ...], wish: Wish, offer: Offer) -> str:
    best = ranked[0]
    told = (
        f"{best.shape} on {count(best.nodes, 'node')} of {offer.instance}: {best.goodput:.4g} samples/s for "
        f"{best.usd_h:.2f} $/h, losses of {wish.risk.losses:.0%} an hour included, with {best.strategy}"
    )
    if len(ranked) > 1:
        second = ranked[1]
        told += (
            f"; next is {second.shape} on {second.nodes} with micro-batches of {second.micro_batch}: "
            f"{second.goodput:.4g} for {second.usd_h:.2f}"
        )
    thrifty = min(ranked, key=lambda row: row.usd_per_million)
    if thrifty is not best:
        told += (
            f"; least per sample: {thrifty.shape} on {thrifty.nodes}, {thrifty.usd_per_million:.2f} $ a million "
            f"against {best.usd_per_million:.2f}"
        )
    return told


def _nothing(wish: Wish, offer: Offer) -> str:
    """Why nothing is left: the budget, the nodes, or the memory; and the nearest that would do."""
    affordable = list(_drafts(wish, offer))
    if affordable:
        least = min(draft.cost(offer) for draft in affordable)
        return (
            f"budget is {wish.budget:g}/h, but the cheapest shape that fits takes {least:.2f} $/h "
            f"({count(min(draft.nodes for draft in affordable), 'node')} of {offer.instance}): use --budget "
            f"{math.ceil(least)}/h"
        )
    more = replace(wish, nodes=(1, max(4096, wish.nodes[1])), budget=math.inf)
    nearest = min(_drafts(more, offer), key=lambda draft: abs(draft.nodes - wish.nodes[1]), default=None)
    if nearest is not None:
        needs = f"the nearest that fits is {nearest.case.pipelines} x {nearest.case.stages}"
        return f"nothing fits on {wish.nodes[0]}..{wish.nodes[1]} nodes: {needs}; use --nodes {nearest.nodes}"
    smallest = wish.profiles[min(wish.profiles)]
    return _misfit(smallest, wish, offer)


def _misfit(profile: Profile, wish: Wish, offer: Offer) -> str:
    """Why no number of nodes would help."""
    layers, M = len(profile.layers), wish.batch // profile.micro_batch
    if wish.stages and wish.stages > layers:
        return f"stages is {wish.stages}: {count(layers, 'layer')} fill at most as many; use --stages {layers}"
    if wish.pipelines and wish.pipelines > M:
        only = f"a step has only {count(M, 'micro-batch')}"
        return f"pipelines is {wish.pipelines}, but {only}: use --pipelines {M}, or a larger batch"
    fullest = max(profile.layers, key=lambda layer: layer.resident_bytes + layer.activation_bytes)
    needed = fullest.resident_bytes + fullest.activation_bytes
    room = f"the model does not fit on {offer.instance}: {size(offer.memory)} of a worker can be used, and"
    if needed <= offer.memory:
        depth = f"a pipeline of {count(wish.stages, 'stage')}" if wish.stages else "every depth"
        return f"{room} {depth} needs more for activations in flight: use another depth, or a device with more"
    larger = [device for device in DEVICES.values() if device.memory * USABLE >= needed]
    use = f"use a device with more, as {min(larger, key=lambda d: d.memory).name}" if larger else "no device has more"
    return f"{room} layer {profile.layers.index(fullest)} ({fullest.name}) alone needs {size(needed)}; {use}"
