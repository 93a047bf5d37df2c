"""A Llama of transformers as a job that every side of the bench trains: culm and torch through `culm.hf.parts`, the
plain loop with the model's own forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.common.gpt_job import ModuleFactory

    from culm.job import Dataset, Precision


@dataclass(frozen=True, kw_only=True)
class LlamaSpec:
    """A randomly initialised Llama on random tokens: fp32, AdamW, attention by `scaled_dot_product_attention`."""

    name: str
    width: int
    blocks: int
    heads: int
    inner: int
    """Width of the feed-forward layers."""
    vocab: int
    tokens: int
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as `heads`."""
    micro_batch: int = 1
    micro_batches: int = 8
    items: int = 32
    """Length of the data set."""
    seed: int = 0
    clip_norm: float | None = None
    lr: float = 3e-4
    device: str = "cpu"
    precision: Precision = "fp32"

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            max_position_embeddings=self.tokens,
            tie_word_embeddings=False,
            use_cache=False,
        )

    def layers(self) -> Sequence[ModuleFactory]:
        return list(_parts(self)["layers"])

    def data(self) -> Dataset:
        """(token ids, shifted labels), as `culm.hf` collates them."""
        generator = torch.Generator().manual_seed(self.seed)
        collate = _parts(self)["collate"]
        ids = torch.randint(0, self.vocab, (self.items, self.tokens), generator=generator)
        return [_first_of_batch(*collate([{"input_ids": row, "labels": row}])) for row in ids]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean over the tokens of a micro-batch. All micro-batches have equally many."""
        total, weight = _parts(self)["loss"](output, target)
        return total / weight  # type: ignore[no-any-return]

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=self.lr)

    def plain_model(self) -> nn.Module:
        """The whole model of transformers, with the initial weights of the layers."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_config(self.config())
        state: dict[str, Tensor] = {}
        for number, factory in enumerate(self.layers()):
            torch.manual_seed(self.seed + number)
            state |= factory().state_dict()
        model.load_state_dict(state)
        return model.train()

    def plain_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch. Labels are shifted already, as the other sides get them."""
        loss: Tensor = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
        return loss


LLAMA_100M = LlamaSpec(
    name="llama 100 M", width=640, blocks=16, heads=10, inner=2048, vocab=8192, tokens=128, micro_batch=1
)
LLAMA_SMALL = LlamaSpec(name="llama small", width=192, blocks=8, heads=4, inner=512, vocab=1024, tokens=64)


@cache
def _parts(spec: LlamaSpec) -> dict[str, Any]:
    import culm.hf

    return dict(culm.hf.parts(spec.config()))


def _first_of_batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The item of a batch of one."""
    return inputs[0], targets[0]
