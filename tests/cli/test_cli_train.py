"""A job file trains the same from Python as from the command line."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

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


WRONG: dict[str, tuple[Any, str]] = {
    "pipelines": (2.5, "--pipelines is 2.5: use a whole number"),
    "stages": ("2", "--stages is '2': use a whole number"),
    "memory": ("16GiB", "--memory is '16GiB': use a whole number"),
    "keep_last": (True, "--keep-last is True: use a whole number"),
    "strategy": (None, "this version has no --strategy None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_type_is_refused_by_name(name: str) -> None:
    value, sentence = WRONG[name]
    with pytest.raises(UsageError, match=sentence):
        culm.train(f"{JOBS}:job", **{name: value})


@pytest.mark.parametrize("given", [3, None, lambda: 3])
def test_what_is_no_job_is_refused_by_its_type(given: Any) -> None:
    with pytest.raises(UsageError, match=r"culm\.train was given a (int|NoneType): pass a culm\.Job"):
        culm.train(given)


def test_a_folder_may_be_a_path(nursery: LocalNursery, tmp_path: Path) -> None:
    trained = culm.train(f"{JOBS}:job", stages=2, out=tmp_path / "a", nursery=nursery)
    assert trained.out == str(tmp_path / "a")
    assert trained.weights()


def test_a_summary_can_be_copied_and_pickled() -> None:
    summary = culm.Summary({"steps": 3}, "runs/a")
    for again in (copy.copy(summary), pickle.loads(pickle.dumps(summary))):
        assert again == summary
        assert again.steps == 3


def test_a_refused_job_leaves_no_folder(nursery: LocalNursery, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use --stages 4"):
        culm.train(f"{JOBS}:job", stages=9, out=str(tmp_path / "a"), nursery=nursery)
    assert not (tmp_path / "a").exists()
