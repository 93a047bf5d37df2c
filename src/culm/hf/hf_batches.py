"""Items of a data set -> a micro-batch for a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from culm.errors import JobError

IGNORED = -100
"""The label that does not count, as in transformers."""
_PADDING = {"attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "decoder_attention_mask": 0}


@dataclass(frozen=True)
class Collate:
    """Collates items, and pads sequences on the right to the longest one of the micro-batch.

    An item is (input, target), where the target of a language model is shifted already; or a mapping with the names of
    transformers (input_ids, labels, ...), where labels of a causal language model are not shifted yet.
    """

    inputs: tuple[str, ...]
    pad: int
    vocab: int | None
    classes: int | None
    """Labels are below it; None: they are no numbers of classes."""
    shifts_labels: bool
    """A causal language model: position t predicts token t + 1."""
    start: int | None
    """An encoder-decoder: the first token of the decoder's input, which is the target shifted to the right."""

    def __call__(self, items: list[Any]) -> tuple[tuple[Tensor, ...] | Tensor, Any]:
        pairs = [self._from_mapping(item) if isinstance(item, Mapping) else self._from_pair(item) for item in items]
        target = _stack([target for _, target in pairs], IGNORED)
        columns = [
            _stack([inputs[name] for inputs, _ in pairs], _PADDING.get(name, self.pad))
            for name in self.inputs
            if name in pairs[0][0]
        ]
        if self.start is not None and "decoder_input_ids" not in pairs[0][0]:
            columns.insert(self.inputs.index("decoder_input_ids"), self._decoder_input(target))
        self._check_ids(dict(zip(self.inputs, columns, strict=True)))
        self._check_labels(target)
        return (columns[0] if len(columns) == 1 else tuple(columns)), target

    def _from_pair(self, item: Any) -> tuple[dict[str, Any], Any]:
        if not isinstance(item, Sequence) or len(item) != 2:
            raise JobError(f"an item of the data is a {type(item).__name__}: use (input, target), or a mapping")
        values = item[0] if isinstance(item[0], tuple | list) and isinstance(item[0][0], Tensor) else (item[0],)
        names = [n for n in self.inputs if n != "decoder_input_ids" or len(values) == len(self.inputs)]
        if len(values) != len(names):
            raise JobError(
                f"the input of an item has {len(values)} tensors and culm.hf.parts expects {len(names)} "
                f"({', '.join(names)}): name them in order, as in "
                "culm.hf.parts(model, inputs=('input_ids', 'attention_mask'))"
            )
        return dict(zip(names, map(_tensor, values), strict=True)), _tensor(item[1])

    def _from_mapping(self, item: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        label = next((name for name in ("labels", "label") if name in item), None)
        if label is None:
            raise JobError(f"an item of the data has {', '.join(item)} but no 'labels': add what is to be predicted")
        unknown = [name for name in item if name not in (*self.inputs, label)]
        if unknown:
            raise JobError(
                f"an item of the data has {unknown[0]!r}, which culm.hf.parts does not expect: add it, as in "
                f"culm.hf.parts(model, inputs=({', '.join(map(repr, (*self.inputs, unknown[0])))})), or remove it"
            )
        missing = [n for n in self.inputs if n not in item and n != "decoder_input_ids"]
        if missing:
            raise JobError(f"an item of the data has no {missing[0]!r}: it has {', '.join(item)}")
        target = _tensor(item[label])
        if self.shifts_labels:
            target = torch.cat([target[1:], target.new_full((1,), IGNORED)])
        return {name: _tensor(item[name]) for name in self.inputs if name in item}, target

    def _decoder_input(self, target: Tensor) -> Tensor:
        assert self.start is not None
        shifted = torch.cat([target.new_full((len(target), 1), self.start), target[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == IGNORED, self.pad)

    def _check_ids(self, columns: Mapping[str, Tensor]) -> None:
        for name in ("input_ids", "decoder_input_ids"):
            ids = columns.get(name)
            if self.vocab is not None and ids is not None and ids.numel() and int(ids.max()) >= self.vocab:
                raise JobError(
                    f"the data has the token id {int(ids.max())} in {name}, and the model's vocabulary has "
                    f"{self.vocab} tokens: use the model's own tokenizer, or resize its embeddings"
                )

    def _check_labels(self, target: Tensor) -> None:
        if self.classes is None or target.is_floating_point() or not target.numel():
            return
        wrong = target[((target < 0) & (target != IGNORED)) | (target >= self.classes)]
        if wrong.numel():
            raise JobError(
                f"the data has the label {int(wrong[0])}, and the model has {self.classes} classes: use labels from 0 "
                f"to {self.classes - 1}, or {IGNORED} for none"
            )


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _stack(values: Sequence[Tensor], pad: int) -> Tensor:
    """One tensor of several; sequences of different lengths are padded."""
    if len({value.shape for value in values}) == 1:
        return torch.stack(list(values))
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True, padding_value=pad)
