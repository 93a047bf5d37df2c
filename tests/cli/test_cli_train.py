"""A job file trains the same from Python as from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import culm
from culm.cli import main
from culm.errors import UsageError
from culm.job import load
from culm.providers.local import LocalNursery

from .command import JOBS

pytestmark = pytest.mark.real


def test_train_takes_a_job_file_by_name_or_as_a_job_out_of_it(
    capsys: pytest.CaptureFixture[str], shared_nursery: None, nursery: LocalNursery
) -> None:
    with pytest.raises(SystemExit):
        main(["run", JOBS, "--stages", "2", "--quiet", "--json"])
    expected = json.loads(capsys.readouterr().out)["weights_sha256"]
    by_name = culm.train(f"{JOBS}:job", stages=2, nursery=nursery)
    as_job = culm.train(load(JOBS), stages=2, nursery=nursery)
    assert [by_name.weights_sha256, as_job.weights_sha256] == [expected, expected]


def test_a_refused_job_leaves_no_folder(nursery: LocalNursery, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use --stages 4"):
        culm.train(f"{JOBS}:job", stages=9, out=str(tmp_path / "a"), nursery=nursery)
    assert not (tmp_path / "a").exists()
