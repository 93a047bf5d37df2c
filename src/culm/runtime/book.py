"""The book of a step: what was counted, lost and recorded for each micro-batch of a segment.

Everything in it has exactly one source per micro-batch, so it rides through a sum unchanged: who ran a micro-batch
writes its row, everyone else leaves zeros. The count per micro-batch must come out as one everywhere: that is the
proof that every sample was counted once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.errors import RunError

if TYPE_CHECKING:
    from culm.runtime.segment import Outcome, Segment


class Book:
    """One segment's share of one step, on one worker."""

    def __init__(self, segment: Segment, micro_batches: int) -> None:
        self.segment = segment
        self.counts = [0] * micro_batches
        self.outcomes: dict[int, Outcome] = {}

    def note(self, micro: int, outcome: Outcome) -> None:
        """F of a micro-batch ran here."""
        self.outcomes[micro] = outcome

    def count(self, micro: int) -> None:
        """W of a micro-batch went into the sums here."""
        self.counts[micro] += 1

    def rider(self) -> Tensor:
        """The rows as one vector of float64, to be added up over the pipelines."""
        rows = [torch.tensor(self.counts, dtype=torch.float64)]
        rows.append(torch.tensor([layer.accumulator.bound for layer in self.segment.layers], dtype=torch.float64))
        rows.append(torch.tensor([not layer.accumulator.finite for layer in self.segment.layers], dtype=torch.float64))
        rows += [self._row(micro) for micro in range(len(self.counts))]
        return torch.cat(rows)

    def _row(self, micro: int) -> Tensor:
        outcome = self.outcomes.get(micro)
        if outcome is None or not self.counts[micro]:
            return torch.zeros(self._width(), dtype=torch.float64)
        values: list[Tensor] = []
        if self.segment.last:
            assert outcome.loss is not None
            weight = 1.0 if outcome.weight is None else outcome.weight
            values = [
                outcome.loss.reshape(1).double().cpu(),
                torch.as_tensor(weight, dtype=torch.float64).reshape(1).cpu(),
            ]
        for recorded in outcome.statistics.values():
            values += [tensor.reshape(-1).double().cpu() for module in recorded for tensor in module]
        return torch.cat(values) if values else torch.zeros(0, dtype=torch.float64)

    def _width(self) -> int:
        return (2 if self.segment.last else 0) + sum(math.prod(shape) for shape, _ in self._shapes())

    def _shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Of the statistics of one micro-batch; the same for each of them, by any that ran here."""
        if not self.segment.moving:
            return []
        known = next(iter(self.outcomes.values()))
        return [(tuple(t.shape), t.dtype) for recorded in known.statistics.values() for m in recorded for t in m]

    def settle(self, rider: Tensor) -> Settled:
        """Read the sum: raises RunError unless every micro-batch was counted exactly once."""
        m, n = len(self.counts), len(self.segment.layers)
        counts = [round(c) for c in rider[:m].tolist()]
        wrong = [(micro, c) for micro, c in enumerate(counts) if c != 1]
        if wrong:
            micro, count = wrong[0]
            raise RunError(f"micro-batch {micro} was counted {count} times in {self.segment.layers[0].label}, not once")
        for layer, bound, broken in zip(
            self.segment.layers, rider[m : m + n].tolist(), rider[m + n : m + 2 * n].tolist(), strict=True
        ):
            layer.accumulator.bound = int(bound)
            layer.accumulator.finite = broken == 0
        rows = rider[m + 2 * n :].view(m, -1)
        losses = rows[:, 0].tolist() if self.segment.last else []
        weights = rows[:, 1].tolist() if self.segment.last else []
        return Settled(counts, losses, weights, self._statistics(rows[:, 2 if self.segment.last else 0 :]))

    def _statistics(self, rows: Tensor) -> dict[int, list[tuple[tuple[Tensor, ...], ...]]]:
        """By layer: what each micro-batch recorded, in order."""
        if not self.segment.moving:
            return {}
        pattern = next(iter(self.outcomes.values())).statistics
        found: dict[int, list[tuple[tuple[Tensor, ...], ...]]] = {index: [] for index in pattern}
        for row in rows:
            at = 0
            for index, recorded in pattern.items():
                modules = []
                for module in recorded:
                    sizes = [t.numel() for t in module]
                    parts = row[at : at + sum(sizes)].split(sizes)
                    modules.append(tuple(p.to(t).view(t.shape) for p, t in zip(parts, module, strict=True)))
                    at += sum(sizes)
                found[index].append(tuple(modules))
        return found


class Settled:
    """What the whole step came to in a segment."""

    def __init__(
        self,
        counts: list[int],
        losses: list[float],
        weights: list[float],
        statistics: dict[int, list[tuple[tuple[Tensor, ...], ...]]],
    ) -> None:
        self.counts = counts
        self.statistics = statistics
        self.loss_sum = sum(losses)
        self.weight_sum = sum(weights)
