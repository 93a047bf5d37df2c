"""Named values of your own: in steps.jsonl, on the page of the run and in TensorBoard.

    culm run examples/own_metric.py --pipelines 2 --stages 2 --steps 50 --out runs/metrics --writer tensorboard
    culm report runs/metrics            # a chart for each named value
    tensorboard --logdir runs/metrics/tensorboard

They survive a lost node as the loss does: each micro-batch counts once. Try --kill "node=1 step=5".
"""

import torch
from torch import Tensor, nn

import culm

CLASSES, WIDTH = 4, 16


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).float().mean()


def loss(output: Tensor, target: Tensor) -> Tensor:
    z_loss = output.logsumexp(dim=1).square().mean()
    culm.record("z_loss", z_loss)
    return nn.functional.cross_entropy(output, target) + 1e-3 * z_loss


def points(count: int = 512) -> list[tuple[Tensor, Tensor]]:
    """Points around four centres."""
    draw = torch.Generator().manual_seed(0)
    centres, labels = torch.randn(CLASSES, WIDTH, generator=draw), torch.randint(CLASSES, (count,), generator=draw)
    return [(centres[label] + torch.randn(WIDTH, generator=draw), label) for label in labels]


def job() -> culm.Job:
    return culm.Job(
        layers=[lambda: nn.Linear(WIDTH, 32), nn.ReLU, lambda: nn.Linear(32, 32), lambda: nn.Linear(32, CLASSES)],
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=points(),
        global_batch=32,
        micro_batch=4,
        steps=40,
        metrics={
            "accuracy": accuracy,  # a function: the mean over the step
            "largest_logit": culm.Metric(lambda output, _: output.max(), reduce="max"),
            "z_loss": "mean",  # recorded by the loss
        },
    )
