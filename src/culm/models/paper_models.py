"""The models that the papers on preemptible training measured, with their batch sizes and shapes.

Bamboo (NSDI'23): Adam, fp32, four pipelines; 12 stages for ResNet-152, BERT-Large and GPT-2, 6 for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from culm.errors import JobError
from culm.job import Dataset, Job
from culm.models.bert import bert, bert_loss, bert_tied
from culm.models.convnets import alexnet, resnet152, vgg19
from culm.models.datasets import MaskedTokens, RandomImages, RandomTokens, Translations
from culm.models.gnmt import gnmt, gnmt_loss
from culm.models.gpt import gpt, gpt_loss, gpt_tied

Builder = Callable[..., list[Callable[[], nn.Module]]]


@dataclass(frozen=True)
class PaperModel:
    """A model and how the papers trained it."""

    layers: Builder
    loss: Any
    data: Dataset
    global_batch: int
    micro_batch: int
    stages: int
    tied: Callable[[Any], Any] = lambda _: ()
    pipelines: int = 4

    def job(self, **fields: Any) -> Job:
        """A job with random data. `fields` replaces fields of the Job; `sizes` are arguments of the layers."""
        layers = self.layers(**fields.pop("sizes", {}))
        described: dict[str, Any] = {
            "layers": layers,
            "tied": self.tied(layers),
            "loss": self.loss,
            "optimizer": _adam,
            "data": self.data,
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "steps": 100,
        }
        return Job(**{**described, **fields})


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def _gpt2(**sizes: Any) -> list[Callable[[], nn.Module]]:
    return gpt("gpt2", **sizes)


_IMAGES = RandomImages(count=10_000, size=224, classes=100)

PAPER_MODELS: Mapping[str, PaperModel] = MappingProxyType(
    {
        "resnet-152": PaperModel(resnet152, nn.functional.cross_entropy, _IMAGES, 384, 16, 12),
        "vgg-19": PaperModel(vgg19, nn.functional.cross_entropy, _IMAGES, 384, 8, 6),
        "alexnet": PaperModel(alexnet, nn.functional.cross_entropy, _IMAGES, 576, 8, 6),
        "gnmt-16": PaperModel(gnmt, gnmt_loss, Translations(32320, 50, 10_000), 32, 4, 6),
        "bert-large": PaperModel(bert, bert_loss, MaskedTokens(30522, 128, 10_000), 256, 2, 12, bert_tied),
        "gpt-2": PaperModel(_gpt2, gpt_loss, RandomTokens(50257, 1024, 10_000), 32, 4, 12, gpt_tied),
    }
)
"""By name."""


def paper_job(name: str, **fields: Any) -> Job:
    """The job of one of the papers' models. `sizes`: other dimensions of the layers; other fields replace those of the
    Job. Raises JobError for an unknown name."""
    if name not in PAPER_MODELS:
        raise JobError(f"there is no paper's model {name!r}: use one of {', '.join(PAPER_MODELS)}")
    return PAPER_MODELS[name].job(**fields)
