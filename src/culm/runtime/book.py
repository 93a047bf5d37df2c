"""The book of a step: what was counted, lost and recorded for each micro-batch of a segment.

Everything in it has exactly one source per micro-batch, so it rides through a sum unchanged: who ran a micro-batch
writes its row, everyone else leaves zeros. The count per micro-batch must come out as one everywhere: that is the
proof that every sample was counted once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.errors import JobError, RunError
from culm.runtime.update import added

if TYPE_CHECKING:
    from culm.runtime.segment import Outcome, Segment
    from culm.runtime.statistics import Statistics


class Book:
    """One segment's share of one step, on one worker."""

    def __init__(self, segment: Segment, micro_batches: int) -> None:
        self.segment = segment
        self.counts = [0] * micro_batches
        self.outcomes: dict[int, Outcome] = {}
        self._given: list[Tensor] = []
        """Riders of workers that are gone, without their counts, which are among those here."""

    def note(self, micro: int, outcome: Outcome) -> None:
        """F of a micro-batch ran here. Raises JobError if its statistics have other shapes than those before."""
        self.outcomes[micro] = outcome
        self.segment.pattern = self.segment.pattern or outcome.statistics
        for index, recorded in outcome.statistics.items():
            before = self.segment.pattern[index]
            if _shapes(recorded) != _shapes(before):
                raise JobError(
                    f"Job.layers[{index}] recorded shapes {_shapes(before)}, and {_shapes(recorded)} for another "
                    "micro-batch: record the same shapes for each"
                )

    def count(self, micro: int) -> None:
        """W of a micro-batch went into the sums here."""
        self.counts[micro] += 1

    def rider(self) -> Tensor:
        """The rows as one vector of float64, to be added up over the pipelines."""
        sums = [layer.accumulator for layer in self.segment.layers]
        head = [*self.counts, *(one.bound for one in sums), *(not one.finite for one in sums)]
        micros = range(len(self.counts))
        if self._pattern():
            rider = torch.cat([torch.tensor(head, dtype=torch.float64), *map(self._row, micros)])
        else:
            rows = [value for micro in micros for value in self._loss(micro)]
            rider = torch.tensor([*head, *rows], dtype=torch.float64)
        for given in self._given:
            rider += given
        return rider

    def absorb(self, rider: Tensor) -> None:
        """Another worker has given its sums, which are part of those here from now on: so are its rows. A forward that
        a shadow ran ahead here is none: whoever added the micro-batch has written it."""
        given, m = rider.clone(), len(self.counts)
        theirs = [round(count) for count in given[:m].tolist()]
        self.counts = [mine + other for mine, other in zip(self.counts, theirs, strict=True)]
        self.outcomes = {micro: outcome for micro, outcome in self.outcomes.items() if not theirs[micro]}
        given[:m] = 0
        self._given.append(given)

    def _row(self, micro: int) -> Tensor:
        outcome = self.outcomes.get(micro)
        if outcome is None or not self.counts[micro]:
            return torch.zeros(self._width(), dtype=torch.float64)
        values = [torch.tensor(self._loss(micro), dtype=torch.float64)]
        for recorded in outcome.statistics.values():
            values += [tensor.reshape(-1).double().cpu() for module in recorded for tensor in module]
        return torch.cat(values)

    def _loss(self, micro: int) -> tuple[float, ...]:
        """Of the last segment: the loss and its weight, or zeros where another worker knows them."""
        if not self.segment.last:
            return ()
        outcome = self.outcomes.get(micro)
        if outcome is None or not self.counts[micro]:
            return 0.0, 0.0
        assert outcome.loss is not None
        return float(outcome.loss), 1.0 if outcome.weight is None else float(outcome.weight)

    def _width(self) -> int:
        return (2 if self.segment.last else 0) + sum(
            math.prod(shape) for recorded in self._pattern().values() for shape in _shapes(recorded)
        )

    def _pattern(self) -> dict[int, Statistics]:
        """Statistics of some micro-batch; all have the same shapes."""
        return self.segment.pattern

    def template(self) -> list[Tensor]:
        """The shapes of the statistics as tensors, for a holder that never ran F: how many a module has, and those."""
        recorded = [module for layer in self._pattern().values() for module in layer]
        return [torch.tensor([len(module) for module in recorded]), *(t for module in recorded for t in module)]

    def learn(self, template: Sequence[Tensor]) -> None:
        """Take the shapes from a holder that did."""
        counts, values = iter(template[0].tolist()), iter(template[1:])
        moving = [layer for layer in self.segment.layers if layer.moving]
        if template[0].numel():
            self.segment.pattern = {
                layer.index: tuple(tuple(next(values) for _ in range(next(counts))) for _ in layer.moving)
                for layer in moving
            }

    def settle(self, rider: Tensor, dropped: Collection[int] = ()) -> Settled:
        """Read the sum: raises RunError unless every micro-batch was counted exactly once, and dropped ones never."""
        m, n = len(self.counts), len(self.segment.layers)
        head = rider[: m + 2 * n].tolist()
        counts = [round(c) for c in head[:m]]
        wrong = [(micro, c) for micro, c in enumerate(counts) if c != (micro not in dropped)]
        if wrong:
            micro, count = wrong[0]
            due = "though it was dropped" if micro in dropped else "not once"
            raise RunError(f"micro-batch {micro} was counted {count} times in {self.segment.layers[0].label}, {due}")
        for layer, bound, broken in zip(self.segment.layers, head[m : m + n], head[m + n :], strict=True):
            layer.accumulator.bound = int(bound)
            layer.accumulator.finite = broken == 0
        bounds = {layer.index: layer.accumulator.bound for layer in self.segment.layers}
        if not self.segment.last and not self._pattern():
            return Settled(counts, [], [], bounds, {})
        rows = rider[m + 2 * n :].view(m, -1)
        if dropped:
            rows = rows[[micro for micro in range(m) if micro not in dropped]]
        losses = rows[:, 0].tolist() if self.segment.last else []
        weights = rows[:, 1].tolist() if self.segment.last else []
        return Settled(counts, losses, weights, bounds, self._statistics(rows[:, 2 if self.segment.last else 0 :]))

    def _statistics(self, rows: Tensor) -> dict[int, list[Statistics]]:
        """By layer: what each micro-batch recorded, in order."""
        pattern = self._pattern()
        found: dict[int, list[Statistics]] = {index: [] for index in pattern}
        for row in rows if pattern else ():
            values = iter(row.split([math.prod(shape) for recorded in pattern.values() for shape in _shapes(recorded)]))
            for index, recorded in pattern.items():
                modules = [tuple(next(values).to(t).view(t.shape) for t in module) for module in recorded]
                found[index].append(tuple(modules))
        return found


def _shapes(recorded: Statistics) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for module in recorded for tensor in module]


class Settled:
    """What the whole step came to in a segment."""

    def __init__(
        self,
        counts: list[int],
        losses: list[float],
        weights: list[float],
        bounds: dict[int, int],
        statistics: dict[int, list[Statistics]],
    ) -> None:
        self.counts = counts
        self.bounds = bounds
        self.statistics = statistics
        self.loss_sum = added(losses)
        self.weight_sum = added(weights)
