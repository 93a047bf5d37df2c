"""Statistics of the micro-batches of a step in one segment: counts, losses, named values and buffer statistics.

Each value has exactly one source per micro-batch: the worker that added the micro-batch to its gradient sum fills its
row, every other worker leaves zeros. The rows therefore pass through an all-reduce unchanged. After the reduction every
micro-batch must have a count of one: each was added by one worker. Whether that worker really added it, and once,
follows from the additions to its accumulators; whether it was the right data, from the samples that were fetched. Both
are part of a row, and `ObservedCounts` says what the ledger counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from culm.errors import JobError, LayerFailed, RunError, message_suffix
from culm.runtime.compute.batch_loading import NO_SAMPLES, SampleDigests, visits_items_once
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS
from culm.runtime.compute.weight_update import sequential_sum

if TYPE_CHECKING:
    from culm.device.device_copies import DeviceCopies
    from culm.metric import Metric
    from culm.runtime.compute.addition_count import Additions
    from culm.runtime.compute.buffer_statistics import Statistics
    from culm.runtime.compute.segment import MicroBatchResult, Segment


class MicroBatchStats:
    """The part of one worker in the statistics of one segment and step.

    The layout of the metadata vector, with M micro-batches and n layers: M counts, n bounds and n non-finite flags of
    the gradient sums, then M rows. A row begins with the least and the most additions to the sum of a parameter; in the
    first and the last segment the digests of the samples that were fetched and expected follow; in the last segment the
    loss, its weight, and the named values of `Job.metrics` in declared order; in every segment the statistics of moving
    buffers.
    """

    def __init__(self, segment: Segment, micro_batches: int, *, is_first: bool = False, step: int = 0) -> None:
        """`is_first`: the segment gets its inputs from the data set."""
        self.segment = segment
        self._loads_samples = is_first or segment.is_last
        self._loss_column = 4 if self._loads_samples else 2
        """Where loss, weight and named values begin in a row of the last segment."""
        self._values_end = self._loss_column + (2 + len(segment.metrics) if segment.is_last else 0)
        """Where the statistics begin in a row."""
        self._step = step
        self._samples: dict[int, SampleDigests] = {}
        self._additions: dict[int, Additions] = {}
        """By micro-batch that was counted here."""
        self.counts = [0] * micro_batches
        self.results: dict[int, MicroBatchResult] = {}
        self._counted_elsewhere: set[int] = set()
        """Micro-batches counted by workers that have left: their rows are in the metadata that these handed over."""
        self._results_on_host: set[int] = set()
        """Micro-batches whose results `read_device` has replaced by copies on the host."""
        self._received_metadata: list[Tensor] = []
        """Metadata of workers that have left, with counts set to zero: `counts` includes them."""

    def record_forward(self, micro: int, result: MicroBatchResult, samples: SampleDigests = NO_SAMPLES) -> None:
        """Keep the result of a micro-batch's forward, and which samples it used (in the first and the last segment).

        Raises JobError if its statistics have other shapes than those of the micro-batches before.
        """
        self.results[micro], self._samples[micro] = result, samples
        self._results_on_host.discard(micro)
        if result.statistics and not self.segment.example_statistics:
            self.segment.example_statistics = _examples_on_host(result.statistics)
        for index, recorded in result.statistics.items():
            before = self.segment.example_statistics[index]
            if _shapes(recorded) != _shapes(before):
                raise JobError(
                    f"Job.layers[{index}] recorded shapes {_shapes(before)}, and {_shapes(recorded)} for another "
                    "micro-batch: record the same shapes for each"
                )

    def count_backward(self, micro: int, additions: Additions) -> None:
        """Count a micro-batch whose backward has run here. `additions`: how often that added to the sums."""
        self.counts[micro] += 1
        self._additions[micro] = additions

    async def read_device(self, copies: DeviceCopies) -> None:
        """Before `metadata` is called: bring what it needs from the device to the host, in one copy. Does nothing on a
        CPU. Raises ExactRangeError."""
        if copies.is_synchronous:
            return
        micros = [micro for micro in self.results if micro not in self._results_on_host]
        results = [self.results[micro] for micro in micros]
        tensors = [tensor for result in results for tensor in result.tensors()]
        sums = [layer.accumulator for layer in self.segment.layers if layer.accumulator.deferred_checks is not None]
        tensors += [one.deferred_checks for one in sums if one.deferred_checks is not None]
        on_device = [tensor for tensor in tensors if tensor.device.type == copies.device.type]
        if not on_device:
            return
        (packed,) = await copies.read([torch.cat([tensor.detach().reshape(-1).double() for tensor in on_device])])
        parts = iter(packed.split([tensor.numel() for tensor in on_device]))
        # clones: the slab is free again afterwards
        host = iter([next(parts).clone() if tensor.device.type == copies.device.type else tensor for tensor in tensors])
        for micro, result in zip(micros, results, strict=True):
            if self.results[micro] is result:
                self.results[micro] = result.with_tensors(host)
                self._results_on_host.add(micro)
            else:  # the forward was run again meanwhile
                result.with_tensors(host)
        for one in sums:
            one.load_checks(next(host))

    def metadata(self) -> Tensor:
        """The statistics of this worker as one float64 vector, to be summed over the pipelines. On a device call
        `read_device` before."""
        sums = [layer.accumulator for layer in self.segment.layers]
        head = [*self.counts, *(one.bound for one in sums), *(not one.is_finite for one in sums)]
        micros = range(len(self.counts))
        if self._example_statistics():
            metadata = torch.cat([torch.tensor(head, dtype=torch.float64), *map(self._metadata_row, micros)])
        else:
            rows = [value for micro in micros for value in self._row_head(micro, self._own_result(micro))]
            metadata = torch.tensor([*head, *rows], dtype=torch.float64)
        for received in self._received_metadata:
            metadata += received
        return metadata

    def add_metadata(self, metadata: Tensor) -> None:
        """Add the metadata of a worker whose gradient sums became part of the sums of this worker.

        From then on a forward that this worker ran ahead as a shadow fills no row for a micro-batch that the other
        worker counted: its row is in the metadata already.
        """
        received, m = metadata.clone(), len(self.counts)
        other_counts = [round(count) for count in received[:m].tolist()]
        self.counts = [own + other for own, other in zip(self.counts, other_counts, strict=True)]
        self._counted_elsewhere |= {micro for micro, count in enumerate(other_counts) if count}
        received[:m] = 0
        self._received_metadata.append(received)

    def restart(self) -> None:
        """Reset the counts, because the gradient sums of this worker start from zero again. Results of forwards stay:
        backwards can still run from their tapes."""
        self.counts = [0] * len(self.counts)
        self._additions.clear()
        self._counted_elsewhere.clear()
        self._received_metadata.clear()

    def _own_result(self, micro: int) -> MicroBatchResult | None:
        """The forward's result of a micro-batch that this worker counted itself."""
        return self.results.get(micro) if self.counts[micro] and micro not in self._counted_elsewhere else None

    def _metadata_row(self, micro: int) -> Tensor:
        result = self._own_result(micro)
        if result is None:
            return torch.zeros(self._row_width(), dtype=torch.float64)
        values = [torch.tensor(self._row_head(micro, result), dtype=torch.float64)]
        for recorded in result.statistics.values():
            values += [tensor.reshape(-1).double().cpu() for module in recorded for tensor in module]
        return torch.cat(values)

    def _row_head(self, micro: int, result: MicroBatchResult | None) -> tuple[float, ...]:
        """The row of a micro-batch without buffer statistics; zeros where another worker has counted it. `result`: of
        `_own_result`."""
        if result is None:
            return (0.0,) * self._values_end
        head: tuple[float, ...] = self._additions[micro]
        if self._loads_samples:
            head += self._samples[micro]
        if self.segment.is_last:
            assert result.loss is not None
            weight = 1.0 if result.weight is None else float(result.weight)
            head += (float(result.loss), weight, *map(float, result.values))
        return head

    def _row_width(self) -> int:
        return self._values_end + sum(
            math.prod(shape) for recorded in self._example_statistics().values() for shape in _shapes(recorded)
        )

    def _example_statistics(self) -> dict[int, Statistics]:
        """Buffer statistics of any micro-batch; all have the same shapes."""
        return self.segment.example_statistics

    def statistics_template(self) -> list[Tensor]:
        """The shapes of the buffer statistics as tensors, for a replica that never ran a forward: the number of tensors
        of each module, then the tensors."""
        recorded = [module for layer in self._example_statistics().values() for module in layer]
        return [torch.tensor([len(module) for module in recorded]), *(t for module in recorded for t in module)]

    def load_statistics_template(self, template: Sequence[Tensor]) -> None:
        """Take the shapes from the template of a replica that ran a forward."""
        counts, values = iter(template[0].tolist()), iter(template[1:])
        moving = [layer for layer in self.segment.layers if layer.moving_modules]
        if template[0].numel():
            self.segment.example_statistics = {
                layer.index: tuple(tuple(next(values) for _ in range(next(counts))) for _ in layer.moving_modules)
                for layer in moving
            }

    def read_totals(self, metadata: Tensor, dropped_micro_batches: Collection[int] = ()) -> SegmentTotals:
        """Read the summed metadata, and set bounds and finiteness of the layers' accumulators from it.

        Raises RunError unless every micro-batch was counted by exactly one worker, and dropped ones by none. Additions
        and samples that are wrong raise nothing: they are part of the result, for the ledger.
        """
        m, n = len(self.counts), len(self.segment.layers)
        head = metadata[: m + 2 * n].tolist()
        counts = [round(c) for c in head[:m]]
        wrong = [(micro, c) for micro, c in enumerate(counts) if c != (micro not in dropped_micro_batches)]
        if wrong:
            micro, count = wrong[0]
            due = "though it was dropped" if micro in dropped_micro_batches else "not once"
            raise RunError(f"micro-batch {micro} was counted {count} times in {self.segment.layers[0].label}, {due}")
        for layer, bound, broken in zip(self.segment.layers, head[m : m + n], head[m + n :], strict=True):
            layer.accumulator.bound = int(bound)
            layer.accumulator.is_finite = broken == 0
        bounds = {layer.index: layer.accumulator.bound for layer in self.segment.layers}
        kept = [micro for micro in range(m) if micro not in dropped_micro_batches]
        rows = metadata[m + 2 * n :].view(m, -1)[kept]
        observed = self._observe(counts, kept, rows[:, : self._loss_column].tolist())
        if not self.segment.is_last and not self._example_statistics():
            return SegmentTotals(observed, [], [], bounds, {})
        loss = self._loss_column
        losses = rows[:, loss].tolist() if self.segment.is_last else []
        weights = rows[:, loss + 1].tolist() if self.segment.is_last else []
        values = {
            name: combine_values(metric, rows[:, column].tolist(), weights)
            for column, (name, metric) in enumerate(self.segment.metrics.items(), start=loss + 2)
        }
        statistics = self._statistics_by_layer(rows[:, self._values_end :])
        return SegmentTotals(observed, losses, weights, bounds, statistics, values)

    def _observe(self, counts: list[int], kept: list[int], heads: list[list[float]]) -> ObservedCounts:
        """How often each micro-batch is in the sums, by the additions and by the samples that were fetched."""
        least, most = list(counts), list(counts)
        for micro, additions in zip(kept, heads, strict=True):
            least[micro], most[micro] = int(additions[0]), int(additions[1])
        if self._loads_samples:
            fetched, expected = [int(head[2]) for head in heads], [int(head[3]) for head in heads]
            once = visits_items_once(self.segment.job, self._step)
            lost, repeated = compare_samples(fetched, expected, once=once)
            for position in lost:
                least[kept[position]] = 0
            for position, extra in repeated.items():
                most[kept[position]] += extra
        return ObservedCounts(least, most)

    def _statistics_by_layer(self, rows: Tensor) -> dict[int, list[Statistics]]:
        """By layer: the buffer statistics of each micro-batch, in micro-batch order."""
        pattern = self._example_statistics()
        found: dict[int, list[Statistics]] = {index: [] for index in pattern}
        for row in rows if pattern else ():
            values = iter(row.split([math.prod(shape) for recorded in pattern.values() for shape in _shapes(recorded)]))
            for index, recorded in pattern.items():
                modules = [tuple(next(values).to(t).view(t.shape) for t in module) for module in recorded]
                found[index].append(tuple(modules))
        return found


