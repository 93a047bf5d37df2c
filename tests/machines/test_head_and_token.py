"""A machine joins a run with one token: from `culm head` to a trained model, and every way in which that is refused."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from culm.cli import main
from culm.errors import RunError, UsageError
from culm.job import load_job
from culm.machines.head_store import head_token, locked_head_folder, open_head_folder
from culm.machines.job_archive import pack_job, unpack_job
from culm.machines.job_discovery import choose_job
from culm.machines.join_token import JoinToken, decode_token, encode_token, read_token
from culm.testing import reference

SECRET = bytes(range(32))
TOKEN = JoinToken(("https://10.0.0.5:2379",), SECRET, b"f" * 32, "root")
JOB = """
import torch
from culm import Job
from helper import WIDTH
from torch import nn

DATA = [(torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)), torch.zeros(WIDTH)) for i in range(32)]

def job():
    return Job(
        layers=[lambda: nn.Linear(WIDTH, WIDTH)] * 4, loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        data=DATA, global_batch=8, micro_batch=2, steps=20, exact=True, device="cpu",
    )
"""


def test_a_token_survives_the_clipboard_and_hides_its_secret() -> None:
    text = encode_token(TOKEN)
    assert decode_token(text) == TOKEN
    assert re.fullmatch(r"culm1-[A-Za-z0-9_-]+", text)
    assert SECRET.hex() not in repr(TOKEN)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "starts with culm1-"),
        ("sometoken", "starts with culm1-"),
        (encode_token(TOKEN)[:-3], "copy it again as a whole"),
        (encode_token(TOKEN).replace("ZmZm", "ZmZn"), "copy it again as a whole"),
        (encode_token(JoinToken(("https://a:1",), SECRET, expires_at=1)), "expired at 1970-01-01 00:00 UTC"),
        ("@/no/such/file", "cannot be read"),
        ("env", "CULM_TOKEN is not set"),
    ],
)
def test_a_token_that_cannot_be_used_is_refused_in_one_sentence(
    text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CULM_TOKEN", raising=False)
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        read_token(text)
    assert encode_token(TOKEN)[20:40] not in str(refused.value)


def test_a_token_is_read_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(encode_token(TOKEN) + "\n")
    monkeypatch.setenv("CULM_TOKEN", encode_token(TOKEN))
    assert read_token(f"@{tmp_path}/token") == read_token("env") == TOKEN


def test_an_unknown_job_is_refused_at_once_where_others_are_known() -> None:
    assert choose_job(["gpt"], "", waits=False) == "gpt"
    assert choose_job(["bert", "gpt"], "gpt", waits=False) == "gpt"
    assert choose_job([], "gpt", waits=False) is None
    assert choose_job(["bert"], "gpt", waits=True) is None
    with pytest.raises(UsageError, match="there is no such job: the known jobs are bert"):
        choose_job(["bert"], "gpt", waits=False)
    with pytest.raises(UsageError, match="--job is missing, and there are several: the known jobs are bert, gpt"):
        choose_job(["bert", "gpt"], "", waits=False)


def test_a_new_secret_makes_old_tokens_useless_and_files_are_private(tmp_path: Path) -> None:
    before = open_head_folder(tmp_path / "head", ["127.0.0.1"])
    assert open_head_folder(tmp_path / "head", ["127.0.0.1"]) == before
    token = head_token(before, "127.0.0.1", 2379)
    after = head_token(open_head_folder(tmp_path / "head", ["127.0.0.1"], new_secret=True), "127.0.0.1", 2379)
    assert (token.secret, token.fingerprint) != (after.secret, after.fingerprint)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "head").iterdir()} == {0o600}


def test_two_heads_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second one would replace the secret below the first one, or wait for its data for ever."""
    before = open_head_folder(tmp_path, ["127.0.0.1"]).secret
    with locked_head_folder(tmp_path), pytest.raises(SystemExit) as ended:
        main(["head", "--data", str(tmp_path), "--address", "127.0.0.1", "--port", "23795", "--rotate"])
    assert ended.value.code == 2
    assert "a culm head is running there" in capsys.readouterr().err
    assert open_head_folder(tmp_path, ["127.0.0.1"]).secret == before
    with locked_head_folder(tmp_path):
        pass


