"""Fine-tuning: weights from a folder, frozen layers, adapters, instructions, and exports that transformers loads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cached_runs import cached_setup, run_with_faults
from tests.hf.tiny_hf import FAMILIES, items, tiny_job, tiny_model

import culm
import culm.hf
from culm.errors import JobError, UsageError
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.segment import Segment
from culm.testing import Faults, reference
from culm.testing.simulated_cluster import run_prepared

pytestmark = pytest.mark.usefixtures("one_thread")


def train_to_folder(job: culm.Job, folder: Path, **shape: Any) -> Any:
    """A simulated run that writes its last checkpoint."""
    setup = cached_setup(job, out=str(folder), **({"pipelines": 1, "stages": 2} | shape))
    return run_prepared(job, setup, cost=lambda *_: 0.01, latency=0.001)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_comes_back_through_from_pretrained(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    job = tiny_job(model, family, steps=2)
    train_to_folder(job, tmp_path / "run")
    report = culm.hf.export_hf(tmp_path / "run", tmp_path / "model")
    assert report.step == 2
    loaded, info = type(model).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    trained = {n.partition(".")[2]: v for n, v in reference(job).snapshot.parameters.items()}
    found = loaded.state_dict()
    assert trained.keys() <= found.keys()
    assert all(torch.equal(found[name], value) for name, value in trained.items())
    assert any(not torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_an_export_has_config_tokenizer_and_generation_config(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama")
    fields = culm.hf.parts(model, tokenizer=tokenizer)
    train_to_folder(tiny_job(model, "llama", steps=1, files=fields["files"]), tmp_path / "run")
    culm.hf.export_hf(tmp_path / "run", tmp_path / "model")
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded.encode("a b") == tokenizer.encode("a b")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == 2
    with pytest.raises(UsageError, match="exists"):
        culm.hf.export_hf(tmp_path / "run", tmp_path / "model")


def test_a_run_of_other_layers_has_no_hugging_face_export(tmp_path: Path) -> None:
    from tests import tiny_jobs

    train_to_folder(tiny_jobs.job(), tmp_path)
    with pytest.raises(UsageError, match=r"culm\.hf\.parts"):
        culm.hf.export_hf(tmp_path, tmp_path / "model")


def test_missing_and_unused_tensors_are_reported_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model("bert").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "culm.hf"):
        culm.hf.parts(tmp_path, "sequence-classification")
    lines = [record.getMessage() for record in caplog.records]
    assert f"classifier.weight is not in {tmp_path}: it is newly initialised" in lines
    assert any(line.startswith("cls.predictions.bias") and "not used" in line for line in lines)
    assert not any("word_embeddings" in line for line in lines)


def test_new_tensors_depend_on_the_seed_of_the_job_and_old_ones_do_not(tmp_path: Path) -> None:
    tiny_model("bert").save_pretrained(tmp_path)
    fields = culm.hf.parts(tmp_path, "sequence-classification")
    data = items("bert classification")
    last = len(fields["layers"]) - 1
    states = [
        ModelState(tiny_job(tmp_path, "bert classification", seed=seed, data=data), [1, last]) for seed in (0, 0, 1)
    ]
    heads = [state.parameters()[f"{last}.classifier.weight"] for state in states]
    blocks = [state.parameters()["1.bert.encoder.layer.0.output.dense.weight"] for state in states]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert torch.equal(blocks[0], blocks[2])


def test_a_config_gives_random_weights() -> None:
    job = tiny_job(tiny_model("llama").config, "llama", steps=2)
    run_with_faults(job, Faults().kill(1, at="1F0", step=1), pipelines=1, stages=2, strategy="shadow")


FROZEN = ("model.embed_tokens", "model.layers.0", "model.layers.1")


def test_leading_frozen_layers_have_no_backward_no_optimizer_state_and_no_gradient_sums() -> None:
    job = tiny_job(tiny_model("llama"), "llama", **culm.hf.parts(tiny_model("llama"), freeze=FROZEN), steps=3)
    state = ModelState(job, range(len(job.layers)))
    assert [bool(layer.trainable) for layer in state.layers.values()] == [False, False, False, True, True]
    assert [layer.unit.optimizer is None for layer in state.layers.values()] == [True, True, True, False, False]
    assert [layer.accumulator.total.numel() > 0 for layer in state.layers.values()] == [False] * 3 + [True] * 2
    ids = torch.ones(2, 4, dtype=torch.long)
    (hidden,), _ = Segment(job, state, [0, 1, 2]).forward(0, 0, (ids,))
    assert not hidden.requires_grad  # so the next stage computes and sends no gradient for it
    later = Segment(job, state, [3, 4])
    later.forward(0, 0, (hidden,), torch.ones(2, 4, dtype=torch.long))
    assert later.backward(0, 0, ()) == (None,)


def test_frozen_layers_stay_as_they_are_through_a_kill() -> None:
    model = tiny_model("llama")
    job = tiny_job(model, "llama", **culm.hf.parts(model, freeze=FROZEN), steps=4)
    run_with_faults(job, Faults().kill(1, at="1F0", step=2), pipelines=1, stages=3, strategy="shadow")
    run_with_faults(job, Faults().kill(0, at="0F0", step=1), pipelines=2, stages=2)
    trained = {n.partition(".")[2]: v for n, v in reference(job).snapshot.parameters.items()}
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, trained[name])}
    assert moved == {n for n, _ in model.named_parameters() if not n.startswith(FROZEN)}


def test_a_name_to_freeze_that_does_not_exist_is_refused_with_close_ones() -> None:
    with pytest.raises(JobError, match=r"model\.layers\.0"):
        culm.hf.parts(tiny_model("llama"), freeze=["model.layer.0"])


def lora_model(**options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="the extra 'hf' is not installed: pip install 'culm[hf]'")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(tiny_model("llama"), config)


def test_a_lora_run_saves_and_exports_the_adapter_alone(tmp_path: Path) -> None:
    import peft
    from safetensors.torch import load_file

    job = tiny_job(lora_model(), "llama", steps=3)
    train_to_folder(job, tmp_path / "run")
    saved = {name for file in (tmp_path / "run").rglob("*.safetensors") for name in load_file(file)}
    assert saved and all("lora_" in name for name in saved)
    culm.hf.export_hf(tmp_path / "run", tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter").get_base_model().state_dict()
    trained = {n.partition(".")[2]: v for n, v in reference(job).snapshot.parameters.items()}
    assert any(value.any() for name, value in trained.items() if "lora_B" in name)
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())


def test_a_lora_run_on_tied_embeddings_resumes_and_is_exported(tmp_path: Path) -> None:
    """The tied parameter is frozen, so that no checkpoint has it."""
    import peft

    def job(steps: int) -> culm.Job:
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(3)
        return tiny_job(peft.get_peft_model(tiny_model("llama tied"), config), "llama tied", steps=steps)

    train_to_folder(job(2), tmp_path / "first")
    run = train_to_folder(job(3), tmp_path / "second", resume=str(tmp_path / "first"))
    assert run.state_sha256 == reference(job(3)).state_sha256
    culm.hf.export_hf(tmp_path / "second", tmp_path / "adapter")
    loaded = (
        peft.PeftModel.from_pretrained(tiny_model("llama tied"), tmp_path / "adapter").get_base_model().state_dict()
    )
    trained = {n.partition(".")[2]: v for n, v in reference(job(3)).snapshot.parameters.items() if "lora_" in n}
    assert trained and all(torch.equal(loaded[name], value) for name, value in trained.items())


def test_a_lora_run_equals_the_plain_loop_and_survives_kills() -> None:
    model = lora_model()
    job = tiny_job(model, "llama", steps=6, micro_batch=4, exact=False)
    from tests.hf.test_hf_families import plain_loop

    assert reference(job).losses == pytest.approx(plain_loop(lora_model(), job, "llama"), rel=1e-4)
    exact = tiny_job(model, "llama", steps=4)
    run_with_faults(exact, Faults().kill(3, at="1B1", step=2), pipelines=2, stages=2)
    run_with_faults(exact, Faults().kill(2, at="2F1", step=2), pipelines=1, stages=3, strategy="shadow")


def test_a_lora_run_resumes_from_its_adapter(tmp_path: Path) -> None:
    whole = tiny_job(lora_model(), "llama", steps=4)
    train_to_folder(tiny_job(lora_model(), "llama", steps=2), tmp_path / "first")
    run = train_to_folder(whole, tmp_path / "second", resume=str(tmp_path / "first"))
    assert run.state_sha256 == reference(whole).state_sha256


def test_lora_is_added_to_weights_that_each_node_reads_for_itself(tmp_path: Path) -> None:
    import peft

    tiny_model("llama").save_pretrained(tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    fields = culm.hf.parts(tmp_path, adapter=config)
    block = fields["layers"][1]().state_dict()
    path = "model.layers.0.self_attn.q_proj"
    assert torch.equal(block[f"{path}.base_layer.weight"], tiny_model("llama").state_dict()[f"{path}.weight"])
    assert block[f"{path}.lora_A.default.weight"].any() and not block[f"{path}.lora_B.default.weight"].any()
    run_with_faults(
        tiny_job(tmp_path, "llama", **fields, steps=3), Faults().kill(1, at="1F0", step=1), pipelines=2, stages=2
    )


def test_modules_that_an_adapter_trains_as_a_whole_start_from_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They were initialised at random; a tensor of the adapter, which no folder has, needs no line of the log."""
    import peft

    tiny_model("llama").save_pretrained(tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with caplog.at_level(logging.WARNING, "culm.hf"):
        fields = culm.hf.parts(tmp_path, adapter=config)
    head, wanted = fields["layers"][-1]().state_dict(), tiny_model("llama").state_dict()["lm_head.weight"]
    for name in ("lm_head.original_module.weight", "lm_head.modules_to_save.default.weight"):
        assert torch.equal(head[name], wanted)
    assert not caplog.messages


def test_prompt_tuning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(JobError, match="LoRA"):
        culm.hf.parts(peft.get_peft_model(tiny_model("llama"), config))


def test_adalora_is_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=9, tinit=1, tfinal=2)
    with pytest.raises(JobError, match=r"AdaLoraConfig.*use LoRA"):
        culm.hf.parts(peft.get_peft_model(tiny_model("llama"), config))


