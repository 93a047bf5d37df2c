"""Mistakes in a job are one sentence that names the field, before any node starts."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import tiny_jobs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from culm.errors import JobError, LayerFailed
from culm.job import Job
from culm.models import RandomTokens, gpt, gpt_loss
from culm.runtime.compute.device import select_device
from culm.runtime.compute.model_check import check_model
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.segment import Segment
from culm.testing import reference


def refusal(**fields: Any) -> str:
    with pytest.raises(JobError) as caught:
        check_model(tiny_jobs.job(**fields))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_optimizer_object_instead_of_a_factory() -> None:
    text = refusal(optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    assert text.startswith("Job.optimizer is an object of class AdamW")
    assert "lambda parameters: torch.optim.AdamW(parameters" in text


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(device="cuda").startswith("Job.device is 'cuda', and torch finds no GPU")
    assert select_device(tiny_jobs.job(device="auto")).type == "cpu"


class _Late:
    """Tokens of which only the last item is beyond the vocabulary."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        ids = torch.full((4,), 99 if index == 7 else 1)
        return ids, ids


@pytest.mark.parametrize("data", [RandomTokens(vocab=200, length=4, count=32), _Late()])
def test_a_token_id_beyond_the_vocabulary(data: Any) -> None:
    layers = gpt("nano", width=8, blocks=1, heads=1, context=4, vocab=16)
    text = refusal(layers=layers, loss=gpt_loss, data=data)
    assert " of Job.data has the token id " in text
    assert "the embedding in layer 0 has 16 rows" in text
    check_model(tiny_jobs.job(layers=layers, loss=gpt_loss, data=RandomTokens(vocab=16, length=4, count=32)))


def test_token_ids_of_streams_evaluations_and_collated_items_are_checked() -> None:
    fields: dict[str, Any] = {
        "layers": gpt("nano", width=8, blocks=1, heads=1, context=4, vocab=16),
        "loss": gpt_loss,
        "data": RandomTokens(vocab=16, length=4, count=32),
    }
    late = [_Late()[index] for index in range(8)]
    assert "item 7 of Job.evaluate has the token id 99" in refusal(**fields, evaluate=_Late(), evaluate_every=1)
    assert "item 7 of Job.data has the token id 99" in refusal(**{**fields, "data": _Endless(late)}, global_batch=8)
    check_model(tiny_jobs.job(**{**fields, "data": _Endless(late[:7])}))
    records = [{"ids": ids} for ids, _ in [*late[:7] * 3, late[7]]]
    text = refusal(**{**fields, "data": records}, collate=lambda items: (torch.stack([i["ids"] for i in items]),) * 2)
    assert "item 21 of Job.data has the token id 99" in text


class _Endless:
    """A stream of the same items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)


class _Hangs:
    """A data set whose third item never comes."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            self.gate.wait()
        return torch.ones(4, dtype=torch.long), torch.ones(4, dtype=torch.long)


def test_a_data_set_that_hangs_before_the_run_is_named() -> None:
    data = _Hangs()
    layers = gpt("nano", width=8, blocks=1, heads=1, context=4, vocab=16)
    text = refusal(layers=layers, loss=gpt_loss, data=data, loader_timeout=0.3, global_batch=2, micro_batch=1)
    data.gate.set()
    assert re.search(r"Job\.data did not deliver (item 2|its first items) within 0\.3 s", text)


def test_a_bad_item_of_the_evaluation_set_is_named_as_such() -> None:
    wide = [(torch.zeros(7), torch.zeros(7))] * 4
    assert refusal(evaluate=wide, evaluate_every=1).startswith("the layers do not run on the items of Job.evaluate")
    uneven = [(torch.zeros(4), torch.zeros(4)), (torch.zeros(3), torch.zeros(4))]
    assert refusal(evaluate=uneven, evaluate_every=1).startswith("the collation of Job.evaluate raised")
    job = tiny_jobs.job(evaluate=[*tiny_jobs.DATA[:2], *wide[:2]], evaluate_every=1)
    state = ModelState(job, range(4))
    with pytest.raises(LayerFailed, match=r"in micro-batch 1 of Job\.evaluate, layer 0"):
        Segment(job, state, range(4)).evaluate(1, (torch.zeros(2, 7),), torch.zeros(2, 7))


