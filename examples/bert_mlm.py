"""Pretrain a BERT on masked characters: 15 % of them are hidden, and the others tell what they are.

    culm run examples/bert_mlm.py --pipelines 2 --stages 2 --steps 50 --out runs/bert --kill "node=2 step=5"
    culm export runs/bert bert --hf            # AutoModelForMaskedLM.from_pretrained("bert")

The weights are random, and initialised layer by layer where a layer is held: a config is enough.
"""

import torch
from torch import Tensor
from transformers import BertConfig

import culm
import culm.hf
from culm.models import Characters

LENGTH = 32


class Masked:
    """Items with the names of transformers: input_ids, and labels that are -100 where nothing is hidden."""

    def __init__(self, text: Characters) -> None:
        self.text, self.hidden = text, text.vocab

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, _ = self.text[range(len(self))[index] * LENGTH]
        chosen = torch.rand(LENGTH) < 0.15  # seeded by culm: the same in every run
        chosen[0] = True
        return {"input_ids": ids.masked_fill(chosen, self.hidden), "labels": ids.masked_fill(~chosen, -100)}


def job() -> culm.Job:
    text = Characters(length=LENGTH)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = BertConfig(vocab_size=text.vocab + 1, max_position_embeddings=LENGTH, **sizes)
    return culm.Job(
        **culm.hf.parts(config, task="masked-lm"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        data=Masked(text),
        global_batch=16,
        micro_batch=4,
        steps=50,
    )