def tiny_tokenizer() -> Any:
    """One token per letter."""
    import tokenizers
    import transformers

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {chr(97 + i): 4 + i for i in range(26)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[a-z]"), "removed", invert=True)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_instructions_count_the_answer_only(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a b", "completion": "c d"},
        {"instruction": "a", "output": "z"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    data = culm.hf.instructions(path, tiny_tokenizer(), 8)
    ids, target = data[0]
    assert ids.tolist() == [4, 5, 6, 7, 0, 0, 0, 0]
    assert target.tolist() == [-100, 6, 7, 2, -100, -100, -100, -100]
    assert len(data) == 3 and data[1][0].shape == (8,)
    long = culm.hf.instructions(path, tiny_tokenizer(), 2)[0]
    assert (long[0].tolist(), long[1].tolist()) == ([4, 5], [-100, 6])
    path.write_text('{"prompt": "a"}')
    with pytest.raises(JobError, match="line 1"):
        culm.hf.instructions(path, tiny_tokenizer(), 8)[0]


def test_a_chat_template_writes_what_is_around_the_messages(tmp_path: Path) -> None:
    """Its own special tokens are not added a second time, and its end of a turn is learned."""
    tokenizer = tiny_tokenizer()
    path = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": messages}))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role != 'user' %}x{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    ids, target = culm.hf.instructions(path, tokenizer, 6)[0]
    letters = {letter: 4 + number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    assert ids.tolist() == [letters["u"], letters["a"], letters["a"], letters["b"], 0, 0]
    assert target.tolist() == [-100, -100, letters["b"], letters["x"], -100, -100]
    tokenizer.chat_template = tokenizer.chat_template.replace("x", "")
    assert culm.hf.instructions(path, tokenizer, 6)[0][1].tolist() == [-100, -100, letters["b"], 2, -100, -100]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["line 3", "not JSON"]),
        ('{"prompt": "a", "completion": 5}', ["line 3", "5"]),
        ('{"messages": [{"role": "user", "content": "a"}]}', ["line 3", "messages"]),
        ('{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]}', ["line 3"]),
        ('{"messages": [{"content": "a"}, {"content": "b"}]}', ["line 3"]),
    ],
)
def test_a_wrong_instruction_is_named_with_its_line(line: str, words: list[str], tmp_path: Path) -> None:
    """Empty lines count, and a line separator inside of a text ends no line."""
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b", "completion": "c"}, ensure_ascii=False) + f"\n\n{line}\n")
    data = culm.hf.instructions(path, tiny_tokenizer(), 8)
    assert len(data) == 2 and data[0][0][:2].tolist() == [4, 5]
    with pytest.raises(JobError) as caught:
        data[1]
    assert all(word in str(caught.value) for word in (*words, "data.jsonl")), caught.value