@pytest.mark.parametrize("seconds", ["nan", "-1"])
def test_an_agent_waits_for_a_number_of_seconds(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["agent", "--join", "culm1-x", f"--wait={seconds}"])
    assert ended.value.code == 2
    assert f"--wait is {seconds}: use a number of seconds" in capsys.readouterr().err


def job_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text(JOB)
    (folder / "helper.py").write_text("WIDTH = 4\n")
    (folder / ".gitignore").write_text("data/\n*.bin\n")
    (folder / "data").mkdir()
    (folder / "data" / "big.txt").write_text("not sent")
    (folder / "weights.bin").write_text("not sent")
    (folder / "runs").mkdir()
    (folder / "runs" / "steps.jsonl").write_text("not sent")
    (folder / "head").mkdir()
    for name in ("secret", "key.pem", "certificate.pem"):
        (folder / "head" / name).write_text("not sent")
    return folder / "train.py"


def test_an_archive_holds_the_files_that_are_not_ignored_and_depends_on_nothing_else(tmp_path: Path) -> None:
    file = job_folder(tmp_path / "a")
    packed = pack_job(f"{file}:job")
    assert packed.reference == "train.py:job"
    root = unpack_job(packed.data, packed.digest, tmp_path / "cache")
    assert sorted(path.name for path in root.iterdir()) == [".gitignore", "helper.py", "train.py"]
    assert pack_job(str(job_folder(tmp_path / "b"))).digest == packed.digest
    assert unpack_job(packed.data, packed.digest, tmp_path / "cache") == root


def test_a_damaged_archive_is_not_unpacked(tmp_path: Path) -> None:
    packed = pack_job(str(job_folder(tmp_path / "a")))
    with pytest.raises(RunError, match="damaged"):
        unpack_job(packed.data + b"x", packed.digest, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_is_too_large_names_its_largest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("culm.machines.job_archive.MAX_BYTES", 300)
    file = job_folder(tmp_path / "a")
    with pytest.raises(UsageError, match=r"\.culmignore.*train\.py"):
        pack_job(str(file))


def culm(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "culm", *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
    )


def command_lines() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((entry / "cmdline").read_text().replace("\0", " ").strip())
            except OSError:
                continue
    return found


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
def test_machines_join_with_a_token_alone_and_train_the_job_that_they_were_sent(tmp_path: Path) -> None:
    file = job_folder(tmp_path / "job")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    head = culm("head", "--data", "head", "--address", "127.0.0.1", "--port", "23791", cwd=tmp_path)
    processes = [head]
    try:
        assert head.stdout is not None
        token = next(line.strip() for line in head.stdout if line.startswith("culm1-"))
        assert stat.S_IMODE((tmp_path / "head").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "head" / "secret").stat().st_mode) == 0o600
        launcher = culm(
            "run", str(file), "--nodes", "2", "--stages", "2", "--join", token, "--out", "run", "--json", cwd=tmp_path
        )
        agents = [culm("agent", "--join", token, cwd=elsewhere, env=environment) for _ in range(2)]
        processes += [launcher, *agents]
        output = launcher.communicate(timeout=120)[0]
        assert launcher.returncode == 0, output
        lines = [agent.communicate(timeout=60)[0] for agent in agents]
        assert all("runs layers" in text and "has left job train" in text for text in lines), lines
        assert not [line for line in command_lines() if "culm agent" in line and token in line]
        wanted = reference(load_job(str(file), {})).state_sha256
        assert f'"state_sha256": "{wanted}"' in output
        unknown = culm("agent", "--join", token, "--job", "nope", "--wait", "0", cwd=elsewhere)
        processes.append(unknown)
        assert "no job 'nope' was started within 0 s" in unknown.communicate(timeout=60)[0]
        assert unknown.returncode == 2
        other_secret = encode_token(msgspec.structs.replace(decode_token(token), secret=SECRET))
        stranger = culm("agent", "--join", other_secret, cwd=elsewhere)
        processes.append(stranger)
        assert (
            "does not accept this token: use the one that culm head token prints" in stranger.communicate(timeout=60)[0]
        )
        assert stranger.returncode == 2
        head.send_signal(signal.SIGTERM)
        assert head.wait(timeout=30) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
