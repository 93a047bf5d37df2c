"""`culm launch --head`: what the head gets to do, and how a head that cannot be used is refused."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest

import culm
from culm.cli import main
from culm.errors import RunError
from culm.machines.head_registry import HeadLaunch, find_head_launch, known_head_launches, note_head_launch
from culm.machines.remote_head import list_on_head

SSH = """#!/bin/sh
for command; do :; done  # the last argument
echo "$command" >> {folder}/commands
CULM_HOME={folder}/on-head exec sh -c "$command"
"""
KUBECTL = """#!/bin/sh
echo "$1 $2 $3 $4 $5 $6 $7 $8" >> {folder}/calls
CULM_HOME={folder}/on-head exec sh -c "$9"
"""
JOB = "def job(): raise AssertionError('nobody may load it')\n"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An ssh that stays on this machine, where a head has a home of its own."""
    monkeypatch.setenv("CULM_HOME", str(tmp_path / "here"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "gpt.py").write_text(JOB)
    return script(tmp_path / "ssh", SSH.format(folder=tmp_path))


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o700)
    return str(path)


def launch(tmp_path: Path, *arguments: str) -> object:
    """The exit code of `culm launch` on two hosts."""
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(tmp_path / "job" / "gpt.py"), "--on", "hosts", "--nodes", "2", *arguments])
    return ended.value.code


def test_a_dry_run_prints_what_the_head_would_request_and_leaves_nothing_there(
    tmp_path: Path, ssh: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a zone=east\nb\n")
    program = shlex.join([sys.executable, "-m", "culm"])
    options = ["--head", "me@stays", "--head-ssh", ssh, "--program", program, "--hosts", f"@{tmp_path / 'hosts'}"]
    assert launch(tmp_path, *options, "--grace", "7", "--env", "A=b c", "--dry-run") == 0, capfd.readouterr().err
    shown = capfd.readouterr().out
    assert f"ssh a {program} agent --join env --job gpt --notice none --grace 7" in shown
    assert "--zone east" in shown
    assert "ssh b" in shown
    assert list((tmp_path / "on-head" / "launches").iterdir()) == []
    assert known_head_launches() == []
    commands = (tmp_path / "commands").read_text().splitlines()
    assert [command.removeprefix(program) for command in commands] == [" --version", " head receive"]


def test_a_head_in_a_pod_is_reached_with_kubectl(tmp_path: Path, ssh: str, capfd: pytest.CaptureFixture[str]) -> None:
    kubectl = script(tmp_path / "kubectl", KUBECTL.format(folder=tmp_path))
    program = shlex.join([sys.executable, "-m", "culm"])
    options = ["--head", "pod/culm-head-0", "--head-ssh", f"{kubectl} --namespace x", "--program", program]
    assert launch(tmp_path, *options, "--hosts", "a,b", "--env", "A=b c", "--dry-run") == 0, capfd.readouterr().err
    assert f"ssh a {program} agent --join env --job gpt" in capfd.readouterr().out
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["--namespace x exec --stdin pod/culm-head-0 -- sh -c"] * 2


@pytest.mark.parametrize(
    ("on_head", "sentence"),
    [
        ("echo 'ssh: no route to host' >&2; exit 255", "it cannot be reached: ssh: no route to host"),
        ("exit 127", "culm is not there, install culm, or name it with --program"),
        ("echo culm 0.0.1", f"it has culm 0.0.1, and this machine {culm.__version__}: install the same"),
        ("echo broken >&2; exit 1", "culm cannot be run there: broken"),
    ],
)
def test_a_head_that_cannot_be_used_is_refused_in_one_sentence(
    on_head: str, sentence: str, tmp_path: Path, ssh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script(Path(ssh), f"#!/bin/sh\n{on_head}\n")
    assert launch(tmp_path, "--head", "stays", "--head-ssh", ssh, "--hosts", "a,b", "--yes") == 2
    assert capsys.readouterr().err == f"culm: --head is 'stays': {sentence}\n"
    assert known_head_launches() == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--head", "-oProxyCommand=x"], "--head names '-oProxyCommand=x', which is not a host"),
        (["--head", "a", "--join", "env"], "--head and --join are both given"),
        (["--head", "pod/a;b"], "--head names 'pod/a;b', which is not a host"),
    ],
)
def test_a_wrong_head_is_refused(
    options: list[str], sentence: str, tmp_path: Path, ssh: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("CULM_TOKEN", raising=False)
    assert launch(tmp_path, *options, "--hosts", "a,b") == 2
    assert sentence in capsys.readouterr().err


def head_of(tmp_path: Path, answer: str, *, job: str = "gpt") -> HeadLaunch:
    ssh = script(tmp_path / "ssh", f"#!/bin/sh\n{answer}\n")
    return HeadLaunch("gpt-1", job, "me@stays", (ssh,), ("culm",), time.time())


def test_a_head_that_does_not_answer_stays_in_the_list_and_cannot_be_ended(
    tmp_path: Path, ssh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note_head_launch(head_of(tmp_path, "echo down >&2; exit 255"))
    with pytest.raises(RunError, match="the head me@stays does not answer: down"):
        list_on_head(known_head_launches()[0])
    for command, code in ((["list", "--json"], 0), (["down", "gpt"], 1)):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == code
        said = capsys.readouterr()
        assert "the head me@stays does not answer: down" in said.out
    assert find_head_launch("gpt") is not None


def test_a_launch_that_has_ended_on_its_head_is_not_listed_and_is_forgotten_by_down(
    tmp_path: Path, ssh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note_head_launch(head_of(tmp_path, "echo '[]'"))
    for command in (["list", "--json"], ["down", "--all"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 0
    assert known_head_launches() == []
    assert capsys.readouterr().out == "[]\nculm: nothing of gpt (gpt-1) is left on me@stays\n"


def test_windows_of_a_launch_are_opened_on_its_head(
    tmp_path: Path, ssh: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for_head = 'for command; do :; done; echo "$command"; exit 3'
    note_head_launch(head_of(tmp_path, for_head, job="gpt-2"))
    for command in (["attach", "gpt-2", "--quiet"], ["logs", "gpt-1", "-f"], ["stop", "gpt-2", "--now"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == 3
    said = capfd.readouterr().out.splitlines()
    assert said == ["culm attach gpt-2 --quiet", "culm logs gpt-2 --follow", "culm stop gpt-2 --now"]