def compare_samples(fetched: Sequence[int], expected: Sequence[int], *, once: bool) -> tuple[list[int], dict[int, int]]:
    """Compare the samples of a step's micro-batches, given as digests.

    Returns the positions of the micro-batches whose samples were not fetched by any, and by position how often its
    samples were fetched beyond what is expected. Samples that belong to no micro-batch of the step count as fetched
    once too often, at the position that fetched them. `once`: the step uses no sample twice, so that equal digests are
    wrong even if they were expected.
    """
    if list(fetched) == list(expected) and (not once or len(set(fetched)) == len(fetched)):
        return [], {}
    due, had = Counter(expected), Counter(fetched)
    lost: list[int] = []
    repeated: dict[int, int] = {}
    for digest in dict.fromkeys((*expected, *fetched)):
        places = [position for position, one in enumerate(expected) if one == digest]
        allowed = min(due[digest], 1) if once else due[digest]
        lost += places[min(had[digest], allowed) :]
        if had[digest] > allowed:
            repeated[places[0] if places else list(fetched).index(digest)] = had[digest] - allowed
    return sorted(lost), repeated


def _examples_on_host(statistics: dict[int, Statistics]) -> dict[int, Statistics]:
    """Tensors of the same shapes and types in host memory. Only these are used, so that nothing is copied."""
    return {
        index: tuple(
            tuple(t if t.device.type == "cpu" else torch.zeros(t.shape, dtype=t.dtype) for t in module)
            for module in recorded
        )
        for index, recorded in statistics.items()
    }


