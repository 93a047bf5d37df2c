"""Cutting the model: which layers make up each stage.

A cut is written as the layers that segments 1, 2, ... begin with: of 6 layers, (2, 4) makes [0, 1] [2, 3] [4, 5].
Times are compared in whole nanoseconds, so that equal layers are equal and the answer never hangs on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import TYPE_CHECKING, TypeAlias

from culm.errors import PlanError

if TYPE_CHECKING:
    from culm.plan.profile import LayerCost

Cuts: TypeAlias = tuple[int, ...]

InFlight: TypeAlias = Callable[[int, int], int]
"""(segment, segments) -> for how many micro-batches at once the segment keeps its activations."""

Price: TypeAlias = Callable[[int, int, int], float]
"""(i, j, g) -> the price of layers i to j-1 as segment g, infinite if forbidden; it never falls when j grows."""

Join: TypeAlias = Callable[[float, float], float]
"""Prices of a segment and of those behind it -> the price of all: `max` or `add`."""


def one_f_one_b(micro_batches: int | None = None) -> InFlight:
    """1F1B: segment g of S keeps min(S - g, M) micro-batches (M of one pipeline; None: however many there are)."""
    return lambda segment, segments: min(segments - segment, micro_batches or segments)


def partition(
    costs: Sequence[LayerCost],
    stages: int,
    *,
    memory: int | None = None,
    in_flight: InFlight | None = None,
    ranges: int = 1,
) -> Cuts:
    """Cut the layers into `stages` x `ranges` contiguous segments, the slowest of them as fast as possible.

    Among the fastest: the most even (least sum of squared times), then the earliest cuts. `memory` bounds, in bytes,
    what a stage holds: the resident bytes of its layers, and their activations for each micro-batch in flight
    (by default as under 1F1B). Optimal, with one exception: the segments of an interleaved stage share its memory,
    which a dynamic program can not separate. What is returned there fits, but a cut that barely fits may be missed.

    Raises PlanError when nothing fits; the message names the nearest that does.
    """
    keep = in_flight or one_f_one_b()
    check_counts(len(costs), stages, ranges)
    cuts = fit(costs, stages, memory=memory, in_flight=keep, ranges=ranges)
    if cuts is None:
        assert memory is not None, "without a limit every cut fits"
        raise PlanError(misfit(costs, stages, memory=memory, in_flight=keep, ranges=ranges))
    return cuts


def fit(
    costs: Sequence[LayerCost], stages: int, *, memory: int | None, in_flight: InFlight, ranges: int = 1
) -> Cuts | None:
    """As `partition`, but None when nothing fits, and the counts are taken to be right."""
    segments = stages * ranges
    sums = _Sums.of(costs, segments, in_flight)
    room = math.inf if memory is None else memory
    limits = [room] * segments
    while (cuts := _fastest(sums, limits)) is not None:
        need = sums.needs(cuts)
        crowded = next((s for s in range(stages) if sum(need[s::stages]) > room), None)
        if crowded is None:
            return cuts
        if not _share(limits, need, range(crowded, segments, stages), room, spans(cuts, len(costs))):
            return None
    return None


def spans(cuts: Cuts, layers: int) -> tuple[range, ...]:
    """The layers of each segment."""
    return tuple(range(i, j) for i, j in pairwise((0, *cuts, layers)))


def stage_memory(costs: Sequence[LayerCost], stages: int, cuts: Cuts, in_flight: InFlight) -> tuple[int, ...]:
    """Bytes that each stage needs, counted as if all of its segments were at their fullest at once."""
    need = _Sums.of(costs, len(cuts) + 1, in_flight).needs(cuts)
    return tuple(sum(need[s::stages]) for s in range(stages))


@dataclass(frozen=True)
class _Sums:
    """Running sums over the layers: the time and memory of any run of layers is one subtraction."""

    time: list[int]
    resident: list[int]
    activation: list[int]
    keep: list[int]
    """Micro-batches in flight, by segment."""

    @classmethod
    def of(cls, costs: Sequence[LayerCost], segments: int, in_flight: InFlight) -> _Sums:
        return cls(
            time=_running(round(cost.time_s * 1e9) for cost in costs),
            resident=_running(cost.resident_bytes for cost in costs),
            activation=_running(cost.activation_bytes for cost in costs),
            keep=[in_flight(g, segments) for g in range(segments)],
        )

    @property
    def layers(self) -> int:
        return len(self.time) - 1

    def need(self, i: int, j: int, g: int) -> int:
        """Bytes of layers i to j-1 as segment g."""
        return self.resident[j] - self.resident[i] + self.keep[g] * (self.activation[j] - self.activation[i])

    def needs(self, cuts: Cuts) -> list[int]:
        """Bytes of each segment."""
        return [self.need(span.start, span.stop, g) for g, span in enumerate(spans(cuts, self.layers))]


def _running(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _fastest(sums: _Sums, limits: Sequence[float]) -> Cuts | None:
    """The best cut in which segment g needs at most limits[g] bytes, or None.

    In two passes. One pass that minimised (slowest, squares) together would be wrong: ahead of a slow segment a
    prefix may be as slow as that one for free, and be more even for it.
    """

    def time(i: int, j: int, g: int) -> float:
        return sums.time[j] - sums.time[i] if sums.need(i, j, g) <= limits[g] else math.inf

    def square(i: int, j: int, g: int) -> float:
        spent = time(i, j, g)
        return spent * spent if spent <= slowest else math.inf

    slowest, _ = _cheapest(sums.layers, len(limits), time, max)
    return None if slowest == math.inf else _cheapest(sums.layers, len(limits), square, add)[1]


def _cheapest(layers: int, segments: int, price: Price, join: Join) -> tuple[float, Cuts]:
    """The cheapest cut, the earliest of equals, and its price (infinite: there is none).

    A dynamic program from the last segment back: ahead[i] is the best price for layers i.. behind segment g.
    """
    ahead: list[float] = [math.inf] * layers + [0]
    ends: list[list[int]] = []
    for g in reversed(range(segments)):
        last = layers - (segments - 1 - g)  # the segments behind need a layer each
        best, end = [math.inf] * (layers + 1), [layers] * (layers + 1)
        for i in range(g, last):
            for j in range(i + 1, last + 1):
                alone = price(i, j, g)
                if alone >= best[i]:
                    break  # and so is every longer one
                if (whole := join(alone, ahead[j])) < best[i]:
                    best[i], end[i] = whole, j
        ahead = best
        ends.append(end)
    return ahead[0], _follow(ends[:0:-1])


def _follow(ends: Iterable[Sequence[int]]) -> Cuts:
    return tuple(accumulate(ends, lambda i, end: end[i], initial=0))[1:]


def _share(limits: list[float], need: Sequence[int], stage: range, room: float, held: Sequence[range]) -> bool:
    """Divide the memory of a crowded stage among its segments: the fullest that can shrink gives up the excess."""
    able = [g for g in stage if len(held[g]) > 1]
    if not able:
        return False
    for g in stage:
        limits[g] = need[g]
    limits[max(able, key=need.__getitem__)] -= sum(need[g] for g in stage) - room
    return True


def check_counts(layers: int, stages: int, ranges: int) -> None:
    for name, value in (("stages", stages), ("ranges", ranges)):
        if value < 1:
            raise PlanError(f"{name} is {value}: use a whole number of at least 1")
    most = layers // ranges
    if stages <= most:
        return
    if most == 0:
        raise PlanError(
            f"ranges is {ranges}, but the model has only {count(layers, 'layer')}: use --schedule 1f1b, which needs one"
        )
    fill = count(most, "stage") + (f" of {ranges} ranges" if ranges > 1 else "")
    raise PlanError(f"stages is {stages}: {count(layers, 'layer')} can fill at most {fill}; use --stages {most}")


def misfit(costs: Sequence[LayerCost], stages: int, *, memory: int, in_flight: InFlight, ranges: int = 1) -> str:
    """Why that many stages do not fit, and the nearest that would, in a sentence."""
    every = range(1, len(costs) // ranges + 1)
    depths = fitting(costs, every, memory=memory, in_flight=in_flight, ranges=ranges)
    if not depths:
        return hopeless(costs, memory)
    begin = f"memory is {size(memory)}, too little for {count(stages, 'stage')}"
    if depths[0] > stages:
        return f"{begin}: at least {count(depths[0], 'stage')} are needed; use --stages {depths[0]}"
    return f"{begin}: use --stages {min(depths, key=lambda n: abs(n - stages))}"


def fitting(
    costs: Sequence[LayerCost], depths: range, *, memory: int, in_flight: InFlight, ranges: int = 1
) -> list[int]:
    """Those numbers of stages for which a cut fits."""
    return [n for n in depths if fit(costs, n, memory=memory, in_flight=in_flight, ranges=ranges) is not None]


def hopeless(costs: Sequence[LayerCost], memory: int) -> str:
    """Why no number of stages fits: a layer that is too large by itself, or else all of it."""
    relief = "use a larger device or a smaller micro-batch"
    for index, cost in enumerate(costs):
        if (alone := cost.resident_bytes + cost.activation_bytes) > memory:
            return f"layer {index} ({cost.name}) alone needs {size(alone)}, and memory is {size(memory)}: {relief}"
    return f"memory is {size(memory)}, too little for any number of stages: {relief}"


def count(number: int, noun: str) -> str:
    """3, "stage" -> "3 stages"."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def size(memory: float) -> str:
    """Bytes for people: 8.00 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if memory >= scale:
            return f"{memory / scale:.2f} {unit}"
    return f"{memory:.0f} bytes"
