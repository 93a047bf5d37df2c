"""F, I, W of a segment: a run of layers on one worker, for one micro-batch at a time.

A forward leaves a tape: pieces of autograd graph with detached ends. Where one tensor passes from layer to layer the
piece goes on; where several do, it ends, so that the order in which autograd adds up gradients never depends on where
the model is cut. With recomputation a piece is one layer, and its graph is made in the backward. A piece is one layer,
too, where the backward comes in halves: for W the engine looks at all that lies below each weight, which had better be
little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from culm.errors import CulmError, LayerFailed, said
from culm.runtime import split, statistics
from culm.runtime.call import Manner, call_layer, handed_on, loss_of
from culm.runtime.data import Values
from culm.runtime.keys import draws, knows_outside
from culm.runtime.raised import RAISED
from culm.runtime.split import Gradients
from culm.runtime.statistics import Statistics

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.state import HeldLayer, State


@dataclass(slots=True)
class Piece:
    """A part of the graph: leaves, ends, and the layers between."""

    inputs: Values
    outputs: Values
    layers: list[HeldLayer]
    halfway: list[split.Bunch] = field(default_factory=list)
    """What I leaves for W."""


@dataclass(slots=True)
class Tape:
    """What the forward of one micro-batch left for its backward."""

    step: int
    micro: int
    inputs: Values
    draws: list[int]
    """Of each layer, and of what would come after the last: the loss."""
    pieces: list[Piece] = field(default_factory=list)
    again: list[tuple[HeldLayer, int, Values]] = field(default_factory=list)
    """With recomputation: layers, their draws and inputs, in order."""
    pending: Gradients | None = None
    """Gradients of the outputs, when I had nothing to do and W does everything."""
    halved: bool = False
    """I is done."""


@dataclass(slots=True)
class Outcome:
    """What a micro-batch gives besides its activations: its loss and the statistics of moving buffers."""

    loss: Tensor | None = None
    weight: Tensor | float | None = None
    statistics: dict[int, Statistics] = field(default_factory=dict)
    """By layer, where it has moving modules."""


class Segment:
    """Runs the actions of a run of layers. Not reentrant; holds one tape a live micro-batch."""

    def __init__(self, job: Job, state: State, layers: Sequence[int]) -> None:
        self.job = job
        self.layers = [state.layers[index] for index in layers]
        self._places = (*layers, layers[-1] + 1)
        self.last = layers[-1] == len(job.layers) - 1
        self.moving = any(layer.moving for layer in self.layers)
        self.tapes: dict[tuple[int, int], Tape] = {}
        self.pattern: dict[int, Statistics] = {}
        """Statistics of some micro-batch, once one has run: all have the same shapes."""
        self.spent: Tape | None = None
        """Of the last backward: to take its graph apart takes a while, in which others would wait for the gradients."""
        self._loss_guard = statistics.Guard(statistics.LOSS, job.loss) if isinstance(job.loss, nn.Module) else None
        self._loss_manner = Manner(exact=job.exact, draws=knows_outside(job.loss) or None)
        self._cast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if job.precision == "bf16":
            kind = state.device.type
            self._cast = lambda: torch.autocast(kind, torch.bfloat16)

    def forward(
        self, step: int, micro: int, inputs: Values, target: Any = None, *, halves: bool = False
    ) -> tuple[Values, Outcome]:
        """F: the outputs (detached; `requires_grad` says where a gradient will be wanted) and the outcome.

        The last segment computes the loss too and has no outputs. `halves`: the backward will come in halves. It may
        all the same come otherwise, which takes longer.
        """
        tape = Tape(step, micro, inputs, self._draws(step, micro))
        outcome = Outcome()
        for layer in self.layers:
            layer.guard.watch()
        with self._cast(), statistics.recording() as recorded:
            lean = self.job.recompute
            outputs = self._forward_lean(tape, inputs) if lean else self._forward_taped(tape, inputs, halves)
            if self.last:
                outputs = self._loss(tape, outputs, target, outcome)
        for layer in self.layers:
            layer.guard.check()
            if layer.moving:
                outcome.statistics[layer.index] = statistics.collect(layer.moving, recorded)
        self.tapes[step, micro] = tape
        return () if self.last else tuple(handed_on(o) for o in outputs), outcome

    def _draws(self, step: int, micro: int) -> list[int]:
        return draws(self.job.seed, step, micro, self._places)

    def evaluate(self, micro: int, inputs: Values, target: Any = None) -> tuple[Values, Outcome]:
        """F in evaluation mode: no graph, no dropout, nothing moves."""
        outcome = Outcome()
        *own, after = self._draws(-1, micro)
        with torch.no_grad(), self._cast():
            values = inputs
            for layer, draw in zip(self.layers, own, strict=True):
                layer.module.eval()
                try:
                    values = call_layer(layer, values, draw)
                finally:
                    layer.module.train()
            if self.last:
                outcome.loss, outcome.weight = loss_of(self.job, values, target, after, self._loss_manner)
                values = ()
        return tuple(handed_on(v) for v in values), outcome

    def backward(self, step: int, micro: int, gradients: Gradients) -> Gradients:
        """B: gradients of the inputs; those of the weights are added to the sums."""
        tape = self.tapes.pop((step, micro))
        for piece in self._pieces_backwards(tape):
            self._absorbed(piece, gradients)
            gradients = _taken(piece.inputs)
        self._absorb()
        self.spent = tape
        return gradients

    def backward_input(self, step: int, micro: int, gradients: Gradients) -> Gradients:
        """I: gradients of the inputs only. What W needs stays on the tape."""
        tape = self.tapes[step, micro]
        tape.halved = True
        if not any(x.requires_grad for x in tape.inputs):
            tape.pending = gradients
            return tuple(None for _ in tape.inputs)
        pieces = []
        for piece in self._pieces_backwards(tape):
            outputs, given = _wanted(piece.outputs, gradients)
            gradients = tuple(None for _ in piece.inputs)
            if outputs:
                with self._blame(piece):
                    gradients, piece.halfway = split.input_half(outputs, given, piece.inputs)
            piece.outputs = ()  # or the graph would live on as a whole
            pieces.append(piece)
        tape.pieces, tape.again = pieces, []
        return gradients

    def backward_weight(self, step: int, micro: int) -> None:
        """W: gradients of the weights are added to the sums."""
        tape = self.tapes.pop((step, micro))
        if tape.pending is not None:
            gradients = tape.pending
            for piece in self._pieces_backwards(tape):
                self._absorbed(piece, gradients)
                gradients = _taken(piece.inputs)
        else:
            with _Blame([layer for piece in reversed(tape.pieces) for layer in piece.layers]):
                split.weight_half(*(piece.halfway for piece in tape.pieces))
        self._absorb()

    def _forward_taped(self, tape: Tape, values: Values, halves: bool) -> Values:
        piece = Piece(values, values, [])
        short = halves and any(x.requires_grad for x in values)
        for layer, draw in zip(self.layers, tape.draws, strict=False):
            if piece.layers and (short or len(values) > 1):
                piece.outputs = values
                tape.pieces.append(piece)
                values = tuple(handed_on(v) for v in values)
                piece = Piece(values, (), [])
            values = call_layer(layer, values, draw)
            piece.layers.append(layer)
        piece.outputs = values
        tape.pieces.append(piece)
        return values

    def _forward_lean(self, tape: Tape, values: Values) -> Values:
        """Keeps the inputs of the layers. Each makes its graph, too, and drops it: without one, kernels may differ."""
        for layer, draw in zip(self.layers, tape.draws, strict=False):
            tape.again.append((layer, draw, values))
            before = [v._version for v in values]
            made = call_layer(layer, values, draw)
            if [v._version for v in values] != before:
                raise LayerFailed(
                    f"{layer.label} writes into its input at times: with recompute, always or never do so"
                )
            values = tuple(handed_on(v) for v in made)
        return values

    def _loss(self, tape: Tape, outputs: Values, target: Any, outcome: Outcome) -> Values:
        """The loss joins the last piece, or is a piece of its own where the layers are run again."""
        if self.job.recompute:
            tape.pieces.append(Piece(outputs, (), []))
        loss, outcome.weight = loss_of(self.job, outputs, target, tape.draws[-1], self._loss_manner)
        if self._loss_guard is not None:
            self._loss_guard.check()
        tape.pieces[-1].outputs = (loss,)
        outcome.loss = loss.detach()
        return (loss,)

    def _pieces_backwards(self, tape: Tape) -> Any:
        yield from reversed(tape.pieces)
        for layer, draw, values in reversed(tape.again):
            inputs = tuple(handed_on(v) for v in values)
            with torch.enable_grad(), self._cast(), statistics.recording():
                outputs = call_layer(layer, inputs, draw)
            yield Piece(inputs, outputs, [layer])

    def _absorbed(self, piece: Piece, gradients: Gradients) -> None:
        outputs, given = _wanted(piece.outputs, gradients)
        if outputs:
            with self._blame(piece):
                torch.autograd.backward(outputs, given)

    def _absorb(self) -> None:
        if self.job.exact:
            for layer in self.layers:
                layer.accumulator.absorb()

    def _blame(self, piece: Piece) -> _Blame:
        return _Blame(piece.layers)


class _Blame:
    """Turns an exception of a backward into one that names the layers it ran through."""

    def __init__(self, layers: Sequence[HeldLayer]) -> None:
        self.layers = layers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RAISED) and not isinstance(error, CulmError):
            names = [layer.label for layer in self.layers] or ["the loss"]
            where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            cause = error.__cause__ or error
            raise LayerFailed(f"the backward of {where} raised {type(cause).__name__}{said(cause)}") from error


def _wanted(outputs: Values, gradients: Gradients) -> tuple[list[Tensor], list[Tensor] | None]:
    """The ends that a gradient flows into, with it; for the loss, which has none given, None."""
    if not gradients:
        return [o for o in outputs if o.requires_grad], None
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    return [o for o, _ in pairs], [g for _, g in pairs]


def _taken(inputs: Values) -> Gradients:
    """The gradients that a backward left at the leaves."""
    found = tuple(x.grad if x.requires_grad else None for x in inputs)
    for x in inputs:
        if x.requires_grad:
            x.grad = None
    return found
