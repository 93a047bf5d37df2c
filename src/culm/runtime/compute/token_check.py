"""Find token ids beyond the vocabulary, and labels beyond the classes, before a run: on a GPU they would end it with an
error that names nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from culm.data.stream import Stream
from culm.errors import JobError, LayerFailed
from culm.runtime.compute.batch_loading import Activations, MicroBatch, load_items
from culm.runtime.compute.label_check import LabelRange
from culm.runtime.compute.model_state import build_layer
from culm.runtime.compute.user_code import call_within, late_message
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Job

_CPU = torch.device("cpu")
_SAMPLED_ITEMS = 64
"""Items besides the first micro-batch that are looked at, evenly over the data."""
_SAMPLED_SAMPLES = 16
"""The same where only labels are checked: items may be images."""


def check_token_ids(job: Job, inputs: Activations) -> dict[int, int]:
    """Raises JobError if an input of the first micro-batch has an id that the embedding in the first layer does not
    have. Returns the rows of that embedding, by position of the input."""
    if not any(_is_ids(value) for value in inputs):
        return {}
    sizes = _embedding_sizes(job, inputs)
    for position, size in sizes.items():
        _check("the first micro-batch of Job.data", inputs[position], size)
    return sizes


def check_items(job: Job, sizes: Mapping[int, int], labels: LabelRange) -> None:
    """Raises JobError for an item with an id or a label that the model does not have, or that the collation refuses.
    `sizes`: what `check_token_ids` returned."""
    if not sizes and labels.classes is None:
        return
    for field in ("data", "evaluate") if job.evaluate_every else ("data",):
        for index in _sampled_indices(getattr(job, field), _SAMPLED_ITEMS if sizes else _SAMPLED_SAMPLES):
            item = _load_item(job, field, index)
            if item is None:
                continue
            where = f"item {index} of Job.{field}"
            for position, size in sizes.items():
                if position < len(item.inputs) and _is_ids(item.inputs[position]):
                    _check(where, item.inputs[position], size)
            labels.check(where, item.target)


def _sampled_indices(data: Any, count: int) -> list[int]:
    """Items evenly over a data set, and its last one; of a stream, those of the first step."""
    if isinstance(data, Stream):
        return list(range(min(data.block, count)))
    last = len(data) - 1
    return sorted({*range(0, last, max(1, len(data) // count)), last})


def _is_ids(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.numel() > 0


def _check(where: str, ids: Tensor, size: int) -> None:
    if int(ids.max()) >= size or int(ids.min()) < 0:
        wrong = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
        raise JobError(
            f"{where} has the token id {wrong}, and the embedding in layer 0 has {size} rows: use a "
            "vocabulary that has all tokens of the data"
        )


def _embedding_sizes(job: Job, inputs: Activations) -> dict[int, int]:
    """By position of an input that an nn.Embedding of the first layer gets as it is: the rows of that embedding.

    Weights are fake, the inputs are not, so that they can be recognised. Empty if the layer does not run; the check of
    the layers reports why.
    """
    found: dict[int, int] = {}

    def note(module: nn.Embedding, arguments: tuple[Any, ...]) -> None:
        for position, value in enumerate(inputs):
            if arguments and arguments[0] is value and _is_ids(value):
                found[position] = min(module.num_embeddings, found.get(position, module.num_embeddings))

    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            layer = build_layer(job, 0)
            for module in layer.modules():
                if isinstance(module, nn.Embedding):
                    module.register_forward_pre_hook(note)
            with torch.no_grad():
                layer(*inputs)
        except ASYNC_USER_EXCEPTIONS:
            return {}
    return found


def _load_item(job: Job, field: str, index: int) -> MicroBatch | None:
    """An item after collation; None if user code fails: the step that needs the item reports it. Raises JobError if
    culm's own data set or collation refuses the item, or if it hangs."""
    try:
        late = f"Job.{field} did not deliver item {index} {late_message(job)}"
        return call_within(job.loader_timeout, lambda: load_items(job, field, [index], _CPU), late)
    except LayerFailed as error:
        if isinstance(error.__cause__, JobError):
            raise JobError(str(error)) from error
        return None
