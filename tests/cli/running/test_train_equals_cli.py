"""A job file trains the same from Python as from the command line."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import JOBS
from tests.test_summary import make_summary

import culm
from culm.cli import main
from culm.errors import JobError, UsageError
from culm.job import load_job
from culm.providers.local_provider import ForkServerClient
from culm.testing import reference

pytestmark = pytest.mark.real


def test_train_takes_a_job_file_by_name_or_as_a_job_out_of_it(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None, fork_server: ForkServerClient
) -> None:
    with pytest.raises(SystemExit):
        main(["run", JOBS, "--stages", "2", "--quiet", "--json"])
    expected = json.loads(capsys.readouterr().out)["weights_sha256"]
    by_name = culm.train(f"{JOBS}:job", stages=2, fork_server=fork_server)
    as_job = culm.train(load_job(JOBS), stages=2, fork_server=fork_server)
    assert [by_name.weights_sha256, as_job.weights_sha256] == [expected, expected]


WRONG: dict[str, tuple[Any, str]] = {
    "pipelines": (2.5, "--pipelines is 2.5: use a whole number"),
    "stages": ("2", "--stages is '2': use a whole number"),
    "memory": ("16GiB", "--memory is '16GiB': use a whole number"),
    "keep_last": (True, "--keep-last is True: use a whole number"),
    "strategy": (None, "strategy is None: use one of "),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_type_is_refused_by_name(name: str) -> None:
    value, sentence = WRONG[name]
    with pytest.raises(UsageError, match=sentence):
        culm.train(f"{JOBS}:job", **{name: value})


@pytest.mark.parametrize("given", [3, None, lambda: 3])
def test_what_is_no_job_is_refused_by_its_type(given: Any) -> None:
    with pytest.raises(UsageError, match=r"job is of type (int|NoneType): pass a culm\.Job"):
        culm.train(given)


def test_fields_of_the_job_are_replaced_as_by_set(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None, fork_server: ForkServerClient
) -> None:
    with pytest.raises(SystemExit):
        main(["run", JOBS, "--stages", "2", "--quiet", "--json", "--steps", "1", "--seed", "5", "--exact"])
    expected = json.loads(capsys.readouterr().out)
    overrides = {"steps": 1, "seed": 5, "exact": True}
    for job in (f"{JOBS}:job", load_job(JOBS)):
        summary = culm.train(job, stages=2, overrides=overrides, fork_server=fork_server)
        assert (summary.steps, summary.exact, summary.weights_sha256) == (1, True, expected["weights_sha256"])


WRONG_OVERRIDES: list[tuple[dict[str, Any], str]] = [
    ({"stepz": 1}, "stepz.* no such field.*did you mean 'steps'"),
    ({"steps": 1.5}, "takes a whole number|use a whole number"),
    ({"steps": -1}, "steps is -1: use a whole number of at least 0"),
]


@pytest.mark.parametrize(("overrides", "sentence"), WRONG_OVERRIDES)
def test_wrong_overrides_are_refused(overrides: dict[str, Any], sentence: str) -> None:
    for job in (f"{JOBS}:job", load_job(JOBS)):
        with pytest.raises(JobError, match=sentence):
            culm.train(job, overrides=overrides)


def test_a_function_cannot_override_a_field_of_a_job_in_a_file() -> None:
    with pytest.raises(JobError, match=r"overrides has loss=.* or pass a Job instead of its file"):
        culm.train(f"{JOBS}:job", overrides={"loss": max})


def test_a_folder_may_be_a_path(fork_server: ForkServerClient, tmp_path: Path) -> None:
    trained = culm.train(f"{JOBS}:job", stages=2, out=tmp_path / "a", fork_server=fork_server)
    assert trained.out == str(tmp_path / "a")
    assert trained.weights()


def test_a_summary_can_be_copied_and_pickled() -> None:
    summary = make_summary(steps=3, out="runs/a")
    for again in (copy.copy(summary), pickle.loads(pickle.dumps(summary))):
        assert again == summary
        assert again.steps == 3


def test_a_refused_job_leaves_no_folder(fork_server: ForkServerClient, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use --stages 4"):
        culm.train(f"{JOBS}:job", stages=9, out=str(tmp_path / "a"), fork_server=fork_server)
    assert not (tmp_path / "a").exists()


def test_from_python_a_config_kills_nodes_replays_a_trace_and_serves_the_page(
    fork_server: ForkServerClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("0,add,a,z\n0,add,b,z\n")
    config = culm.RunConfig(pipelines=2, strategy="reroute", kills=("node=1 step=1 at=0B2",), dash=True)
    exact = load_job(JOBS, {"exact": "true"})
    summary = culm.train(exact, config, stages=1, trace=trace, out=tmp_path / "a", fork_server=fork_server)
    assert summary.state_sha256 == reference(exact).state_sha256
    assert [(found["lost"], found["source"]) for found in summary.recoveries] == [([1], "peers")]
    assert "culm: the run is shown at http://127.0.0.1:" in capsys.readouterr().err
    assert summary.capacity_share is not None
    folder = tmp_path / "a"
    (started, *_) = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    written = json.loads((folder / "summary.json").read_text())
    assert started["kind"] == "run_started"
    for found in (written["config"], started["config"], summary.config):
        assert found["kills"] == ["node=1 step=1 at=0B2"]
        assert (found["stages"], found["trace"]) == (1, str(trace))
    assert "kills=" in capsys_report(capsys, folder)


def capsys_report(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The page that `culm report` writes for a folder."""
    with pytest.raises(SystemExit) as end:
        main(["report", str(folder), "--out", str(folder / "page.html")])
    assert end.value.code == 0, capsys.readouterr().err
    return (folder / "page.html").read_text()
