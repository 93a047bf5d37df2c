"""F, I and W of a segment: consecutive layers on one worker, for one micro-batch at a time.

A forward leaves a tape: pieces of the autograd graph with detached ends. A piece continues over a layer boundary that
one tensor crosses, and ends where several do, so that the order in which autograd sums gradients never depends on how
the model is partitioned. With recomputation a piece is one layer, and its graph is built in the backward. A piece is
one layer, too, where the backward is split: for W the engine visits all nodes below each weight, which should be few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from culm.errors import CulmError, LayerFailed, message_suffix
from culm.metric import declared_metrics
from culm.runtime.compute import buffer_statistics, split_backward
from culm.runtime.compute.addition_count import (
    NO_ADDITIONS,
    Additions,
    count_additions,
    unreached_by_graph,
    unreached_by_groups,
)
from culm.runtime.compute.batch_loading import Activations
from culm.runtime.compute.buffer_statistics import Statistics
from culm.runtime.compute.metric_values import MetricValues, MicroBatchValue
from culm.runtime.compute.rng import layer_seeds, may_use_python_rng
from culm.runtime.compute.split_backward import Gradients
from culm.runtime.compute.user_code import UserCodeTraits, call_layer, compute_loss, detach_contiguous
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.compute.model_state import LayerReplica, ModelState
    from culm.runtime.compute.off_loaded_tape import OffLoadedTape
    from culm.runtime.epoch import LayerInput


@dataclass(slots=True)
class GraphPiece:
    """A part of the graph: its leaves, its ends, and the layers between."""

    inputs: Activations
    outputs: Activations
    layers: list[LayerReplica]
    weight_groups: list[split_backward.WeightGroup] = field(default_factory=list)
    """What I leaves for W."""


@dataclass(slots=True)
class Tape:
    """What the forward of one micro-batch leaves for its backward."""

    step: int
    micro: int
    inputs: Activations
    seeds: list[int]
    """The seed of each layer, and of the position after the last one, which is the loss."""
    pieces: list[GraphPiece] = field(default_factory=list)
    recompute_inputs: list[tuple[LayerReplica, int, Activations]] = field(default_factory=list)
    """With recomputation: layers, their seeds and inputs, in order."""
    pending_gradients: Gradients | None = None
    """Gradients of the outputs, if I had nothing to compute and W does everything."""
    input_backward_done: bool = False
    """Whether I is done."""
    off_loaded: OffLoadedTape | None = None
    """What may have left the device, if the tape is of a replica that runs forwards in advance."""

    @property
    def is_on_host(self) -> bool:
        """Whether it has left the device."""
        return self.off_loaded is not None and self.off_loaded.is_on_host

    def set_off_loaded(self, off_loaded: OffLoadedTape) -> None:
        """Set what may leave the device."""
        self.off_loaded = off_loaded

    def bring_back(self) -> None:
        """Before a backward: have everything on the device."""
        if self.off_loaded is not None:
            self.off_loaded.bring_back()
            self.off_loaded = None


@dataclass(slots=True)
class MicroBatchResult:
    """What a forward returns besides its activations: loss, named values and the statistics of moving buffers."""

    loss: Tensor | None = None
    weight: Tensor | float | None = None
    statistics: dict[int, Statistics] = field(default_factory=dict)
    """By layer, for layers with moving modules."""
    values: tuple[MicroBatchValue, ...] = ()
    """The values of Job.metrics, in declared order. Only the last segment has any."""

    def tensors(self) -> list[Tensor]:
        """All tensors of the result, in a fixed order."""
        numbers = [value for value in (self.loss, self.weight, *self.values) if isinstance(value, Tensor)]
        return numbers + [t for recorded in self.statistics.values() for module in recorded for t in module]

    def with_tensors(self, copies: Iterator[Tensor]) -> MicroBatchResult:
        """The same result with copies of its tensors, which come in the order of `tensors` and may be of a wider
        type."""

        def replaced(value: Any) -> Any:
            return next(copies).to(value.dtype).view(value.shape) if isinstance(value, Tensor) else value

        loss, weight, values = replaced(self.loss), replaced(self.weight), tuple(map(replaced, self.values))
        statistics = {
            index: tuple(tuple(map(replaced, module)) for module in recorded)
            for index, recorded in self.statistics.items()
        }
        return MicroBatchResult(loss, weight, statistics, values)


class Segment:
    """Runs the actions of consecutive layers. Not reentrant. Holds one tape per live micro-batch."""

    def __init__(
        self,
        job: Job,
        state: ModelState,
        layers: Sequence[int],
        *,
        tapes: Mapping[tuple[int, int], Tape] | None = None,
    ) -> None:
        """`tapes`: tapes of another segment of the same layers, by step and micro-batch, to continue from."""
        self.job = job
        self.layers = [state.layers[index] for index in layers]
        self._seed_positions = (*layers, layers[-1] + 1)
        self.is_last = layers[-1] == len(job.layers) - 1
        self.tapes: dict[tuple[int, int], Tape] = dict(tapes or {})
        """By step and micro-batch."""
        self.example_statistics: dict[int, Statistics] = {}
        """Statistics of some micro-batch, once one has run. All micro-batches have the same shapes."""
        self._additions = NO_ADDITIONS
        """The additions of the last backward, until `take_additions` returns them."""
        self._last_tape: Tape | None = None
        """Tape of the last backward, until `free_last_tape`."""
        self._loss_guard = (
            buffer_statistics.MutationGuard(buffer_statistics.LOSS, job.loss)
            if isinstance(job.loss, nn.Module)
            else None
        )
        self.metrics = declared_metrics(job.metrics) if self.is_last else {}
        """The named values that are computed here, next to the loss."""
        self._metric_values = MetricValues(self.metrics) if self.metrics else None
        self._evaluation_values = MetricValues(self.metrics)
        self._state = state
        self._loss_traits = UserCodeTraits(exact=job.exact, uses_python_rng=may_use_python_rng(job.loss) or None)
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        if job.precision == "bf16":
            kind = state.device.type
            self._autocast = lambda: torch.autocast(kind, torch.bfloat16)

    def forward(
        self, step: int, micro: int, inputs: Activations, target: Any = None, *, splits_backward: bool = False
    ) -> tuple[Activations, MicroBatchResult]:
        """F: returns the outputs (detached; `requires_grad` says where a gradient will be needed) and the result.

        The last segment also computes the loss, and has no outputs. `splits_backward`: the backward is expected as I
        and W. A fused backward works nevertheless, but takes longer.
        """
        tape = Tape(step, micro, inputs, self._layer_seeds(step, micro))
        result = MicroBatchResult()
        for layer in self.layers:
            layer.guard.before_forward()
        with self._autocast(), buffer_statistics.RecordCollector() as recorded:
            outputs = (
                self._forward_recompute(tape, inputs)
                if self.job.recompute
                else self._forward_with_graph(tape, inputs, splits_backward)
            )
            if self.is_last:
                outputs = self._compute_loss(tape, outputs, target, result)
        for layer in self.layers:
            layer.guard.check_buffers()
            if layer.moving_modules:
                result.statistics[layer.index] = buffer_statistics.gather_statistics(layer.moving_modules, recorded)
        self.tapes[step, micro] = tape
        return () if self.is_last else tuple(detach_contiguous(o) for o in outputs), result

    def compile_layers(self, inputs: Sequence[Sequence[LayerInput]]) -> None:
        """Compile forward and backward of each layer ahead of its first action, by a forward of zeros of which nothing
        is kept. `inputs`: what each layer gets."""
        for layer, given in zip(self.layers, inputs, strict=True):
            values = tuple(_zeros_like_input(one, self._state.device) for one in given)
            with (
                torch.enable_grad(),
                self._autocast(),
                buffer_statistics.RecordCollector(),
                layer.unknown_traits(),
            ):
                call_layer(layer, values, seed=0)

    def take_additions(self) -> Additions:
        """How often the last backward added its micro-batch to the gradient sums. No additions if none has run since
        the last call."""
        taken, self._additions = self._additions, NO_ADDITIONS
        return taken

    def free_last_tape(self) -> None:
        """Free the graph of the last backward. The executor calls this after it has sent the gradients: freeing a
        graph takes a while, and other workers wait for them."""
        self._last_tape = None

    def drop_oldest_on_host(self, first_step: int) -> bool:
        """Drop the oldest tape that has left the device, of step `first_step` or a later one; False: there is none.
        Its forward has to run again."""
        key = min((key for key, tape in self.tapes.items() if tape.is_on_host and key[0] >= first_step), default=None)
        if key is not None:
            del self.tapes[key]
        return key is not None

    def drop_tapes(self, last_step: int) -> None:
        """Drop the tapes of all steps up to and including this one."""
        for key in [key for key in self.tapes if key[0] <= last_step]:
            del self.tapes[key]

    def tapes_of(self, step: int) -> dict[tuple[int, int], Tape]:
        """The tapes of one step."""
        return {key: tape for key, tape in self.tapes.items() if key[0] == step}

    def _layer_seeds(self, step: int, micro: int) -> list[int]:
        return layer_seeds(self.job.seed, step, micro, self._seed_positions)

    def evaluate(self, micro: int, inputs: Activations, target: Any = None) -> tuple[Activations, MicroBatchResult]:
        """F in evaluation mode: no graph, no dropout, and no buffer changes."""
        result = MicroBatchResult()
        *layer_seeds, loss_seed = self._layer_seeds(-1, micro)
        with torch.no_grad(), self._autocast():
            values = inputs
            try:
                for layer, seed in zip(self.layers, layer_seeds, strict=True):
                    with evaluation_mode(self._state, layer):
                        values = call_layer(layer, values, seed)
                if self.is_last:
                    result.loss, result.weight, result.values = self._evaluation_values.compute_loss(
                        self.job, values, target, loss_seed, self._loss_traits
                    )
                    values = ()
            except LayerFailed as error:
                raise LayerFailed(f"in micro-batch {micro} of Job.evaluate, {error}") from error
        return tuple(detach_contiguous(v) for v in values), result

    def backward(self, step: int, micro: int, gradients: Gradients) -> Gradients:
        """B: returns the gradients of the inputs, and adds those of the weights to the sums."""
        tape = self.tapes.pop((step, micro))
        tape.bring_back()
        unreached: set[int] = set()
        for piece in self._pieces_reversed(tape):
            unreached |= self._backward_piece(piece, gradients)
            gradients = _take_input_gradients(piece.inputs)
        self._accumulate_exact()
        self._additions = count_additions(self.layers, unreached)
        self._last_tape = tape
        return gradients

    def backward_input(self, step: int, micro: int, gradients: Gradients) -> Gradients:
        """I: returns the gradients of the inputs. What W needs stays on the tape."""
        tape = self.tapes[step, micro]
        tape.bring_back()
        tape.input_backward_done = True
        if not any(x.requires_grad for x in tape.inputs):
            tape.pending_gradients = gradients
            return tuple(None for _ in tape.inputs)
        pieces = []
        for piece in self._pieces_reversed(tape):
            outputs, output_gradients = _outputs_with_gradients(piece.outputs, gradients)
            gradients = tuple(None for _ in piece.inputs)
            if outputs:
                with self._errors_name_layers(piece):
                    gradients, piece.weight_groups = split_backward.input_backward(
                        outputs, output_gradients, piece.inputs
                    )
            piece.outputs = ()  # otherwise the whole graph would stay alive
            pieces.append(piece)
        tape.pieces, tape.recompute_inputs = pieces, []
        return gradients

    def backward_weight(self, step: int, micro: int) -> None:
        """W: add the gradients of the weights to the sums."""
        tape = self.tapes.pop((step, micro))
        unreached: set[int] = set()
        if tape.pending_gradients is not None:
            gradients = tape.pending_gradients
            for piece in self._pieces_reversed(tape):
                unreached |= self._backward_piece(piece, gradients)
                gradients = _take_input_gradients(piece.inputs)
        else:
            with _ErrorsNameLayers([layer for piece in reversed(tape.pieces) for layer in piece.layers]):
                split_backward.weight_backward(*(piece.weight_groups for piece in tape.pieces))
            for piece in tape.pieces:
                unreached |= unreached_by_groups(piece.layers, piece.weight_groups)
        self._accumulate_exact()
        self._additions = count_additions(self.layers, unreached)

    def _forward_with_graph(self, tape: Tape, values: Activations, splits_backward: bool) -> Activations:
        piece = GraphPiece(values, values, [])
        short = splits_backward and any(x.requires_grad for x in values)
        for layer, seed in zip(self.layers, tape.seeds, strict=False):
            if piece.layers and (short or len(values) > 1):
                piece.outputs = values
                tape.pieces.append(piece)
                values = tuple(detach_contiguous(v) for v in values)
                piece = GraphPiece(values, (), [])
            values = call_layer(layer, values, seed)
            piece.layers.append(layer)
        piece.outputs = values
        tape.pieces.append(piece)
        return values

    def _forward_recompute(self, tape: Tape, values: Activations) -> Activations:
        """Keep the inputs of the layers. Each layer builds its graph and drops it: without a graph, kernels may
        differ."""
        for layer, seed in zip(self.layers, tape.seeds, strict=False):
            tape.recompute_inputs.append((layer, seed, values))
            before = [v._version for v in values]
            outputs = call_layer(layer, values, seed)
            if [v._version for v in values] != before:
                raise LayerFailed(
                    f"{layer.label} writes into its input at times: with recompute, always or never do so"
                )
            values = tuple(detach_contiguous(v) for v in outputs)
        return values

    def _compute_loss(self, tape: Tape, outputs: Activations, target: Any, result: MicroBatchResult) -> Activations:
        """Compute the loss. It extends the last piece; with recomputation it is a piece of its own."""
        if self.job.recompute:
            tape.pieces.append(GraphPiece(outputs, (), []))
        arguments = (self.job, outputs, target, tape.seeds[-1], self._loss_traits)
        if self._metric_values is None:
            loss, result.weight = compute_loss(*arguments)
        else:
            loss, result.weight, result.values = self._metric_values.compute_loss(*arguments)
        if self._loss_guard is not None:
            self._loss_guard.check_buffers()
        tape.pieces[-1].outputs = (loss,)
        result.loss = loss.detach()
        return (loss,)

    def _pieces_reversed(self, tape: Tape) -> Any:
        yield from reversed(tape.pieces)
        for layer, seed, values in reversed(tape.recompute_inputs):
            inputs = tuple(detach_contiguous(v) for v in values)
            with torch.enable_grad(), self._autocast(), buffer_statistics.RecordCollector():
                outputs = call_layer(layer, inputs, seed)
            yield GraphPiece(inputs, outputs, [layer])

    def _backward_piece(self, piece: GraphPiece, gradients: Gradients) -> set[int]:
        """Run the backward of a piece. Returns the layers whose weights are not in its graph."""
        outputs, output_gradients = _outputs_with_gradients(piece.outputs, gradients)
        if outputs:
            with self._errors_name_layers(piece):
                torch.autograd.backward(outputs, output_gradients)
        return unreached_by_graph(piece.layers, outputs)

    def _accumulate_exact(self) -> None:
        if self.job.exact:
            for layer in self.layers:
                layer.accumulator.add_micro_batch()

    def _errors_name_layers(self, piece: GraphPiece) -> _ErrorsNameLayers:
        return _ErrorsNameLayers(piece.layers)


@contextmanager
def evaluation_mode(state: ModelState, layer: LayerReplica) -> Iterator[None]:
    """Put a layer into evaluation mode, with its averaged weights if Job.evaluate_ema says so. It runs without
    torch.compile, which would compile it a second time in between two steps."""
    averages = state.averages_of(layer) if state.job.evaluate_ema else {}
    weights = {name: (layer.trainable[name], layer.trainable[name].data) for name in averages}
    compiled, layer.module._compiled_call_impl = layer.module._compiled_call_impl, None
    layer.module.eval()
    try:
        for name, (parameter, _) in weights.items():
            parameter.data = averages[name]
        yield
    finally:
        for parameter, current in weights.values():
            parameter.data = current
        layer.module.train()
        layer.module._compiled_call_impl = compiled


class _ErrorsNameLayers:
    """Turns an exception of a backward into one that names the layers of the piece."""

    def __init__(self, layers: Sequence[LayerReplica]) -> None:
        self.layers = layers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ASYNC_USER_EXCEPTIONS) and not isinstance(error, CulmError):
            names = [layer.label for layer in self.layers] or ["the loss"]
            where = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            cause = error.__cause__ or error
            raise LayerFailed(
                f"the backward of {where} raised {type(cause).__name__}{message_suffix(cause)}"
            ) from error


def _zeros_like_input(described: LayerInput, device: torch.device) -> Tensor:
    zeros = torch.zeros(described.shape, dtype=getattr(torch, described.dtype), device=device)
    return zeros.requires_grad_(described.requires_grad)


def _outputs_with_gradients(outputs: Activations, gradients: Gradients) -> tuple[list[Tensor], list[Tensor] | None]:
    """The outputs that a gradient flows into, and these gradients; None for the loss, which has no gradient given."""
    if not gradients:
        return [o for o in outputs if o.requires_grad], None
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    return [o for o, _ in pairs], [g for _, g in pairs]


def _take_input_gradients(inputs: Activations) -> Gradients:
    """Take the gradients that a backward left at the leaves."""
    gradients = tuple(x.grad if x.requires_grad else None for x in inputs)
    for x in inputs:
        if x.requires_grad:
            x.grad = None
    return gradients
