"""Decoders have as many parameters as published, and a config.json describes the same model as its known shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from culm.errors import PlanError
from culm.plan.model.accelerators import find_accelerator
from culm.plan.model.decoder_models import read_decoder_config, shape_from_config
from culm.plan.model.reference_models import decoder_model, find_model


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-1b", 1.236),
        ("llama-3-3b", 3.213),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("llama-3-405b", 405.9),
        ("llama-3.1-8b", 8.03),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-72b", 72.7),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.8),
        ("mistral-7b", 7.25),
        ("mixtral-8x7b", 46.7),
        ("deepseek-moe-16b", 16.4),
        ("deepseek-v3", 671),
    ],
)
def test_parameters_equal_the_published_ones(name: str, billions: float) -> None:
    assert find_model(name).unique_parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions", "within"),
    [("mixtral-8x7b", 12.9, 0.01), ("qwen3-30b-a3b", 3.3, 0.02), ("deepseek-moe-16b", 2.8, 0.02),
     ("deepseek-v3", 37, 0.02)],
)  # fmt: skip
def test_active_parameters_are_those_of_the_routed_experts(name: str, billions: float, within: float) -> None:
    assert find_model(name).active_parameters / 1e9 == pytest.approx(billions, rel=within)


def test_a_tied_embedding_is_held_by_both_ends() -> None:
    model = find_model("llama-3-1b")
    assert model.parameters - model.unique_parameters == 128_256 * 2048


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_flop_are_six_for_each_active_parameter_and_token_and_attention(name: str) -> None:
    model = find_model(name)
    tokens = 8192 if "llama" in name else 4096
    attention = 3 * sum(part.parameterless_flop for part in model.layers)
    active = model.active_parameters - model.layers[0].parameters
    assert model.flop == pytest.approx(6 * active * tokens + attention, rel=0.01)


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
        "max_position_embeddings": 8192, "attention_bias": False,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128,
        "num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "head_dim": None,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_describes_the_same_model_as_the_known_shape(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    for path in (folder, folder / "config.json"):
        found, shape = read_decoder_config(path)
        assert found == "some-model"
        model = decoder_model(found, shape)
        assert model.unique_parameters == find_model(name).unique_parameters
        assert model.active_parameters == find_model(name).active_parameters


def test_gpt2_has_other_names_and_no_gate() -> None:
    shape = shape_from_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257})
    assert decoder_model("gpt2", shape).unique_parameters / 1e6 == pytest.approx(124.4, rel=0.01)


COUNTED: dict[str, tuple[dict[str, Any], int]] = {
    "bert": ({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
              "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}, 109_514_298),
    "distilbert": ({"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072, "vocab_size": 30522,
                    "max_position_embeddings": 512, "activation": "gelu"}, 66_985_530),
    "opt": ({"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192,
             "word_embed_proj_dim": 2048, "vocab_size": 50272, "max_position_embeddings": 2048}, 1_315_758_080),
    "falcon": ({"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024,
                "multi_query": True, "num_kv_heads": 71}, 6_921_720_704),
    "bloom": ({"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}, 559_214_592),
    "gptj": ({"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_inner": None, "vocab_size": 50400}, 6_050_882_784),
    "mpt": ({"d_model": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 50368}, 1_311_213_568),
    "starcoder2": ({"hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
                    "intermediate_size": 12288, "vocab_size": 49152}, 3_030_371_328),
    "llama4_text": ({"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "head_dim": 128,
                     "num_key_value_heads": 8, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
                     "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202048}, 107_769_861_120),
}  # fmt: skip
"""Configs as on the hub, and the parameters that transformers counts for them."""


@pytest.mark.parametrize("kind", COUNTED)
def test_other_architectures_have_the_parameters_that_transformers_counts(kind: str) -> None:
    fields, parameters = COUNTED[kind]
    model = decoder_model(kind, shape_from_config({"model_type": kind, **fields}))
    assert model.unique_parameters == pytest.approx(parameters, rel=0.01)
    assert "counted as" not in model.note


def test_an_unknown_architecture_is_counted_by_its_activation_and_says_so() -> None:
    fields = CONFIGS["llama-3-8b"] | {"model_type": "new"}
    gated, plain = (shape_from_config(fields | {"hidden_act": name}) for name in ("silu", "gelu"))
    assert gated.gated
    assert not plain.gated
    assert "model_type new: counted as a decoder like Llama" in decoder_model("new", gated).note


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "albert"}, "layers that share their weights: measure it with --profile"),
        ({"model_type": "jamba"}, "other layers than attention and MLP"),
        ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ({"embedding_size": 128}, "has embedding_size 128, not 4096 as its layers"),
        ({"num_key_value_heads": 5}, "kv_heads is 5: use a divisor of heads (32)"),
        ({"tie_word_embeddings": "no"}, "has tie_word_embeddings 'no': use true or false"),
        ({"hidden_size": None}, "has no hidden_size: only decoder models can be planned"),
        ({"num_hidden_layers": "many"}, "has num_hidden_layers 'many': use a whole number"),
        ({"num_hidden_layers": 0}, "DecoderShape.layers is 0"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"num_experts": 8}, "has no num_experts_per_tok"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "experts_per_token is 9: use a number from 1 to 8"),
    ],
)
def test_an_incomplete_config_is_refused_with_the_field(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        shape_from_config(CONFIGS["llama-3-8b"] | change)
    assert sentence in str(error.value)


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(PlanError, match="is not JSON"):
        read_decoder_config(broken)
    with pytest.raises(PlanError, match="could not be read: No such file"):
        read_decoder_config(tmp_path / "none.json")


def test_all_experts_are_stored_but_only_the_routed_ones_take_time() -> None:
    device = find_accelerator("H100")
    dense, routed = (find_model(name).profile(device, 4, precision="bf16") for name in ("mistral-7b", "mixtral-8x7b"))
    assert routed.layers[1].resident_bytes > 6 * dense.layers[1].resident_bytes
    assert dense.layers[1].time_s < routed.layers[1].time_s < 3 * dense.layers[1].time_s
