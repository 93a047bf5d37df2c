"""Decoder-only language models as layer counts: known shapes, and any Hugging Face config.json.

Covers grouped-query attention, gated MLPs, mixtures of experts with shared experts and dense first layers, and
DeepSeek's latent attention. Counts follow the published implementations; nothing is imported from transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from culm.errors import PlanError
from culm.plan.model.layer_counts import LayerCounts

DEFAULT_GLOBAL_BATCH = 512
"""Sequences per step."""
DEFAULT_SEQUENCE = 4096
"""Tokens of a sequence, if the model allows as many."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Ranks and widths of DeepSeek's multi-head latent attention."""

    query_rank: int
    """0: queries are projected directly."""
    key_value_rank: int
    plain_width: int
    """Width of a head's part without a rotary position."""
    rotary_width: int
    value_width: int


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """The sizes of a decoder. Raises PlanError, in one sentence, for a size that is not positive."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    """Width of the dense MLP."""
    vocabulary: int
    head_width: int = 0
    """0: hidden / heads."""
    sequence: int = DEFAULT_SEQUENCE
    tied: bool = False
    """The head uses the weights of the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    gated: bool = True
    """The MLP has a gate, and so three matrices instead of two."""
    experts: int = 0
    """Experts of a layer that tokens are routed to; 0: a dense model."""
    experts_per_token: int = 0
    expert_mlp: int = 0
    """Width of an expert; 0: `mlp`."""
    shared_expert_mlp: int = 0
    """Width of the shared experts together, which compute every token."""
    dense_layers: int = 0
    """First layers of a mixture-of-experts model with a dense MLP."""
    latent: LatentAttention | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "mlp", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise PlanError(f"DecoderShape.{name} is {getattr(self, name)}: use a whole number of at least 1")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise PlanError(
                f"DecoderShape.experts_per_token is {self.experts_per_token}: use a number from 1 to {self.experts}"
            )

    @property
    def tied_parameters(self) -> int:
        """Parameters of the embedding, which the head holds again if they are tied."""
        return self.vocabulary * self.hidden

    def layer_counts(self) -> tuple[LayerCounts, ...]:
        """Embedding, blocks and head."""
        token = float(self.sequence * self.hidden)
        embedding = LayerCounts(
            "embedding", self.vocabulary * self.hidden, flop=0.0, saved_values=token, output_values=token
        )
        dense, routed = self._block(routed=False), self._block(routed=True)
        first = self.dense_layers if self.experts else self.layers
        head = LayerCounts(
            "head",
            self.vocabulary * self.hidden + self.hidden,
            flop=2.0 * token * self.vocabulary,
            saved_values=token + float(self.sequence) * self.vocabulary,
            output_values=float(self.sequence),
        )
        return (embedding, *[dense] * first, *[routed] * (self.layers - first), head)

    def _block(self, *, routed: bool) -> LayerCounts:
        attention, attention_values = self._attention()
        matrices = 3 if self.gated else 2
        width = self.expert_mlp or self.mlp
        expert = matrices * self.hidden * width
        router = self.hidden * self.experts if routed else 0
        shared = matrices * self.hidden * self.shared_expert_mlp if routed else 0
        mlp = self.experts * expert + shared + router if routed else matrices * self.hidden * self.mlp
        idle = (self.experts - self.experts_per_token) * expert if routed else 0
        mlp_values = matrices * (self.experts_per_token * width + self.shared_expert_mlp if routed else self.mlp)
        return LayerCounts(
            "experts" if routed else "block",
            parameters=attention + mlp + 2 * self.hidden,
            flop=2.0 * self.sequence * (attention + mlp - idle),
            saved_values=float(self.sequence) * (4 * self.hidden + attention_values + mlp_values),
            output_values=float(self.sequence * self.hidden),
            parameterless_flop=2.0 * self.sequence * self.sequence * self._attention_width(),
            idle_parameters=idle,
        )

    def _attention_width(self) -> int:
        """Widths of the products of queries with keys and of weights with values, over all heads."""
        if self.latent is not None:
            return self.heads * (self.latent.plain_width + self.latent.rotary_width + self.latent.value_width)
        return 2 * self.heads * (self.head_width or self.hidden // self.heads)

    def _attention(self) -> tuple[int, int]:
        """Parameters, and values that a token keeps for the backward."""
        if self.latent is not None:
            return self._latent_attention(self.latent)
        width = self.head_width or self.hidden // self.heads
        queries, keys = self.heads * width, self.kv_heads * width
        parameters = 2 * self.hidden * queries + 2 * self.hidden * keys
        parameters += queries + 2 * keys if self.qkv_bias else 0
        parameters += 2 * width if self.qk_norm else 0
        return parameters, 2 * queries + 2 * keys

    def _latent_attention(self, latent: LatentAttention) -> tuple[int, int]:
        queries = self.heads * (latent.plain_width + latent.rotary_width)
        values = self.heads * latent.value_width
        down_up = self.hidden * latent.query_rank + latent.query_rank + latent.query_rank * queries
        parameters = down_up if latent.query_rank else self.hidden * queries
        parameters += self.hidden * (latent.key_value_rank + latent.rotary_width) + latent.key_value_rank
        parameters += latent.key_value_rank * self.heads * (latent.plain_width + latent.value_width)
        parameters += values * self.hidden
        return parameters, 2 * queries + 2 * values + latent.query_rank + latent.key_value_rank


def read_decoder_config(path: Path) -> tuple[str, DecoderShape]:
    """The name and shape of a Hugging Face config.json, or of a folder that has one.

    Raises PlanError, with the field, if the file cannot be read or describes another kind of model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        decoded = json.loads(file.read_bytes())
    except OSError as error:
        raise PlanError(f"the model {str(file)!r} could not be read: {error.strerror}") from error
    except ValueError as error:
        raise PlanError(f"the model {str(file)!r} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise PlanError(f"the model {str(file)!r} is not a config.json: it has no fields")
    inner = decoded.get("text_config")
    fields = {**decoded, **inner} if isinstance(inner, dict) else decoded
    return _config_name(decoded, file), shape_from_config(fields, str(file))


def _config_name(fields: dict[str, Any], file: Path) -> str:
    named = fields.get("_name_or_path")
    stem = file.parent.name if file.name == "config.json" else file.stem
    return Path(named).name if isinstance(named, str) and named else stem or file.stem


def shape_from_config(fields: dict[str, Any], source: str = "config.json") -> DecoderShape:
    """The shape that a decoded config.json describes. Raises PlanError, with the field, if it is not complete."""
    config = _Config(fields, source)
    if config.flag("is_encoder_decoder"):
        raise PlanError(f"{source} is an encoder-decoder: only decoders can be planned; use --profile")
    kind = str(fields.get("model_type", ""))
    hidden, heads = config.integer("hidden_size", "n_embd"), config.integer("num_attention_heads", "n_head")
    experts = config.integer("num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert_mlp = config.integer("moe_intermediate_size", default=0) if experts else 0
    mlp = config.integer("intermediate_size", "n_inner", default=4 * hidden if kind == "gpt2" else None)
    return DecoderShape(
        hidden=hidden,
        layers=config.integer("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default=heads),
        head_width=config.integer("head_dim", default=0),
        mlp=mlp,
        vocabulary=config.integer("vocab_size"),
        sequence=min(DEFAULT_SEQUENCE, config.integer("max_position_embeddings", "n_positions", default=2**30)),
        tied=config.flag("tie_word_embeddings", default=kind in _TIED_BY_DEFAULT),
        qkv_bias=config.flag("attention_bias", default=kind in _BIASED_ATTENTION),
        qk_norm=kind.startswith("qwen3"),
        gated=kind not in _PLAIN_MLP,
        experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", default=0 if not experts else None),
        expert_mlp=expert_mlp,
        shared_expert_mlp=_shared_expert_width(config, expert_mlp) if experts else 0,
        dense_layers=config.integer("first_k_dense_replace", default=0) if experts else 0,
        latent=_latent_from_config(config),
    )


_TIED_BY_DEFAULT = ("gpt2", "gemma", "gemma2", "gemma3_text", "opt")
_BIASED_ATTENTION = ("qwen2", "qwen2_moe", "gpt2", "gpt_neox", "opt")
_PLAIN_MLP = ("gpt2", "gpt_neox", "opt", "falcon", "phi", "gpt_bigcode")


def _shared_expert_width(config: _Config, expert_mlp: int) -> int:
    given = config.integer("shared_expert_intermediate_size", default=0)
    return given or config.integer("n_shared_experts", default=0) * expert_mlp


def _latent_from_config(config: _Config) -> LatentAttention | None:
    rank = config.integer("kv_lora_rank", default=0)
    if not rank:
        return None
    return LatentAttention(
        query_rank=config.integer("q_lora_rank", default=0),
        key_value_rank=rank,
        plain_width=config.integer("qk_nope_head_dim"),
        rotary_width=config.integer("qk_rope_head_dim"),
        value_width=config.integer("v_head_dim"),
    )


@dataclass(frozen=True)
class _Config:
    """The fields of a config.json; the getters raise PlanError, which names the field."""

    fields: dict[str, Any]
    source: str

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of the fields that is set, or the default."""
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PlanError(f"{self.source} has {name} {value!r}: use a whole number")
            return value
        if default is None:
            raise PlanError(f"{self.source} has no {names[0]}: only decoder models can be planned; use --profile")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.fields.get(name)
        return default if value is None else bool(value)


def _llama(hidden: int, layers: int, heads: int, mlp: int, *, tied: bool = False) -> DecoderShape:
    return DecoderShape(
        hidden=hidden, layers=layers, heads=heads, kv_heads=8, mlp=mlp, vocabulary=128_256, sequence=8192, tied=tied
    )


def _qwen(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    *,
    vocabulary: int = 152_064,
    tied: bool = False,
    version: float = 2.5,
    experts: int = 0,
    expert_mlp: int = 0,
) -> DecoderShape:
    """Qwen2.5 has biases in its attention, Qwen3 normalizes queries and keys of width 128."""
    three = version >= 3
    return DecoderShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_width=128 if three else 0,
        mlp=mlp,
        vocabulary=151_936 if three else vocabulary,
        tied=tied,
        qkv_bias=not three,
        qk_norm=three,
        experts=experts,
        experts_per_token=8 if experts else 0,
        expert_mlp=expert_mlp,
    )


