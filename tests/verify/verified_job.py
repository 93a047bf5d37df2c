"""The job of the runs that the tests verify, in two versions: the second has another learning rate."""

import torch
from torch import nn

import culm


def _job(lr: float) -> culm.Job:
    generator = torch.Generator().manual_seed(0)
    return culm.Job(
        layers=[lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))] + [lambda: nn.Linear(4, 4)] * 3,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        data=[tuple(torch.randn(2, 4, generator=generator)) for _ in range(64)],
        global_batch=8,
        micro_batch=2,
        steps=6,
    )


def job() -> culm.Job:
    return _job(0.01)


def modules() -> culm.Job:
    return culm.Job(**{**vars(job()), "layers": [nn.Linear(4, 4) for _ in range(4)]})


def other_lr() -> culm.Job:
    return _job(0.02)


def other_batch() -> culm.Job:
    return culm.Job(**{**vars(job()), "micro_batch": 4})


def adapter() -> culm.Job:
    """The first layer is frozen, and not in checkpoints."""
    return culm.Job(**{**vars(job()), "layers": [_frozen, *job().layers[1:]], "save_frozen": False})


def _frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)
