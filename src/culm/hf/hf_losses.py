"""Losses of Hugging Face models as (sum, weight): a step is a mean over all tokens (or items) that count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from culm.errors import JobError
from culm.hf.hf_batches import IGNORED


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy over labels that are not -100. With experts: plus the balance of their routers, per token."""

    balance: float = 0.0
    """Factor of the router's auxiliary loss."""

    def __call__(self, output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        logits, balance = output if isinstance(output, tuple) else (output, None)
        if logits.shape[:-1] != target.shape:
            raise JobError(
                f"the labels have shape {tuple(target.shape)} and the outputs {tuple(logits.shape[:-1])}: "
                "give one label for each output, -100 where none counts"
            )
        loss = functional.cross_entropy(
            logits.flatten(0, -2).float(), target.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        weight = (target != IGNORED).sum()
        return (loss if balance is None else loss + self.balance * balance * weight), weight


@dataclass(frozen=True)
class Classification:
    """The loss of a classification or regression head, chosen as transformers does: by `problem_type`, or by the
    number and the type of the labels."""

    labels: int
    problem: str | None

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.tensor(len(target), device=target.device)
        problem = self.problem or (
            "regression"
            if self.labels == 1
            else "multi_label_classification"
            if target.is_floating_point()
            else "single_label_classification"
        )
        if problem == "regression":
            loss = functional.mse_loss(output.squeeze(), target.squeeze().to(output.dtype))
        elif problem == "multi_label_classification":
            loss = functional.binary_cross_entropy_with_logits(output, target)
        else:
            loss = functional.cross_entropy(output.view(-1, self.labels), target.view(-1))
        return loss * count, count
