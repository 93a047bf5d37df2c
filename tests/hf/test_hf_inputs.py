"""Padding, masks, packed sequences and labels of Hugging Face models: outputs and losses equal those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.hf.tiny_hf import LENGTH, VOCAB, items, task_of, tiny_model
from torch import Tensor

import culm.hf
from culm.errors import JobError

pytestmark = pytest.mark.usefixtures("one_thread")


def through_layers(fields: dict[str, Any], batch: list[Any]) -> tuple[Any, Tensor]:
    """(output of the last layer, target) of a batch of items."""
    inputs, target = fields["collate"](batch)
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    for factory in fields["layers"]:
        output = factory().eval()(*values)
        values = output if isinstance(output, tuple) else (output,)
    return values if len(values) > 1 else values[0], target


def padded(count: int, *, left: bool = False) -> dict[str, Tensor]:
    """A batch with sequences of several lengths, and its mask."""
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(1, count):
        gone = slice(0, row) if left else slice(LENGTH - row, LENGTH)
        mask[row, gone], ids[row, gone] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def rows(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value[i] for name, value in batch.items()} for i in range(len(batch["labels"]))]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral", "gpt2", "gpt-neox", "mixtral", "bert", "t5"])
def test_a_padded_batch_with_its_mask_gives_the_loss_of_the_model(family: str, left: bool) -> None:
    model = tiny_model(family).eval()
    batch = padded(3, left=left)
    fields = culm.hf.parts(model, task_of(family), inputs=("input_ids", "attention_mask"))
    output, target = through_layers(fields, rows(batch))
    total, weight = fields["loss"](output, target)
    assert torch.allclose(total / weight, model(**batch).loss, rtol=1e-5)


def test_packed_sequences_are_separated_by_their_position_ids() -> None:
    model = tiny_model("llama").eval()
    ids = torch.randint(3, VOCAB, (1, 6), generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    fields = culm.hf.parts(model, inputs=("input_ids", "position_ids"))
    packed, _ = through_layers(fields, [((ids[0], positions[0]), ids[0])])
    alone = torch.cat([model(ids[:, :3]).logits, model(ids[:, 3:]).logits], dim=1)
    assert torch.allclose(packed, alone, atol=1e-6)
    assert not torch.allclose(packed, model(ids).logits, atol=1e-4)


def test_a_micro_batch_is_padded_to_its_longest_item_and_padding_does_not_count() -> None:
    fields = culm.hf.parts(tiny_model("llama"))
    long, short = torch.arange(3, 9), torch.arange(3, 6)
    ids, target = fields["collate"]([{"input_ids": row, "labels": row} for row in (long, short)])
    assert ids.tolist() == [[3, 4, 5, 6, 7, 8], [3, 4, 5, 0, 0, 0]]
    assert target.tolist() == [[4, 5, 6, 7, 8, -100], [4, 5, -100, -100, -100, -100]]
    assert fields["loss"](torch.zeros(2, 6, VOCAB), target)[1] == 7


def test_a_pair_has_shifted_targets_already() -> None:
    fields = culm.hf.parts(tiny_model("llama"))
    ids, target = fields["collate"]([(torch.arange(3, 6), torch.arange(4, 7))])
    assert (ids.tolist(), target.tolist()) == ([[3, 4, 5]], [[4, 5, 6]])


def test_an_encoder_decoder_gets_the_labels_shifted_to_the_right() -> None:
    fields = culm.hf.parts(tiny_model("t5"), "seq2seq-lm")
    row = {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([7, 8, -100])}
    (_, decoder), target = fields["collate"]([row])
    assert decoder.tolist() == [[0, 7, 8]]
    assert target.tolist() == [[7, 8, -100]]


def test_a_model_of_several_labels_or_numbers_has_the_loss_of_transformers() -> None:
    for labels, problem in [
        (torch.tensor([[1.0, 0.0, 1.0]] * 2), "multi_label_classification"),
        (torch.tensor([0, 2]), "single_label_classification"),
    ]:
        model = tiny_model("bert classification").eval()
        model.config.problem_type = problem
        fields = culm.hf.parts(model)
        batch = [{**item, "labels": label} for item, label in zip(items("bert classification"), labels, strict=False)]
        output, target = through_layers(fields, batch)
        total, weight = fields["loss"](output, target)
        ids = torch.stack([item["input_ids"] for item in batch])
        assert torch.allclose(total / weight, model(input_ids=ids, labels=labels).loss)


@pytest.mark.parametrize("trained_before", [True, False])
@pytest.mark.parametrize(
    ("family", "place", "rate"), [("gpt2", 0, "embd_pdrop"), ("bert classification", -1, "hidden_dropout_prob")]
)
def test_dropout_outside_of_the_blocks_follows_the_mode_of_the_layer(
    family: str, place: int, rate: str, trained_before: bool
) -> None:
    """from_pretrained returns models in evaluation mode, a constructor returns them in training mode."""
    config = tiny_model(family).config
    setattr(config, rate, 0.5)
    model = type(tiny_model(family))(config).train(trained_before)
    layer = culm.hf.parts(model)["layers"][place]()
    given = torch.ones(1, 4, dtype=torch.long) if place == 0 else torch.ones(1, 4, 16)
    assert not torch.equal(layer.train()(given), layer(given))
    assert torch.equal(layer.eval()(given), layer(given))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"input_ids": torch.tensor([1, 99]), "labels": torch.tensor([1, 2])}, ["99", str(VOCAB), "tokenizer"]),
        (
            {"input_ids": torch.tensor([1]), "attention_mask": torch.tensor([1]), "labels": torch.tensor([1])},
            ["inputs=("],
        ),
        ({"input_ids": torch.tensor([1])}, ["labels"]),
        ({"ids": torch.tensor([1]), "labels": torch.tensor([1])}, ["'ids'"]),
        (((torch.tensor([1]), torch.tensor([1])), torch.tensor([1])), ["2 tensors", "input_ids"]),
        (torch.tensor([1]), ["(input, target)"]),
    ],
)
def test_a_wrong_item_is_refused_with_the_fix(item: Any, words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        culm.hf.parts(tiny_model("llama"))["collate"]([item])
    assert all(word in str(caught.value) for word in words), caught.value
