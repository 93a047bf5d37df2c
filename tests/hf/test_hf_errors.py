"""Wrong arguments of culm.hf.parts and broken model folders end in one sentence that names the fix."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hf.tiny_hf import VOCAB, tiny_model

import culm.hf
from culm.errors import JobError


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(JobError) as caught:
        culm.hf.parts(*args, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"inputs": ("input_id",)}, ["'input_id'", "did you mean 'input_ids'"]),
        ({"inputs": "attention_mask"}, ["attention_mask", "'input_ids'", "add it"]),
        ({"freeze": "model.layer"}, ["'model.layer'", "model.layers"]),
        ({"task": "translation"}, ["'translation'", "causal-lm"]),
        ({"adapter": {"r": 4}}, ["dict", "LoraConfig"]),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], words: list[str]) -> None:
    pytest.importorskip("peft")
    assert all(word in refusal(tiny_model("llama"), **options) for word in words)


def test_what_is_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tiny_model("llama")
    assert "class LlamaForCausalLM" in refusal(type(model))
    assert "meta device" in refusal(tiny_model("llama").to("meta"))
    for name in ("org/name", "gpt2", str(tmp_path / "nothing")):
        assert repr(name) in refusal(name) and "downloads nothing" in refusal(name)
    assert "is not a model for 'image-classification'" in refusal(model.config, "image-classification")


def test_a_model_in_the_local_cache_of_hugging_face_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    tiny_model("llama").save_pretrained(snapshot)
    block = culm.hf.parts("org/name")["layers"][1]()
    wanted = tiny_model("llama").model.layers[0].mlp.up_proj.weight
    assert torch.equal(block.state_dict()["model.layers.0.mlp.up_proj.weight"], wanted)


def _change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "cannot be used"]),
        (lambda folder: _change_config(folder, model_type="nosuch"), ["config.json", "nosuch"]),
        (lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(), ["model-00002", "copy the whole"]),
        (lambda folder: (folder / "model-00002-of-00003.safetensors").write_bytes(b"x"), ["model-00002", "read"]),
        (lambda folder: _change_config(folder, vocab_size=99), ["lm_head.weight", f"({VOCAB}, 16)", "(99, 16)"]),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), ["model.safetensors", "save_pretrained"]),
    ],
)
def test_a_broken_folder_is_refused_before_the_run(
    damage: Callable[[Path], object], words: list[str], tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    damage(tmp_path)
    text = refusal(tmp_path)
    assert all(word in text for word in words), text


def test_a_label_beyond_the_classes_is_refused() -> None:
    row = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor(3)}
    with pytest.raises(JobError, match=r"label 3.*3 classes"):
        culm.hf.parts(tiny_model("bert classification"))["collate"]([row])
    tokens = {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([1, -5])}
    with pytest.raises(JobError, match="label -5"):
        culm.hf.parts(tiny_model("llama"))["collate"]([tokens])
