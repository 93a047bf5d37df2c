"""`culm.verify`: what `culm verify` finds, from Python."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.verification import verified_job
from tests.verification.test_verify_run import edit_events, exact_run, run, tamper

import culm

__all__ = ["exact_run", "run"]  # fixtures


def test_a_run_is_equal(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown: list[tuple[str, int, int]] = []
    found = culm.verify(run, progress=lambda *progress: shown.append(progress))
    assert (found.equal, found.proven_steps, found.checkpoints, tuple(found.steps)) == (True, 4, (4, 6), (2, 6))
    assert str(found).startswith("equal: 4 steps retrained (2:6)")
    assert shown[-1] == ("retraining steps 2:6", 4, 4)
    assert capfd.readouterr() == ("", "")
    assert json.loads((run / "summary.json").read_text())["verified"] == 4


def test_steps_are_chosen_and_generators_keep_their_states(run: Path) -> None:
    seed_generators()
    expected = random.random(), np.random.random(), torch.rand(1).item()
    seed_generators()
    assert culm.verify(run, (0, 4)).proven_steps == 4
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


def seed_generators() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_a_changed_bit_is_a_difference(run: Path) -> None:
    tamper(run, 6, "2.weight")
    found = culm.verify(run)
    assert not found.equal
    assert found.difference is not None
    assert (found.difference.step, found.difference.layer, found.difference.what) == (6, 2, "weights")
    assert str(found).startswith("different: layer 2, weights (2.weight)")


def test_a_run_whose_job_is_not_recorded_is_verified_with_a_job(run: Path) -> None:
    edit_events(run, job="", job_file="")
    with pytest.raises(culm.CulmError, match="name it with --job"):
        culm.verify(run)
    job = dataclasses.replace(verified_job.modules(), exact=True)  # its layers are modules: other initial weights
    assert not culm.verify(run, (0, 2), job=job).equal
    job = dataclasses.replace(verified_job.job(), exact=True)
    assert culm.verify(run, job=job).equal
    assert culm.verify(run, job=lambda: job).equal


@pytest.mark.parametrize("steps", [(4, 2), (-1, 2), (2,), "2:4", (2.0, 4.0)])
def test_steps_that_are_no_range_are_refused(run: Path, steps: object) -> None:
    with pytest.raises(culm.CulmError, match="use the steps of the first and the last checkpoint"):
        culm.verify(run, steps)  # type: ignore[arg-type]


def test_what_is_no_job_is_refused(run: Path) -> None:
    with pytest.raises(culm.CulmError, match=r"job is of type int: pass a culm\.Job or a function that returns one"):
        culm.verify(run, job=lambda: 3)  # type: ignore[arg-type, return-value]
