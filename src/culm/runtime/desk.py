"""What a worker has in hand, whatever the epoch: the layers that it holds, and all that it has made in open steps.

An epoch comes and goes; the desk stays. What lies on it is what a survivor reports after a loss, and what the next
epoch goes on from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from culm.plan.lineage import Cell, Standing
from culm.runtime.book import Book, Settled
from culm.runtime.segment import Segment
from culm.runtime.state import Snapshot, State
from culm.schedule import Action, Kind

if TYPE_CHECKING:
    from culm.job import Job
    from culm.transport.base import Tensors


@dataclass
class Sum:
    """The complete sum of a segment: one flat tensor for each layer that is trained, and what rode along."""

    totals: list[Tensor]
    rider: Tensor

    @property
    def nbytes(self) -> int:
        return sum(total.nbytes for total in self.totals)


@dataclass(frozen=True)
class Closed:
    """How a step ended."""

    norm: float | None
    skipped: bool


@dataclass
class OpenStep:
    """What is here of a step until it is committed."""

    books: dict[int, Book] = field(default_factory=dict)
    """By segment that is run here."""
    outputs: dict[str, Tensors] = field(default_factory=dict)
    """What actions made, by name ("2F0", "1I3"): a holder can pick a lost worker's work up from there."""
    sums: dict[int, Sum] = field(default_factory=dict)
    parts: dict[int, list[Sum]] = field(default_factory=dict)
    """Sums of workers that had to go, as they gave them: to be added to those here before these are added up."""
    settled: dict[int, Settled] = field(default_factory=dict)
    norms: dict[int, Tensor] = field(default_factory=dict)
    totals: tuple[float, float] | None = None
    """(sum of the losses, divisor), once known here."""
    heard: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    """What other workers said of the step that more than one stage here may ask for."""
    loaded: set[int] = field(default_factory=set)
    """Segments whose complete sum lies in their layers, undivided."""
    closed: Closed | None = None
    """How the step ended, once the layers that are run here have stepped."""

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for made in self.outputs.values() for t in made if t is not None)


class Holding:
    """The layers of one stage, with all that belongs to them. `version` is the step that the weights are for."""

    def __init__(self, job: Job, stage: int, spans: dict[int, range], device: torch.device, version: int) -> None:
        self.job, self.stage, self.spans = job, stage, spans
        self.state = State(job, [layer for span in spans.values() for layer in span], device)
        self.segments = {g: Segment(job, self.state, span) for g, span in spans.items()}
        self.version = self.since = version
        self._old: dict[int, dict[str, Tensor]] = {}
        self._spare: dict[str, Tensor] = {}
        """Memory of weights that are needed no more: new memory would cost as much as what is written to it."""

    def remember(self) -> None:
        """Before a step: keep what it moves, for whoever needs a tensor of the open step once more."""
        if self.version in self._old:
            return
        moving = {**self.state.parameters(), **self.state.moving_buffers()}
        kept = self._spare or {name: torch.empty_like(value) for name, value in moving.items()}
        self._spare = {}
        with torch.no_grad():
            for name, value in moving.items():
                kept[name].copy_(value)
        self._old[self.version] = kept

    def remember_early(self) -> None:
        """The same where the worker would otherwise wait: the weights do not move before the step ends. Not while those
        of an earlier step are kept, so that this needs no more memory."""
        if not self._old:
            self.remember()

    def forget(self, committed: int) -> None:
        """Everything up to a step is committed."""
        for step in [step for step in self._old if step <= committed]:
            self._spare = self._old.pop(step)
        for segment in self.segments.values():
            for step, micro in [key for key in segment.tapes if key[0] <= committed]:
                del segment.tapes[step, micro]

    def stepped(self) -> None:
        """The weights are for the next step; a tape of this one could not be gone on from any more."""
        for segment in self.segments.values():
            for step, micro in [key for key in segment.tapes if key[0] <= self.version]:
                del segment.tapes[step, micro]
        self.version += 1

    def ghost(self, step: int) -> dict[int, Segment]:
        """The segments as they were for an open step, to run things for their output alone: nothing here moves. Where
        the step is not made yet they go on from the tapes that there are."""
        state = self.state
        if self.version != step:
            state = State(self.job, self.state.layers, self.state.device)
            old = self._old[step]
            state.restore(Snapshot(parameters=old, buffers={**self.state.whole().buffers, **old}))
        made = {g: Segment(self.job, state, span) for g, span in self.spans.items()}
        for g, segment in made.items():
            segment.tapes = {key: tape for key, tape in self.segments[g].tapes.items() if key[0] == step}
        return made