_MISTRAL = DecoderShape(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, vocabulary=32_768)
_MIXTRAL = DecoderShape(
    hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14_336, vocabulary=32_000, experts=8, experts_per_token=2
)
_DEEPSEEK_16B = DecoderShape(
    hidden=2048, layers=28, heads=16, kv_heads=16, mlp=10_944, vocabulary=102_400, experts=64, experts_per_token=6,
    expert_mlp=1408, shared_expert_mlp=2 * 1408, dense_layers=1,
)  # fmt: skip
_DEEPSEEK_V3 = DecoderShape(
    hidden=7168, layers=61, heads=128, kv_heads=128, mlp=18_432, vocabulary=129_280, experts=256, experts_per_token=8,
    expert_mlp=2048, shared_expert_mlp=2048, dense_layers=3,
    latent=LatentAttention(query_rank=1536, key_value_rank=512, plain_width=128, rotary_width=64, value_width=128),
)  # fmt: skip

DECODER_SHAPES: tuple[tuple[str, DecoderShape, int], ...] = (
    ("llama-3-1b", _llama(2048, 16, 32, 8192, tied=True), 512),
    ("llama-3-3b", _llama(3072, 28, 24, 8192, tied=True), 512),
    ("llama-3-8b", _llama(4096, 32, 32, 14_336), 512),
    ("llama-3-70b", _llama(8192, 80, 64, 28_672), 512),
    ("llama-3-405b", _llama(16_384, 126, 128, 53_248), 1024),
    ("qwen2.5-0.5b", _qwen(896, 24, 14, 2, 4864, vocabulary=151_936, tied=True), 512),
    ("qwen2.5-1.5b", _qwen(1536, 28, 12, 2, 8960, vocabulary=151_936, tied=True), 512),
    ("qwen2.5-3b", _qwen(2048, 36, 16, 2, 11_008, vocabulary=151_936, tied=True), 512),
    ("qwen2.5-7b", _qwen(3584, 28, 28, 4, 18_944), 512),
    ("qwen2.5-14b", _qwen(5120, 48, 40, 8, 13_824), 512),
    ("qwen2.5-32b", _qwen(5120, 64, 40, 8, 27_648), 512),
    ("qwen2.5-72b", _qwen(8192, 80, 64, 8, 29_568), 512),
    ("qwen3-0.6b", _qwen(1024, 28, 16, 8, 3072, version=3, tied=True), 512),
    ("qwen3-1.7b", _qwen(2048, 28, 16, 8, 6144, version=3, tied=True), 512),
    ("qwen3-4b", _qwen(2560, 36, 32, 8, 9728, version=3, tied=True), 512),
    ("qwen3-8b", _qwen(4096, 36, 32, 8, 12_288, version=3), 512),
    ("qwen3-14b", _qwen(5120, 40, 40, 8, 17_408, version=3), 512),
    ("qwen3-32b", _qwen(5120, 64, 64, 8, 25_600, version=3), 512),
    ("qwen3-30b-a3b", _qwen(2048, 48, 32, 4, 6144, version=3, experts=128, expert_mlp=768), 512),
    (
        "qwen3-235b-a22b",
        _qwen(4096, 94, 64, 4, 12_288, version=3, experts=128, expert_mlp=1536),
        512,
    ),
    ("mistral-7b", _MISTRAL, 512),
    ("mixtral-8x7b", _MIXTRAL, 512),
    ("deepseek-moe-16b", _DEEPSEEK_16B, 512),
    ("deepseek-v3", _DEEPSEEK_V3, 1024),
)
"""Name, shape and sequences per step of known decoders."""
