"""Decoder-only language models as layer counts: known shapes, and any Hugging Face config.json.

Covers grouped-query attention, gated MLPs, mixtures of experts with shared experts and dense first layers, and
DeepSeek's latent attention. Counts follow the published implementations; nothing is imported from transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
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
    learned_positions: int = 0
    """Rows of the tables of positions and token types, which are added to the embedding."""
    assumption: str = ""
    """What is not known of the model and was assumed; empty: nothing."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "mlp", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise PlanError(f"DecoderShape.{name} is {getattr(self, name)}: use a whole number of at least 1")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise PlanError(
                f"DecoderShape.experts_per_token is {self.experts_per_token}: use a number from 1 to {self.experts}"
            )
        if self.heads % self.kv_heads:
            raise PlanError(f"DecoderShape.kv_heads is {self.kv_heads}: use a divisor of heads ({self.heads})")
        if self.dense_layers > self.layers:
            raise PlanError(f"DecoderShape.dense_layers is {self.dense_layers}: use at most {self.layers}, its layers")

    @property
    def tied_parameters(self) -> int:
        """Parameters of the embedding, which the head holds again if they are tied."""
        return self.vocabulary * self.hidden

    def layer_counts(self) -> tuple[LayerCounts, ...]:
        """Embedding, blocks and head."""
        token = float(self.sequence * self.hidden)
        embedding = LayerCounts(
            "embedding",
            (self.vocabulary + self.learned_positions) * self.hidden,
            flop=0.0,
            saved_values=token,
            output_values=token,
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
    kind = str(fields.get("model_type") or "")
    _check_kind(config, kind)
    hidden, heads = config.integer(*_HIDDEN), config.integer(*_HEADS)
    experts = config.integer("num_local_experts", "num_experts", "n_routed_experts", default=0)
    expert_mlp = config.integer("moe_intermediate_size", default=0) if experts else 0
    mlp = config.integer(*_MLP, default=4 * hidden if kind in _PLAIN_MLP else None)
    layers = config.integer(*_LAYERS)
    shape = DecoderShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_width=config.integer("head_dim", default=0),
        mlp=mlp,
        vocabulary=config.integer("vocab_size"),
        sequence=min(DEFAULT_SEQUENCE, config.integer(*_POSITIONS, default=2**30)),
        learned_positions=_learned_positions(config, kind),
        tied=config.flag("tie_word_embeddings", default=kind in _TIED_BY_DEFAULT),
        qkv_bias=config.flag("attention_bias", default=kind in _BIASED_ATTENTION),
        qk_norm=kind.startswith("qwen3"),
        gated=_has_gate(config, kind),
        experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", default=0 if not experts else None),
        expert_mlp=expert_mlp,
        shared_expert_mlp=_shared_expert_width(config, expert_mlp) if experts else 0,
        dense_layers=_dense_layers(config, layers) if experts else 0,
        latent=_latent_from_config(config),
        assumption="" if kind in _KNOWN_KINDS else f"model_type {kind or 'missing'}: counted as a decoder like Llama",
    )
    if experts and kind.startswith("llama4"):  # its experts have the width of the MLP, and one of them is shared
        dense = config.integer("intermediate_size_mlp", default=mlp)
        return replace(shape, mlp=dense, expert_mlp=mlp, shared_expert_mlp=mlp)
    return shape