def _shapes(recorded: Statistics) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for module in recorded for tensor in module]


def combine_values(metric: Metric, values: Sequence[float], weights: Sequence[float]) -> float:
    """The value of a step from the values of its micro-batches, in micro-batch order. NaN if any of them is NaN.

    Raises LayerFailed if the metric's transform fails.
    """
    value = _reduce_values(metric, values, weights)
    if metric.transform is None:
        return value
    try:
        return float(metric.transform(value))
    except OverflowError:
        return math.inf  # as math.exp of a large loss
    except ASYNC_USER_EXCEPTIONS as error:
        raise LayerFailed(
            f"the transform of a culm.Metric raised {type(error).__name__} for {value}{message_suffix(error)}"
        ) from error


def _reduce_values(metric: Metric, values: Sequence[float], weights: Sequence[float]) -> float:
    if metric.reduce == "sum":
        return sequential_sum(values)
    if metric.reduce == "max":
        return math.nan if any(map(math.isnan, values)) else max(values, default=math.nan)
    weighted = sequential_sum(value * weight for value, weight in zip(values, weights, strict=True))
    return weighted / (sequential_sum(weights) or 1.0)


class ObservedCounts(NamedTuple):
    """How often each micro-batch of a step is in the sums of a segment: 1 is right, 0 is lost, more is duplicated."""

    least: list[int]
    """The minimum over the parameters; 0 if its samples were not fetched."""
    most: list[int]
    """The maximum over the parameters, with samples that were fetched again for another micro-batch."""


class SegmentTotals:
    """The statistics of a whole step in one segment: the same on every worker that holds its reduced gradients."""

    def __init__(
        self,
        observed: ObservedCounts,
        losses: list[float],
        weights: list[float],
        bounds: dict[int, int],
        statistics: dict[int, list[Statistics]],
        values: dict[str, float] | None = None,
    ) -> None:
        self.observed = observed
        self.bounds = bounds
        self.statistics = statistics
        self.loss_sum = sequential_sum(losses)
        self.weight_sum = sequential_sum(weights)
        self.values = values or {}
        """The named values of Job.metrics; empty except in the last segment."""
