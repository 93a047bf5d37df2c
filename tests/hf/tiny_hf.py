"""Tiny Hugging Face models of every family, with random weights, and items to train them on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed: pip install 'culm[hf]'")

import transformers

import culm
import culm.hf

VOCAB, LENGTH = 40, 6
_SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
_LLAMA = _SIZES | {
    "intermediate_size": 24,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
_BERT = _SIZES | {
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", _LLAMA | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _LLAMA | {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": 3}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _LLAMA | {"head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _LLAMA | {"head_dim": 8, "sliding_window": 3}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _LLAMA | {"head_dim": 8, "sliding_window": 3}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 16,
            "n_layer": 3,
            "n_head": 2,
            "n_positions": 32,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SIZES | {"intermediate_size": 24}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _LLAMA | _EXPERTS | {"num_local_experts": 3}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        _LLAMA
        | _EXPERTS
        | {"num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _LLAMA | _EXPERTS | {"num_experts": 3, "moe_intermediate_size": 8, "head_dim": 8},
    ),
    "phi3 longrope": (
        "Phi3ForCausalLM",
        "Phi3Config",
        _LLAMA
        | {
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
        },
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", _SIZES | {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 3, "n_head": 2, "hidden_dropout": 0.0},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        _LLAMA | {"global_attn_every_n_layers": 2, "local_attention": 4},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _LLAMA | _EXPERTS | {"num_local_experts": 3, "head_dim": 8, "sliding_window": 3},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "bert classification": ("BertForSequenceClassification", "BertConfig", _BERT | {"num_labels": 3}),
    "llama classification": ("LlamaForSequenceClassification", "LlamaConfig", _LLAMA | {"num_labels": 3}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        _VISION,
    ),
    "clip vision": (
        "CLIPForImageClassification",
        "CLIPConfig",
        {"vision_config": _VISION, "text_config": _SIZES | {"intermediate_size": 24}, "num_labels": 3},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
    ),
}
TASKS = {
    "bert": "masked-lm",
    "modernbert": "masked-lm",
    "vit": "image-classification",
    "clip vision": "image-classification",
    "t5": "seq2seq-lm",
}


def tiny_model(family: str) -> Any:
    name, config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def task_of(family: str) -> Any:
    return "sequence-classification" if "classification" in family else TASKS.get(family, "causal-lm")


def items(family: str, count: int = 24) -> list[dict[str, torch.Tensor]]:
    """Items with the names of transformers."""
    draw = torch.Generator().manual_seed(1)
    if task_of(family) == "image-classification":
        images = torch.randn(count, 3, 8, 8, generator=draw)
        return [{"pixel_values": image, "labels": torch.tensor(i % 3)} for i, image in enumerate(images)]
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=draw)
    if "classification" in family:
        return [{"input_ids": row, "labels": torch.tensor(i % 3)} for i, row in enumerate(ids)]
    labels = ids.clone()
    labels[:, :2] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def tiny_job(model: Any, family: str, **fields: Any) -> culm.Job:
    """Two micro-batches of two items, 20 steps, unless fields say otherwise."""
    described: dict[str, Any] = {
        **culm.hf.parts(model, task_of(family)),
        "optimizer": sgd,
        "data": items(family),
        "global_batch": 4,
        "micro_batch": 2,
        "steps": 20,
        "exact": True,
    }
    return culm.Job(**{**described, **fields})
