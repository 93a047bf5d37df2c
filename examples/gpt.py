"""A small GPT that learns to spell like Shakespeare.

On one machine, as four processes in two pipelines of two stages; it takes seconds:
    culm run examples/gpt.py --pipelines 2 --stages 2 --steps 50 --out runs/a

In another shape, with another schedule. The weights at the end are the same, to the bit (weights_sha256):
    culm run examples/gpt.py --pipelines 2 --stages 2 --steps 50 --exact --out runs/b
    culm run examples/gpt.py --pipelines 1 --stages 3 --steps 50 --exact --schedule zb --out runs/c

A larger one, made for GPUs:
    culm run examples/gpt.py:larger --pipelines 2 --stages 4 --out runs/d
"""

import math

import torch

import culm
from culm.models import Characters, gpt, gpt_loss, gpt_tied


def job() -> culm.Job:
    """0.2 million parameters, 6 layers; the loss falls from 4.0 to about 2.4 in 50 steps."""
    data = Characters(length=64)
    return culm.Job(
        layers=gpt("nano", vocab=data.vocab),  # Embed, 4 Blocks, Head: to be cut into stages between any two
        loss=gpt_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
        data=data,
        global_batch=32,
        micro_batch=4,  # 8 micro-batches a step, over all pipelines
        steps=200,
        lr_schedule=warm_up_and_decay,
        clip_norm=1.0,
    )


def larger() -> culm.Job:
    """nanoGPT's model of Shakespeare: 10 million parameters, dropout, head and embedding tied."""
    data = Characters(length=256)
    layers = gpt("mini", vocab=data.vocab, dropout=0.2)
    return culm.Job(
        layers=layers,
        tied=gpt_tied(layers),
        loss=gpt_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
        data=data,
        global_batch=64,
        micro_batch=4,
        steps=1000,
        lr_schedule=warm_up_and_decay,
        clip_norm=1.0,
    )


def warm_up_and_decay(step: int) -> float:
    """A factor on the learning rate: a function of the step, because a scheduler object could not move with a layer."""
    return min((step + 1) / 10, 0.1 + 0.9 * (1 + math.cos(math.pi * min(step / 1000, 1.0))) / 2)
