"""`culm agent` and `culm run --etcd`: what is wrong is said in one sentence, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.cli_process import JOBS

from culm.cli import main

ETCD = ["--etcd", "http://127.0.0.1:1"]
AGENT = ["agent", *ETCD, "--job", "gpt"]
RUN = ["run", JOBS, "--stages", "2"]


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence of a command that must end with 2 and no trace."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "Traceback" not in said
    assert said.startswith("culm: ")
    return said


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULM_SECRET", "a secret of the test")
    monkeypatch.delenv("CULM_ETCD_PASSWORD", raising=False)


@pytest.mark.parametrize("command", [AGENT, [*RUN, *ETCD]])
def test_without_the_secret_no_node_joins_or_leads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delenv("CULM_SECRET")
    assert "there is no secret: set CULM_SECRET or give --secret-file" in usage_error(capsys, *command)
    assert "--secret-file is '/no/such'" in usage_error(capsys, *command, "--secret-file", "/no/such")


def test_a_secret_in_a_file_is_as_good(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short\n")
    assert "CULM_SECRET has 5 bytes" in usage_error(capsys, *AGENT, "--secret-file", str(tmp_path / "secret"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--notice", "oracle"], "--notice is 'oracle': choose one of aws, gcp, azure, none"),
        (["--address", "203.0.113.7"], "--address 203.0.113.7 is not an address of this machine"),
        (["--ports", "7-5"], "--ports 7-5 is not a range"),
        (["--etcd-user", "root"], "--etcd-user is 'root' without a password"),
        (["--etcd-ca", "/no/such.pem"], "write https:// instead of http://"),
        (["--etcd", "https://127.0.0.1:1", "--etcd-ca", "/no/such.pem"], "--etcd-ca is '/no/such.pem'"),
        (["--job", "no such/name"], "--job is 'no such/name'"),
    ],
)
def test_options_that_an_agent_cannot_use_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert sentence in usage_error(capsys, *AGENT, *options)


@pytest.mark.parametrize(
    "option",
    ["--job", "--local", "--address", "--secret-file", "--etcd-user", "--etcd-ca", "--etcd-cert", "--etcd-key"],
)
def test_options_of_a_shared_run_are_refused_where_the_run_is_not_shared(
    capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert f"{option} is for a run that other machines join: add --join TOKEN or --etcd URL" in usage_error(
        capsys, *RUN, option, "1"
    )


def test_a_trace_that_is_broken_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n1000,remove,b\n")
    assert "removes b, which is not present" in usage_error(capsys, *RUN, "--trace", str(tmp_path / "trace.csv"))