class Desk:
    """Everything that one worker has in hand."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        self.holdings: dict[int, Holding] = {}
        self.steps: dict[int, OpenStep] = {}
        self.shaped = 0
        """The epoch whose shape the holdings are of."""
        self.former: list[Holding] = []
        """Holdings of a shape that was left, as they were then. They stay until a step of the new shape is committed:
        should it come to nothing, all that was learned is still here."""
        self.lags: int | None = None
        """The step that a copy on its way here is at."""
        self.kept_peak = 0
        self.spans: deque[tuple[int, str, float, float]] = deque(maxlen=4096)
        """The last actions, of whatever epoch: their step and name, when they began and ended."""
        self._kept = 0

    def step(self, number: int) -> OpenStep:
        found = self.steps.get(number)
        if found is None:
            found = self.steps[number] = OpenStep()
        return found

    def keep(self, step: int, name: str, made: Tensors) -> None:
        """What an action made stays until the step commits."""
        self.step(step).outputs[name] = made
        self._kept += sum(t.nbytes for t in made if t is not None)
        self.kept_peak = max(self.kept_peak, self._kept)

    def book(self, step: int, g: int, segment: Segment) -> Book:
        books = self.step(step).books
        if g not in books:
            books[g] = Book(segment, self.job.micro_batches)
        return books[g]

    def committed(self, step: int) -> None:
        """Every holder has the complete sums up to this step: what was kept for it goes.

        What is known of it stays while a copy on its way here has yet to make the step.
        """
        for old in [number for number in self.steps if number <= step]:
            self._kept -= self.steps[old].nbytes
            self.steps[old].outputs.clear()
            if self.lags is None or old < self.lags:
                del self.steps[old]
        for holding in self.holdings.values():
            holding.forget(step)
        self.former = [holding for holding in self.former if holding.version > step]

    def reshape(self, shaped: int, holdings: dict[int, Holding], committed: int) -> None:
        """From here on the layers lie in other holdings. Nothing of an open step goes along: none is open, or what was
        made of it is given up."""
        known = (*self.former, *self.holdings.values())
        self.former = [holding for holding in known if holding.version == committed]
        self.holdings, self.shaped = holdings, shaped
        self.steps.clear()
        self.lags, self._kept = None, 0

    def holder(self, layer: int, version: int) -> State | None:
        """Where a layer lies that is for a step, in whatever shape; None: nowhere."""
        known = (*self.holdings.values(), *self.former)
        return next((h.state for h in known if h.version == version and layer in h.state.layers), None)

    def drop(self, dropped: Mapping[int, Collection[int]]) -> None:
        """Micro-batches, by open step, that are to be left out: a sum of its own that has one of them in it begins
        anew. Of a sum the parts can not be told apart any more (see `plan.recover.untainted`)."""
        for step, micros in dropped.items():
            open_step = self.step(step)
            for g, book in open_step.books.items():
                if g not in open_step.sums and any(book.counts[micro] for micro in micros):
                    book.counts = [0] * len(book.counts)
                    for layer in book.segment.layers:
                        layer.accumulator.clear()

    def standing(self) -> Standing:
        """What this survivor has finished, summed and kept. The epoch is closed: nothing of it moves any more."""
        tapes = [
            (g, key, tape)
            for h in self.holdings.values()
            for g, s in h.segments.items()
            for key, tape in s.tapes.items()
        ]
        here = {g for holding in self.holdings.values() for g in holding.segments}
        return Standing(
            versions={stage: holding.version for stage, holding in self.holdings.items()},
            since={stage: holding.since for stage, holding in self.holdings.items() if holding.since > 0},
            forwards=tuple(Cell(step, g, micro) for g, (step, micro), tape in tapes if not tape.halved),
            halves=tuple(Cell(step, g, micro) for g, (step, micro), tape in tapes if tape.halved),
            summed=tuple(self._summed()),
            outputs=tuple(self._kept_cells(Kind.F)),
            gradients=tuple(self._kept_cells(Kind.I)),
            sums=tuple((step, g) for step, open_step in self.steps.items() for g in open_step.sums if g in here),
            shaped=self.shaped,
            layers=self._layers(),
        )

    def _layers(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, set[int]] = {}
        for holding in (*self.former, *self.holdings.values()):
            found.setdefault(holding.version, set()).update(holding.state.layers)
        return {version: tuple(sorted(layers)) for version, layers in found.items()}

    def _summed(self) -> Iterable[Cell]:
        """What lies in sums of its own that are not complete yet."""
        for step, open_step in self.steps.items():
            for g, book in open_step.books.items():
                if g not in open_step.sums:
                    yield from (Cell(step, g, micro) for micro, count in enumerate(book.counts) if count)
            for g, parts in open_step.parts.items():
                for counts in (part.rider[: self.job.micro_batches].tolist() for part in parts):
                    yield from (Cell(step, g, micro) for micro, count in enumerate(counts) if count)

    def _kept_cells(self, kind: Kind) -> Iterable[Cell]:
        for step, open_step in self.steps.items():
            for name in open_step.outputs:
                action = Action.parse(name)
                if action.kind is kind:
                    yield Cell(step, action.segment, action.micro or 0)
