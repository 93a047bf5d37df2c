"""Every family trains as the plain Hugging Face loop does, in any shape and through a loss of a node."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cached_runs import cached_setup, reference_result
from tests.hf.tiny_hf import FAMILIES, items, sgd, task_of, tiny_job, tiny_model

import culm
import culm.hf
from culm.runtime.compute.rng import sample_indices
from culm.testing import Faults
from culm.testing.simulated_cluster import run_prepared

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def family_job(family: str) -> culm.Job:
    return tiny_job(tiny_model(family), family, steps=20 if family == "llama" else 8)


def plain_loop(model: Any, job: culm.Job, family: str) -> list[float]:
    """The loop that a user of transformers would write: one forward per step over the global batch."""
    data = items(family)
    optimizer = sgd(model.parameters())
    model.train()
    losses = []
    for step in range(job.steps):
        indices = [i for micro in range(job.micro_batches) for i in sample_indices(job, step, micro)]
        batch = {name: torch.stack([data[i][name] for i in indices]) for name in data[0]}
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_equal_the_plain_hugging_face_loop(family: str) -> None:
    """One micro-batch per step: the balance of experts is not a sum over micro-batches."""
    job = tiny_job(tiny_model(family), family, micro_batch=4, exact=False)
    model = tiny_model(family)
    assert reference_result(job).losses == pytest.approx(plain_loop(model, job, family), rel=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_equals_the_reference_with_and_without_a_kill(family: str) -> None:
    job = family_job(family)
    expected = reference_result(job)
    runs: list[tuple[dict[str, Any], Faults]] = [
        ({"pipelines": 1, "stages": 3}, Faults()),
        ({"pipelines": 2, "stages": 2}, Faults()),
        ({"pipelines": 2, "stages": 2}, Faults().kill(3, at="1B1", step=7)),
        ({"pipelines": 1, "stages": 3, "strategy": "shadow"}, Faults().kill(1, at="1F1", step=3)),
    ]
    for shape, faults in runs:
        run = run_prepared(job, cached_setup(job, **shape), faults=faults, cost=lambda *_: 0.01, latency=0.001)
        assert run.state_sha256 == expected.state_sha256, (family, shape)
        assert run.losses == expected.losses
        assert len(run.injected_faults) == len(faults.all)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_from_a_folder_equal_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    """Shards of a few kilobytes: every layer reads its own tensors."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    from_folder = culm.hf.parts(tmp_path, task_of(family))
    in_memory = culm.hf.parts(model)
    assert [str(group) for group in from_folder["tied"]] == [str(group) for group in in_memory["tied"]]
    for one, other in zip(from_folder["layers"], in_memory["layers"], strict=True):
        expected = other().state_dict()
        found = one().state_dict()
        assert found.keys() == expected.keys()
        tied = {name.partition(".")[2] for group in in_memory["tied"] for name in group[1:]}
        assert all(torch.equal(found[name], expected[name]) for name in expected.keys() - tied)