def test_instructions_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(JobError, match=r"data\.jsonl.*UTF-8.*byte 12"):
        culm.hf.instructions(tmp_path / "data.jsonl", tiny_tokenizer(), 8)


def test_a_node_reads_only_the_tensors_of_its_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a stage reads is its share of the model, and is read once."""
    from culm.hf.hf_weights import FileWeights

    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    job = tiny_job(tmp_path, "llama")
    read: list[str] = []
    original = FileWeights._read_stored

    def note(weights: FileWeights, name: str) -> torch.Tensor:
        read.append(name)
        return original(weights, name)

    monkeypatch.setattr(FileWeights, "_read_stored", note)
    cached_setup(job, pipelines=1, stages=2)
    assert read == []  # the check before the run needs no weights
    for layers, wanted in [([0, 1], ("model.embed_tokens.", "model.layers.0.")), ([4], ("model.norm.", "lm_head."))]:
        read.clear()
        ModelState(job, layers)
        assert sorted(read) == sorted(n for n in model.state_dict() if n.startswith(wanted))


def test_a_model_that_cannot_be_cut_is_refused_with_the_fix() -> None:
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=8, embedding_size=4, hidden_size=4, num_hidden_layers=2, num_attention_heads=1, intermediate_size=4
    )
    with pytest.raises(JobError, match=r"AlbertForMaskedLM .* Job\.layers as a list of your own modules"):
        culm.hf.parts(transformers.AlbertForMaskedLM(config))
    tiny: dict[str, Any] = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 1}
    relative = transformers.DebertaV2Config(**tiny, intermediate_size=4, relative_attention=True)
    with pytest.raises(JobError, match=r"trained tensor besides the hidden states \(rel_embeddings\).*Job\.layers"):
        culm.hf.parts(transformers.DebertaV2ForMaskedLM(relative))
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic = transformers.LlamaConfig(**tiny, intermediate_size=4, rope_parameters=rope)
    with pytest.raises(JobError, match=r"config\.rope_parameters has rope_type='dynamic'.*use 'yarn'"):
        culm.hf.parts(dynamic)
    dropped = transformers.OPTConfig(**tiny, ffn_dim=4, word_embed_proj_dim=4, layerdrop=0.5)
    with pytest.raises(JobError, match=r"config\.layerdrop is 0\.5: .*; set it to 0"):
        culm.hf.parts(dropped)
    with pytest.raises(JobError, match="LlamaModel"):
        culm.hf.parts(tiny_model("llama").model)
    with pytest.raises(JobError, match=r"there is no folder .* in the local cache of Hugging Face"):
        culm.hf.parts("meta-llama/Llama-3.2-1B")
