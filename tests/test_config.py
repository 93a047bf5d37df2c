"""RunConfig: one description of how a run is executed, for Python, the command line, the store and the report."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import pytest

import culm
from culm.config import JoinOptions, RunConfig, RunOptions, merge_options
from culm.errors import UsageError
from culm.observe.writers.prometheus import PrometheusWriter
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


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    options = {"pipelines": np.int64(2), "suspect_after": np.float64(3), "dash": np.bool_(True), "cuts": np.array([1])}
    config = merge_options(None, options)
    assert (config.pipelines, config.suspect_after, config.dash, config.cuts) == (2, 3.0, True, (1,))
    assert msgspec.json.decode(msgspec.json.encode(config), type=RunConfig) == config


def test_an_unknown_keyword_argument_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="RunConfig has no field 'stags': did you mean 'stages'"):
        merge_options(None, {"stags": 2})


@pytest.mark.parametrize(("name", "field"), [("kill", "kills"), ("job", "job_name"), ("price", "node_price")])
def test_the_name_of_an_option_leads_to_its_field(name: str, field: str) -> None:
    with pytest.raises(UsageError, match=f"RunConfig has no field '{name}': did you mean '{field}'"):
        merge_options(None, {name: "x"})


def test_a_field_of_the_job_is_refused_with_the_argument_that_replaces_it() -> None:
    with pytest.raises(UsageError, match=r"field of the Job; culm\.train replaces it with overrides={'steps': "):
        merge_options(None, {"steps": 2})


def test_a_config_of_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match=r"config is of type dict: pass a culm\.RunConfig"):
        merge_options({"stages": 2}, {})  # type: ignore[arg-type]


def test_a_writer_may_be_a_class_that_other_processes_can_import() -> None:
    assert RunConfig(writers=(PrometheusWriter, "wandb")).writers == (  # type: ignore[arg-type]
        "culm.observe.writers.prometheus:PrometheusWriter",
        "wandb",
    )

    class Local:
        """Cannot be imported."""

    with pytest.raises(UsageError, match=r"writers is the class .*Local.* other processes cannot import"):
        RunConfig(writers=(Local,))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", FIELDS)
def test_a_value_of_a_wrong_type_is_refused_in_one_sentence(field: str) -> None:
    with pytest.raises(UsageError):
        merge_options(None, {field: object()})


def test_losses_is_a_deprecated_name_of_the_preemption_rate() -> None:
    with pytest.warns(FutureWarning, match="losses is deprecated: use preemption_rate"):
        assert merge_options(None, {"losses": 0.3}).preemption_rate == 0.3
    with pytest.raises(UsageError, match="both given"):
        merge_options(None, {"losses": 0.3, "preemption_rate": 0.2})


@pytest.mark.parametrize("function", [culm.train, culm.start])
def test_the_warning_points_to_the_line_of_the_caller(function: Any) -> None:
    with pytest.warns(FutureWarning) as caught, pytest.raises(UsageError):
        function("nowhere.py", losses=0.3)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_warning_of_join_points_to_the_line_of_the_caller() -> None:
    with pytest.warns(FutureWarning) as caught, pytest.raises(UsageError):
        culm.join(losses=0.3)  # type: ignore[call-arg]
    assert [warning.filename for warning in caught] == [__file__]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"out": ""}, "--out is '': name a place"),
    ({"kills": "node=1 step=2"}, "--kill is 'node=1 step=2': use a sequence"),
    ({"kills": ["node=1"]}, "does not say when"),
    ({"ports": (7100, 7000)}, "--ports 7100-7000 is not a range"),
    ({"ports": (7100,)}, "--ports is (7100,): use the first and the last port"),
    ({"preemption_rate": -0.1}, "--preemption-rate is -0.1: use the share of nodes preempted per hour"),
    ({"preemption_rate": "10%"}, "--preemption-rate is '10%'"),
    ({"trace": "t.csv", "speedup": 0}, "--speedup is 0: use a number above 0"),
    ({"trace": "t.csv", "notice": -1}, "--notice is -1: use a number of at least 0"),
    ({"speedup": 60.0}, "--speedup is for a run on a trace"),
    ({"local_nodes": 2}, "--local is for a run that other machines join: add --join TOKEN or --etcd URL"),
    ({"etcd": "http://a", "local_nodes": -1}, "--local is -1: use a whole number of at least 0"),
    ({"checkpoint_every": 5}, "--checkpoint-every needs a folder"),
    ({"dash": "yes"}, "--dash is 'yes': use True or False"),
    ({"etcd": 5}, "--etcd is 5: use a string"),
    ({"suspect_after": "5"}, "--suspect-after is '5': use a number"),
    ({"cuts": (1, "2")}, "--cuts is (1, '2'): use a sequence of whole numbers"),
    ({"kills": [("node=1",)]}, "use a sequence of strings"),
    ({"hook_timeout": -1}, "--hook-timeout is -1: use a number of seconds above 0"),
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
