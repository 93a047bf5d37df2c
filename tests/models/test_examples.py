"""The examples are jobs that learn, and short enough to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from culm.job import Job, load_job

if TYPE_CHECKING:
    pass

EXAMPLES = Path(__file__).parents[2] / "examples"


def losses(job: Job, steps: int) -> list[float]:
    """A plain loop without clipping, on batches drawn with replacement."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer() for layer in job.layers])
    optimizer = job.optimizer(list(model.parameters()))
    result = []
    for _ in range(steps):
        items: Any = [job.data[i] for i in torch.randint(len(job.data), (job.global_batch,)).tolist()]
        inputs, target = default_collate(items)
        optimizer.zero_grad()
        loss = job.loss(model(inputs), target)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        result.append(loss.item())
    return result


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["gpt.py", "resnet.py", "own_metric.py"])
def test_an_example_learns_within_a_few_steps(name: str) -> None:
    result = losses(load_job(str(EXAMPLES / name)), 15)
    assert result[-1] < 0.8 * result[0]


def test_the_larger_gpt_is_a_job_too() -> None:
    job = load_job(f"{EXAMPLES / 'gpt.py'}:larger")
    assert len(job.layers) == 8 and len(job.tied) == 1


def test_the_learning_rate_of_the_example_rises_and_then_falls() -> None:
    schedule = load_job(str(EXAMPLES / "gpt.py")).lr_schedule
    assert schedule is not None
    assert [schedule(step) for step in (0, 1000, 5000)] == pytest.approx([0.1, 0.1, 0.1])
    assert schedule(0) < schedule(5) < schedule(10) > schedule(500) > schedule(1000)


@pytest.mark.parametrize("name", ["gpt.py", "resnet.py", "own_metric.py"])
def test_an_example_is_short_and_starts_with_the_command_that_runs_it(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 60
    assert f"culm run examples/{name} --pipelines 2 --stages 2 --steps 50" in text.split('"""')[1]
