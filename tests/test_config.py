"""RunConfig: one description of how a run is executed, for Python, the command line, the store and the report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

import culm
from culm.config import JoinOptions, RunConfig, RunOptions, merge_options
from culm.errors import UsageError
from culm.providers.shared_run import find_shared_run

FIELDS = [field.name for field in dataclasses.fields(RunConfig)]
FULL = RunConfig(
    pipelines=2,
    stages=3,
    cuts=(1, 2),
    out="runs/a",
    kills=("node=1 step=2 at=0F1",),
    ports=(7000, 7100),
    etcd="http://127.0.0.1:2379",
    etcd_user="root:hunter2",
    secret_file="secret",
    writers=("tensorboard",),
)


def test_keyword_arguments_are_exactly_the_fields() -> None:
    assert sorted(get_type_hints(RunOptions)) == sorted(FIELDS)
    assert set(get_type_hints(JoinOptions)) < set(FIELDS)


def test_a_config_survives_msgpack_and_json() -> None:
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(FULL), type=RunConfig) == FULL


def test_what_the_store_and_the_report_get_has_no_password() -> None:
    config = dataclasses.replace(FULL, out="ftp://me:hunter2@host/runs")
    text = json.dumps(config.to_dict())
    assert "hunter2" not in text
    assert config.without_secrets().etcd_user == "root"
    assert config.without_secrets().out == "ftp://me:***@host/runs"
    assert json.loads(text)["ports"] == [7000, 7100]


def test_keyword_arguments_override_the_config() -> None:
    merged = merge_options(FULL, {"stages": 4, "strategy": "none"})
    assert merged == dataclasses.replace(FULL, stages=4, strategy="none")
    assert merge_options(None, {}) == RunConfig()


def test_paths_become_text_and_sequences_become_tuples() -> None:
    config = merge_options(None, {"out": Path("runs/a"), "kills": ["node=1 step=2"], "cuts": iter([1, 2])})
    assert (config.out, config.kills, config.cuts) == ("runs/a", ("node=1 step=2",), (1, 2))


def test_an_unknown_keyword_argument_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="RunConfig has no field 'stags': did you mean 'stages'"):
        merge_options(None, {"stags": 2})


def test_losses_is_a_deprecated_name_of_the_preemption_rate() -> None:
    with pytest.warns(DeprecationWarning, match="losses is deprecated: use preemption_rate"):
        assert merge_options(None, {"losses": 0.3}).preemption_rate == 0.3
    with pytest.raises(UsageError, match="both given"):
        merge_options(None, {"losses": 0.3, "preemption_rate": 0.2})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"out": ""}, "--out is '': name a place"),
    ({"kills": "node=1 step=2"}, "--kill is 'node=1 step=2': use a sequence"),
    ({"kills": ["node=1"]}, "does not say when"),
    ({"ports": (7100, 7000)}, "--ports 7100-7000 is not a range"),
    ({"ports": (7100,)}, "--ports 7100 is not a range"),
    ({"preemption_rate": -0.1}, "--preemption-rate is -0.1: use the share of nodes preempted per hour"),
    ({"preemption_rate": "10%"}, "--preemption-rate is '10%'"),
    ({"trace": "t.csv", "speedup": 0}, "--speedup is 0: use a number above 0"),
    ({"trace": "t.csv", "notice": -1}, "--notice is -1: use a number of at least 0"),
    ({"speedup": 60.0}, "--speedup is for a run on a trace"),
    ({"local_nodes": 2}, "--local is for a run that other machines join: add --join TOKEN or --etcd URL"),
    ({"etcd": "http://a", "local_nodes": -1}, "--local is -1: use a whole number of at least 0"),
    ({"checkpoint_every": 5}, "--checkpoint-every needs a folder"),
    ({"restart": "hot"}, "no --restart 'hot'"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG)
def test_a_wrong_field_is_refused_by_name(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        merge_options(None, options)
    assert sentence in str(refused.value)


def test_a_resumed_run_writes_to_the_folder_that_it_resumes() -> None:
    assert RunConfig(resume="runs/a", checkpoint_every=2).folder == "runs/a"
    assert RunConfig(resume="runs/a", out="runs/b").folder == "runs/b"


def test_other_machines_need_a_job_in_a_file() -> None:
    from tests.tiny_jobs import job

    with pytest.raises(UsageError, match="other machines cannot import this job: put it into a file"):
        culm.train(job(), etcd="http://127.0.0.1:1")


def test_an_agent_needs_a_token_or_an_etcd() -> None:
    with pytest.raises(UsageError, match="--join is missing: give the token of culm head, or name an etcd with --etcd"):
        culm.join()
    with pytest.raises(UsageError, match="--etcd and --join are both given"):
        culm.join(etcd="http://127.0.0.1:1", join="culm1-x")
    with pytest.raises(UsageError, match="--notice is 'oracle'"):
        culm.join(etcd="http://127.0.0.1:1", job_name="gpt", notice_source="oracle")


def test_a_password_over_http_needs_the_option_that_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULM_SECRET", "sixteen bytes or more")
    config = RunConfig(etcd="http://192.0.2.1:2379", etcd_user="root:word", job_name="job", address="127.0.0.1")
    with pytest.raises(UsageError, match="--etcd-insecure"):
        find_shared_run(config)
    assert find_shared_run(dataclasses.replace(config, etcd_insecure=True)).access.password == "word"


def test_an_unknown_choice_of_encryption_is_refused() -> None:
    with pytest.raises(UsageError, match="no --encrypt 'yes': use auto or on or off"):
        merge_options(None, {"encrypt": "yes"})


def test_what_sums_gradients_is_checked() -> None:
    with pytest.raises(UsageError, match="no --reduce 'mpi': use auto or nccl or gloo"):
        merge_options(None, {"reduce": "mpi"})
    with pytest.raises(UsageError, match="--reduce nccl and --encrypt on contradict each other"):
        RunConfig(reduce="nccl", encrypt="on")
