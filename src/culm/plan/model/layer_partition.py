"""Layer partition: which layers make up each stage.

Cuts are the first layers of segments 1, 2, ...: for 6 layers, (2, 4) gives [0, 1] [2, 3] [4, 5].
Times are compared in whole nanoseconds, so that equal layers are equal and the result does not depend on rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add
from typing import TYPE_CHECKING, TypeAlias

from culm.errors import PlanError
from culm.text_format import count_noun, format_bytes

if TYPE_CHECKING:
    from culm.plan.model.model_profile import LayerCost

Cuts: TypeAlias = tuple[int, ...]

InFlight: TypeAlias = Callable[[int, int], int]
"""(segment, segments) -> the number of micro-batches for which the segment keeps activations at the same time."""

SegmentPrice: TypeAlias = Callable[[int, int, int], float]
"""(i, j, g) -> the price of layers i to j-1 as segment g, infinite if not allowed; must not decrease as j grows."""

CombinePrices: TypeAlias = Callable[[float, float], float]
"""Price of a segment and of all later ones -> total price: `max` or `add`."""


def in_flight_1f1b(micro_batches: int | None = None) -> InFlight:
    """1F1B: segment g of S keeps min(S - g, M) micro-batches (M per pipeline; None: no limit)."""
    return lambda segment, segments: min(segments - segment, micro_batches or segments)


def partition_layers(
    costs: Sequence[LayerCost],
    stages: int,
    *,
    memory: int | None = None,
    in_flight: InFlight | None = None,
    ranges: int = 1,
) -> Cuts:
    """Cut the layers into `stages` x `ranges` contiguous segments so that the slowest segment is as fast as possible.

    Ties: the most even cut (least sum of squared times), then the earliest cuts. `memory` limits the bytes of a stage:
    the resident bytes of its layers plus their activations for each micro-batch in flight (by default as in 1F1B).
    The result is optimal, with one exception: the segments of an interleaved stage share its memory, which a dynamic
    program cannot separate. The cuts returned there fit, but cuts that barely fit may be missed.

    Raises PlanError if nothing fits; the message names the nearest setting that does.
    """
    keep = in_flight or in_flight_1f1b()
    check_stage_counts(len(costs), stages, ranges)
    cuts = find_cuts(costs, stages, memory=memory, in_flight=keep, ranges=ranges)
    if cuts is None:
        assert memory is not None, "without a limit every cut fits"
        raise PlanError(explain_misfit(costs, stages, memory=memory, in_flight=keep, ranges=ranges))
    return cuts


def find_cuts(
    costs: Sequence[LayerCost], stages: int, *, memory: int | None, in_flight: InFlight, ranges: int = 1
) -> Cuts | None:
    """Like `partition_layers`, but returns None if nothing fits, and does not check the counts."""
    segments = stages * ranges
    sums = _PrefixSums.from_costs(costs, segments, in_flight)
    capacity = math.inf if memory is None else memory
    limits = [capacity] * segments
    while (cuts := _fastest_cuts(sums, limits)) is not None:
        need = sums.memory_by_segment(cuts)
        crowded = next((s for s in range(stages) if sum(need[s::stages]) > capacity), None)
        if crowded is None:
            return cuts
        if not _shrink_limits(
            limits, need, range(crowded, segments, stages), capacity, segment_layer_ranges(cuts, len(costs))
        ):
            return None
    return None


def segment_layer_ranges(cuts: Cuts, layers: int) -> tuple[range, ...]:
    """The layers of each segment."""
    return tuple(range(i, j) for i, j in pairwise((0, *cuts, layers)))


def stage_memory_bytes(costs: Sequence[LayerCost], stages: int, cuts: Cuts, in_flight: InFlight) -> tuple[int, ...]:
    """Bytes that each stage needs, assuming that all of its segments are at their peak at the same time."""
    need = _PrefixSums.from_costs(costs, len(cuts) + 1, in_flight).memory_by_segment(cuts)
    return tuple(sum(need[s::stages]) for s in range(stages))


@dataclass(frozen=True)
class _PrefixSums:
    """Prefix sums over the layers: time and memory of any run of layers is one subtraction."""

    time: list[int]
    resident: list[int]
    activation: list[int]
    in_flight: list[int]
    """Micro-batches in flight, by segment."""

    @classmethod
    def from_costs(cls, costs: Sequence[LayerCost], segments: int, in_flight: InFlight) -> _PrefixSums:
        return cls(
            time=_prefix_sums(round(cost.time_s * 1e9) for cost in costs),
            resident=_prefix_sums(cost.resident_bytes for cost in costs),
            activation=_prefix_sums(cost.activation_bytes for cost in costs),
            in_flight=[in_flight(g, segments) for g in range(segments)],
        )

    @property
    def layers(self) -> int:
        return len(self.time) - 1

    def memory_of(self, i: int, j: int, g: int) -> int:
        """Bytes of layers i to j-1 as segment g."""
        return self.resident[j] - self.resident[i] + self.in_flight[g] * (self.activation[j] - self.activation[i])

    def memory_by_segment(self, cuts: Cuts) -> list[int]:
        """Bytes of each segment."""
        return [
            self.memory_of(span.start, span.stop, g) for g, span in enumerate(segment_layer_ranges(cuts, self.layers))
        ]


def _prefix_sums(values: Iterable[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _fastest_cuts(sums: _PrefixSums, limits: Sequence[float]) -> Cuts | None:
    """The best cuts in which segment g needs at most limits[g] bytes, or None.

    Two passes: first the slowest segment, then the squares. A single pass over (slowest, squares) would be wrong: a
    prefix that is more even but slower than the best prefix costs nothing if a later segment is as slow.
    """

    def time(i: int, j: int, g: int) -> float:
        return sums.time[j] - sums.time[i] if sums.memory_of(i, j, g) <= limits[g] else math.inf

    def square(i: int, j: int, g: int) -> float:
        spent = time(i, j, g)
        return spent * spent if spent <= slowest else math.inf

    slowest, _ = _cheapest_cuts(sums.layers, len(limits), time, max)
    return None if slowest == math.inf else _cheapest_cuts(sums.layers, len(limits), square, add)[1]


def _cheapest_cuts(layers: int, segments: int, price: SegmentPrice, join: CombinePrices) -> tuple[float, Cuts]:
    """The price of the cheapest cuts (infinite if there are none) and the cuts, the earliest of equals.

    Dynamic program from the last segment backwards: ahead[i] is the best price for layers i.. after segment g.
    """
    ahead: list[float] = [math.inf] * layers + [0]
    ends: list[list[int]] = []
    for g in reversed(range(segments)):
        last = layers - (segments - 1 - g)  # each later segment needs a layer
        best, end = [math.inf] * (layers + 1), [layers] * (layers + 1)
        for i in range(g, last):
            for j in range(i + 1, last + 1):
                alone = price(i, j, g)
                if alone >= best[i]:
                    break  # every longer segment costs at least as much
                if (whole := join(alone, ahead[j])) < best[i]:
                    best[i], end[i] = whole, j
        ahead = best
        ends.append(end)
    return ahead[0], _cuts_from_ends(ends[:0:-1])


def _cuts_from_ends(ends: Iterable[Sequence[int]]) -> Cuts:
    return tuple(accumulate(ends, lambda i, end: end[i], initial=0))[1:]


def _shrink_limits(
    limits: list[float], need: Sequence[int], stage: range, capacity: float, layers_of: Sequence[range]
) -> bool:
    """Divide the memory of an overfull stage among its segments: the largest that can shrink gives up the excess.

    Returns False if no segment can shrink.
    """
    able = [g for g in stage if len(layers_of[g]) > 1]
    if not able:
        return False
    for g in stage:
        limits[g] = need[g]
    limits[max(able, key=need.__getitem__)] -= sum(need[g] for g in stage) - capacity
    return True


def check_stage_counts(layers: int, stages: int, ranges: int) -> None:
    for name, value in (("stages", stages), ("ranges", ranges)):
        if value < 1:
            raise PlanError(f"{name} is {value}: use a whole number of at least 1")
    most = layers // ranges
    if stages <= most:
        return
    if most == 0:
        raise PlanError(
            f"ranges is {ranges}, but the model has only {count_noun(layers, 'layer')}: "
            "use --schedule 1f1b, which needs one"
        )
    fill = count_noun(most, "stage") + (f" of {ranges} ranges" if ranges > 1 else "")
    raise PlanError(f"stages is {stages}: {count_noun(layers, 'layer')} can fill at most {fill}; use --stages {most}")


def explain_misfit(
    costs: Sequence[LayerCost], stages: int, *, memory: int, in_flight: InFlight, ranges: int = 1
) -> str:
    """One sentence: why that many stages do not fit, and the nearest number that does."""
    every = range(1, len(costs) // ranges + 1)
    depths = feasible_depths(costs, every, memory=memory, in_flight=in_flight, ranges=ranges)
    if not depths:
        return explain_never_fits(costs, memory)
    begin = f"memory is {format_bytes(memory)}, too little for {count_noun(stages, 'stage')}"
    if depths[0] > stages:
        return f"{begin}: at least {count_noun(depths[0], 'stage')} are needed; use --stages {depths[0]}"
    return f"{begin}: use --stages {min(depths, key=lambda n: abs(n - stages))}"


def feasible_depths(
    costs: Sequence[LayerCost], depths: range, *, memory: int, in_flight: InFlight, ranges: int = 1
) -> list[int]:
    """The numbers of stages for which cuts fit."""
    return [n for n in depths if find_cuts(costs, n, memory=memory, in_flight=in_flight, ranges=ranges) is not None]


def explain_never_fits(costs: Sequence[LayerCost], memory: int) -> str:
    """One sentence: why no number of stages fits. Names the first layer that is too large by itself, if any."""
    relief = "use a larger device or a smaller micro-batch"
    for index, cost in enumerate(costs):
        if (alone := cost.resident_bytes + cost.activation_bytes) > memory:
            needs = f"layer {index} ({cost.name}) alone needs {format_bytes(alone)}"
            return f"{needs}, and memory is {format_bytes(memory)}: {relief}"
    return f"memory is {format_bytes(memory)}, too little for any number of stages: {relief}"