_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names of the same figure in the configs of different models."""

_LEARNED_POSITIONS = (
    "gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt", "bert", "roberta", "xlm-roberta", "camembert", "distilbert",
)  # fmt: skip
_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "deberta-v2")
_PLAIN_MLP = (
    *_LEARNED_POSITIONS, *_ENCODERS, "gpt_neox", "gptj", "codegen", "falcon", "bloom", "mpt", "phi", "starcoder2",
    "persimmon", "nemotron", "xglm",
)  # fmt: skip
"""Models whose MLP has two matrices; their width is four times the hidden size unless the config names another."""
_GATED_MLP = (
    "llama", "llama4", "llama4_text", "mistral", "mistral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "qwen3_next", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "phimoe", "deepseek", "deepseek_v2",
    "deepseek_v3", "olmo", "olmo2", "olmo3", "olmoe", "cohere", "cohere2", "granite", "granitemoe", "glm", "glm4",
    "glm4_moe", "smollm3", "stablelm", "ernie4_5", "exaone4", "gpt_oss", "minimax", "seed_oss", "modernbert",
)  # fmt: skip
_KNOWN_KINDS = frozenset((*_PLAIN_MLP, *_GATED_MLP))
_TIED_BY_DEFAULT = (
    *_LEARNED_POSITIONS, *_ENCODERS, "gemma", "gemma2", "gemma3", "gemma3_text", "falcon", "bloom", "mpt", "starcoder2",
    "xglm", "cohere", "cohere2", "smollm3", "modernbert",
)  # fmt: skip
_BIASED_ATTENTION = (
    "qwen2", "qwen2_moe", "gpt2", "gpt_neox", "opt", "bloom", "phi", "starcoder2", "xglm", "biogpt", *_ENCODERS,
)  # fmt: skip
_OTHER_LAYERS = (
    "mamba", "mamba2", "falcon_mamba", "jamba", "zamba", "zamba2", "bamba", "rwkv", "recurrent_gemma", "nemotron_h",
    "granitemoehybrid", "lfm2", "xlstm", "albert",
)  # fmt: skip
"""Models with layers that are not an attention and an MLP, or that share their weights."""


def _check_kind(config: _Config, kind: str) -> None:
    """Raise PlanError for a model whose layers these counts do not describe."""
    if config.flag("is_encoder_decoder"):
        raise PlanError(f"{config.source} is an encoder-decoder: only decoders can be planned; use --profile")
    types = config.fields.get("layer_types") or ()
    others = sorted({str(each) for each in types if not str(each).endswith("attention")})
    if kind in _OTHER_LAYERS or others:
        what = f"layers of type {', '.join(others)}" if others else "other layers than attention and MLP"
        what = "layers that share their weights" if kind == "albert" else what
        raise PlanError(f"{config.source} has model_type {kind!r}, with {what}: measure it with --profile")
    hidden = config.integer(*_HIDDEN)
    for name in ("embedding_size", "word_embed_proj_dim"):
        if (given := config.integer(name, default=hidden)) != hidden:
            raise PlanError(
                f"{config.source} has {name} {given}, not {hidden} as its layers: measure it with --profile"
            )


def _kv_heads(config: _Config, heads: int) -> int:
    if config.flag("multi_query") and not config.flag("new_decoder_architecture"):
        return 1
    return config.integer("num_key_value_heads", "num_kv_heads", default=heads)


def _learned_positions(config: _Config, kind: str) -> int:
    """Rows of the tables of positions and token types."""
    if kind not in _LEARNED_POSITIONS:
        return 0
    return config.integer(*_POSITIONS, default=0) + config.integer("type_vocab_size", default=0)


def _has_gate(config: _Config, kind: str) -> bool:
    """Whether the MLP has three matrices. That of an unknown model has if its activation is SiLU, as in SwiGLU."""
    if kind in _KNOWN_KINDS:
        return kind in _GATED_MLP
    names = ("hidden_act", "hidden_activation", "activation_function", "activation")
    activation = next((config.fields[name] for name in names if config.fields.get(name)), "silu")
    return str(activation).lower() in ("silu", "swish", "swiglu")


def _dense_layers(config: _Config, layers: int) -> int:
    """Layers with a dense MLP: the first ones, or every other one."""
    alone = config.fields.get("mlp_only_layers")
    given = config.integer("first_k_dense_replace", default=len(alone) if isinstance(alone, list) else 0)
    every = config.integer("interleave_moe_layer_step", "decoder_sparse_step", default=1)
    return given or layers - layers // max(1, every)


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
        if value is not None and not isinstance(value, bool):
            raise PlanError(f"{self.source} has {name} {value!r}: use true or false")
        return default if value is None else value


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
