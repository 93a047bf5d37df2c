"""A small ResNet that learns to count waves in noisy pictures: convolutions and batch norm in a pipeline.

On one machine, as four processes in two pipelines of two stages:
    culm run examples/resnet.py --pipelines 2 --stages 2 --steps 50 --out runs/a

With the schedule that fills the bubbles:
    culm run examples/resnet.py --pipelines 2 --stages 2 --steps 50 --schedule zb --out runs/b
"""

import torch
from torch.nn.functional import cross_entropy

import culm
from culm.models import RandomImages, resnet


def job() -> culm.Job:
    """ResNet-8 at half its width, 5 layers; it counts nearly all pictures right after 50 steps."""
    return culm.Job(
        layers=resnet(depth=8, width=8),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4),
        data=RandomImages(count=4096, size=24),
        global_batch=64,
        micro_batch=8,
        steps=100,
        evaluate=RandomImages(count=256, size=24, seed=1),
        evaluate_every=25,
    )


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over a micro-batch."""
    return cross_entropy(output, target)
