"""The papers' six models have the published numbers of parameters, and train through a loss of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cached_runs import run_with_faults
from torch import nn

from culm.errors import JobError
from culm.job import Job
from culm.models import (
    PAPER_MODELS,
    MaskedTokens,
    RandomImages,
    RandomTokens,
    Translations,
    gnmt,
    gnmt_tied,
    paper_job,
)
from culm.testing import Faults

_WIDTH, _VOCAB = 1024, 32320
_LSTM = 4 * _WIDTH * (2 * _WIDTH) + 8 * _WIDTH
"""An LSTM with as many inputs as outputs; one with twice the inputs has _WIDE_LSTM."""
_WIDE_LSTM = _LSTM + 4 * _WIDTH * _WIDTH
_ATTENTION = 2 * _WIDTH * _WIDTH + 2 * _WIDTH + 1
_GNMT = (
    3 * _VOCAB * _WIDTH  # source, target, head
    + _VOCAB  # bias of the head
    + (2 * _LSTM + _WIDE_LSTM + 6 * _LSTM)  # encoder: both directions, then twice the inputs
    + (_LSTM + _ATTENTION + 7 * _WIDE_LSTM)  # decoder: the context is an input
)

PUBLISHED = {
    "resnet-152": 60_192_808,
    "vgg-19": 143_667_240,
    "alexnet": 61_100_840,
    "gnmt-16": _GNMT,
    "bert-large": 336_226_108,
    "gpt-2": 124_439_808,
}
"""torchvision's documentation; transformers' BertForPreTraining and GPT2LMHeadModel; the sum above, which Shazeer et
al. (2017) give as 278 million."""

SMALL: dict[str, dict[str, Any]] = {
    "resnet-152": {
        "sizes": {"width": 4, "depths": (1, 2), "classes": 3},
        "data": RandomImages(32, size=16, classes=3),
    },
    "vgg-19": {
        "sizes": {"width": 2, "hidden": 8, "classes": 3, "grid": 1},
        "data": RandomImages(32, size=32, classes=3),
    },
    "alexnet": {
        "sizes": {"width": 4, "hidden": 8, "classes": 3, "grid": 1},
        "data": RandomImages(32, size=64, classes=3),
    },
    "gnmt-16": {"sizes": {"width": 8, "layers": 3, "vocab": 16}, "data": Translations(16, 5, 32)},
    "bert-large": {
        "sizes": {"width": 8, "blocks": 2, "heads": 2, "context": 8, "vocab": 16},
        "data": MaskedTokens(16, 8, 32),
    },
    "gpt-2": {
        "sizes": {"width": 8, "blocks": 2, "heads": 2, "context": 8, "vocab": 16, "dropout": 0.1},
        "data": RandomTokens(16, 8, 32),
    },
}


def small_job(name: str) -> Job:
    return paper_job(name, **SMALL[name], global_batch=8, micro_batch=2, steps=4, exact=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name: str) -> None:
    job = paper_job(name)
    assert parameter_count(job.layers, job.tied) == PUBLISHED[name]


def parameter_count(layers: Any, tied: Any) -> int:
    """On the meta device; shared parameters count once."""
    with torch.device("meta"):
        built = [layer() for layer in layers if not isinstance(layer, nn.Module)]
    count = sum(int(p.numel()) for layer in built for p in layer.parameters())
    aliases = [name.partition(".") for group in tied for name in group[1:]]
    return count - sum(int(built[int(index)].get_parameter(name).numel()) for index, _, name in aliases)


def test_gnmt_with_shared_embeddings_has_the_parameters_of_the_mlperf_implementation() -> None:
    layers = gnmt(layers=4)
    assert parameter_count(layers, gnmt_tied(layers)) == 160_671_297


def test_the_models_of_the_documentation_are_these() -> None:
    text = (Path(__file__).parents[2] / "docs/job.md").read_text()
    for name, model in PAPER_MODELS.items():
        assert f"| `{name}` | {PUBLISHED[name]:,} | {model.global_batch}/{model.micro_batch} |" in text


def test_batches_and_shapes_are_those_of_the_papers() -> None:
    found = {name: (m.global_batch, m.micro_batch, m.pipelines, m.stages) for name, m in PAPER_MODELS.items()}
    assert found == {
        "resnet-152": (384, 16, 4, 12),
        "vgg-19": (384, 8, 4, 6),
        "alexnet": (576, 8, 4, 6),
        "gnmt-16": (32, 4, 4, 6),
        "bert-large": (256, 2, 4, 12),
        "gpt-2": (32, 4, 4, 12),
    }
    with pytest.raises(JobError, match="bert-large"):
        paper_job("bert")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SMALL)
def test_a_small_one_is_the_same_to_the_bit_after_a_kill(name: str) -> None:
    job = small_job(name)
    run_with_faults(job, Faults().kill(3, at="1B3", step=2), pipelines=2, stages=2)
    run_with_faults(job, Faults().kill(1, at="1F2", step=1), pipelines=1, stages=3, strategy="shadow")