def test_wrong_names_in_the_initial_file_show_the_closest(tmp_path: Path) -> None:
    file = tmp_path / "init.safetensors"
    weights = reference(tiny_jobs.job(steps=0)).snapshot.parameters
    save_file({name.replace("weight", "wieght"): value for name, value in weights.items()}, file)
    assert "did you mean '0.wieght'" in refusal(init=str(file))
    save_file({f"model.{name}": value for name, value in weights.items()}, file)
    assert "culm.hf.parts" in refusal(init=str(file))


def test_a_transformers_model_as_layers_points_to_culm_hf() -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    config = transformers.GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=8, n_positions=8)
    with pytest.raises(JobError, match=r"culm\.hf\.parts\(model\)"):
        tiny_jobs.job(layers=transformers.GPT2LMHeadModel(config))


class Unused(nn.Module):
    pass


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": Unused}, ["Job.layers is the class Unused", "layers=["]),
        ({"layers": [nn.Linear(4, 3, device="meta")]}, ["Job.layers[0]", "'weight'", "meta device"]),
        ({"loss": nn.CrossEntropyLoss}, ["Job.loss is the class CrossEntropyLoss", "CrossEntropyLoss()"]),
        ({"data": "train.jsonl"}, ["Job.data is 'train.jsonl'", "culm.data"]),
        ({"data": None}, ["Job.data is None"]),
        ({"data": DataLoader(TensorDataset(torch.arange(4)), batch_size=2)}, ["DataLoader", "batch_size=None"]),
        ({"recompute": "yes"}, ["Job.recompute is 'yes'", "True or False"]),
        ({"global_batchs": 3}, ["global_batchs", "did you mean 'global_batch'?"]),
    ],
)
def test_a_field_of_a_wrong_kind(fields: dict[str, Any], words: list[str]) -> None:
    text = refusal(**fields)
    assert all(word in text for word in words), text


def test_a_job_without_its_required_fields_names_them() -> None:
    with pytest.raises(JobError, match="needs loss, optimizer, data, global_batch, micro_batch, steps"):
        Job(layers=[nn.Linear(1, 1)])  # type: ignore[call-arg]


def _classified(labels: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.ones(4), torch.tensor(label)) for label in labels]


def test_a_label_beyond_the_classes_of_the_loss() -> None:
    fields: dict[str, Any] = {"layers": [nn.Linear(4, 3)], "loss": nn.CrossEntropyLoss(ignore_index=7)}
    assert "label 3, and the loss has 3 classes: use labels from 0 to 2, or 7 for none" in refusal(
        **fields, data=_classified([0, 3, 7, 1] * 8)
    )
    assert refusal(**fields, data=_classified([0] * 31 + [-1])).startswith("item 31 of Job.data has the label -1")
    wrong = refusal(**fields, data=_classified([0] * 32), evaluate=_classified([0, 9]), evaluate_every=1)
    assert wrong.startswith("item 1 of Job.evaluate has the label 9")
    check_model(tiny_jobs.job(**fields, data=_classified([0, 7, 1, 2] * 8)))


def test_labels_that_the_loss_leaves_out_may_be_anything() -> None:
    """Only the labels that cross entropy gets as a whole are known to count."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output[1:], target[1:])

    check_model(tiny_jobs.job(layers=[nn.Linear(4, 3)], loss=loss, data=_classified([99] * 32)))


def test_a_loss_that_fails_in_an_evaluation_says_so() -> None:
    job = tiny_jobs.job(layers=[nn.Linear(4, 3)], loss=nn.CrossEntropyLoss(), data=_classified([0] * 32))
    segment = Segment(job, ModelState(job, [0]), [0])
    with pytest.raises(LayerFailed, match=r"micro-batch 2 of Job\.evaluate, the loss raised"):
        segment.evaluate(2, (torch.ones(2, 4),), torch.tensor([0, 9]))
