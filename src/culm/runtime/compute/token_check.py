"""Find token ids beyond the vocabulary before a run: on a GPU they would end it with an error that names nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from culm.errors import JobError
from culm.runtime.compute.batch_loading import Activations, pack_activations
from culm.runtime.compute.model_state import build_layer
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Job

_SAMPLED_ITEMS = 64
"""Items besides the first micro-batch that are looked at, evenly over the data."""


def check_token_ids(job: Job, inputs: Activations) -> None:
    """Raises JobError if an input of the first layer has an id that its embedding does not have. `inputs`: of the first
    micro-batch."""
    if not any(_is_ids(value) for value in inputs):
        return
    for position, size in _embedding_sizes(job, inputs).items():
        _check("the first micro-batch", inputs[position], size)
        stride = max(1, len(job.data) // _SAMPLED_ITEMS)
        for index in range(0, len(job.data), stride):
            values = _item_inputs(job, index)
            if len(values) == len(inputs) and _is_ids(values[position]):
                _check(f"item {index}", values[position], size)


def _is_ids(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.numel() > 0


def _check(where: str, ids: Tensor, size: int) -> None:
    if int(ids.max()) >= size or int(ids.min()) < 0:
        wrong = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
        raise JobError(
            f"Job.data has the token id {wrong} in {where}, and the embedding in layer 0 has {size} rows: use a "
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


def _item_inputs(job: Job, index: int) -> Activations:
    """The inputs of an item; empty if it is not a pair of tensors, which only the collation understands."""
    try:
        item = job.data[index]
    except ASYNC_USER_EXCEPTIONS:  # the step that needs the item reports it
        return ()
    if not isinstance(item, tuple | list) or len(item) != 2:
        return ()
    try:
        return pack_activations(item[0], "the input")
    except JobError:
        return ()
