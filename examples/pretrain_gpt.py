"""Pretrain GPT-2 of transformers from random weights, with warm-up, clipping and a tied head.

    culm run examples/pretrain_gpt.py --pipelines 2 --stages 2 --steps 50 --out runs/gpt2 --kill "node=3 step=5"
    culm export runs/gpt2 gpt2 --hf            # GPT2LMHeadModel.from_pretrained("gpt2")

gpt.py in this folder trains culm's own GPT instead, which needs no transformers.
"""

import torch
from transformers import GPT2Config

import culm
import culm.hf
from culm.models import Characters

LENGTH = 64


def job() -> culm.Job:
    data = Characters(length=LENGTH)
    tokens = {"vocab_size": data.vocab, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**tokens, n_positions=LENGTH, n_embd=48, n_layer=4, n_head=4)
    return culm.Job(
        **culm.hf.parts(config),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
        data=data,
        global_batch=16,
        micro_batch=4,
        steps=200,
        lr_schedule=lambda step: min(1.0, (step + 1) / 10),
        clip_norm=1.0,
    )
