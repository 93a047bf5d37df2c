"""Secrets do not reach other users of the machine, child processes, files or messages."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import msgspec
import pytest

from culm.checkpoint import Storage
from culm.config import RunConfig
from culm.errors import RunError, UsageError
from culm.machines.head_registry import HeadLaunch, note_head_launch
from culm.machines.job_archive import pack_job, unpack_job
from culm.machines.join_token import JoinToken, decode_token, encode_token
from culm.machines.launch_registry import launches_folder
from culm.machines.machine_provider import LaunchSpec, MachineRequest, ProviderSettings
from culm.machines.machine_provider_registry import open_machine_provider
from culm.machines.remote_head import HeadOrder, received_job
from culm.observe.writers.run_folder import create_run_folder
from culm.providers.child_environment import SECRET_VARIABLES, environment_without_secrets

TOKEN = encode_token(JoinToken(("https://10.0.0.5:2379",), bytes(range(32)), b"f" * 32, "root"))
SHOW_COMMAND_LINE = (
    "import sys\n"
    "from pathlib import Path\n"
    "from culm.providers.process_title import hide_secret_arguments\n"
    "hide_secret_arguments(sys.argv[1:])\n"
    "print(Path('/proc/self/cmdline').read_bytes().replace(b'\\0', b' ').decode())\n"
)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "job.py", "--join", TOKEN),
        ("agent", f"--join={TOKEN}"),
        ("dash", "--etcd-user", "root:hunter2"),
        ("doctor", "--etcd-user=root:hunter2"),
    ],
)
def test_a_token_or_password_on_the_command_line_is_not_shown_by_ps(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", SHOW_COMMAND_LINE, *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.startswith(f"culm {arguments[0]}")
    assert TOKEN[:20] not in shown
    assert "hunter2" not in shown


def test_a_command_line_without_secrets_stays_as_it_is() -> None:
    command = [sys.executable, "-c", SHOW_COMMAND_LINE, "run", "job.py", "--etcd-user", "root", "--join", "env"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.endswith("run job.py --etcd-user root --join env \n")


def test_processes_with_code_of_the_user_get_no_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "hunter2")
    assert "hunter2" not in environment_without_secrets().values()
    assert environment_without_secrets()["PATH"] == os.environ["PATH"]


def test_new_run_folders_and_checkpoint_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create_run_folder(str(tmp_path / "runs" / "a"))
        Storage(str(tmp_path / "runs" / "a")).write("checkpoints/step-1/manifest.json", b"{}")
        Storage(str(tmp_path / "elsewhere")).write("weights.safetensors", b"")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "runs" / "a") == 0o700
    assert mode_of(tmp_path / "runs" / "a" / "checkpoints" / "step-1") == 0o700
    assert mode_of(tmp_path / "elsewhere") == 0o700


def test_a_folder_that_the_user_made_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    create_run_folder(str(tmp_path / "shared"))
    assert mode_of(tmp_path / "shared") == 0o755


def test_what_is_stored_of_a_config_has_neither_token_nor_password() -> None:
    config = RunConfig(join=TOKEN, out="s3://key:hunter2@bucket/run")
    text = json.dumps(config.to_dict())
    assert TOKEN[:12] not in text
    assert "hunter2" not in text


def test_the_text_of_a_token_shows_no_secret() -> None:
    shown = repr(decode_token(TOKEN))
    assert bytes(range(32)).hex() not in shown
    assert "\\x01" not in shown


def test_agents_of_this_machine_get_the_token_and_no_other_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "hunter2")
    program = ("sh", "-c", f"env > {tmp_path}/env; exec true")
    machines = open_machine_provider("local", ProviderSettings(launch="gpt-1", folder=str(tmp_path)))

    async def main() -> None:
        spec = LaunchSpec(launch="gpt-1", job="gpt", token=TOKEN, program=program)
        await machines.request(spec, MachineRequest(count=1))
        while {each.state for each in await machines.machines()} != {"ended"}:
            await asyncio.sleep(0.02)

    asyncio.run(main())
    shown = (tmp_path / "env").read_text()
    assert f"CULM_TOKEN={TOKEN}" in shown
    assert "hunter2" not in shown


def test_slurm_gets_no_secret_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm keeps the environment of sbatch on its disks, and gives it to the job."""
    for name in SECRET_VARIABLES:
        monkeypatch.setenv(name, "hunter2")
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\ncat > {tmp_path}/script\necho 7\n")
    (tmp_path / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machines = open_machine_provider("slurm", ProviderSettings(launch="gpt-1", folder=str(tmp_path)))
    spec = LaunchSpec(launch="gpt-1", job="gpt", token=TOKEN)
    assert asyncio.run(machines.request(spec, MachineRequest(count=1))) == ["7_0.0"]
    for shown in ("env", "script"):
        assert "hunter2" not in (tmp_path / shown).read_text()
        assert TOKEN not in (tmp_path / shown).read_text()
    assert mode_of(tmp_path / "token") == 0o600


def test_folders_of_runs_launches_and_heads_are_for_their_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULM_HOME", str(tmp_path / "culm"))
    before = os.umask(0)
    try:
        note_head_launch(HeadLaunch("gpt-1", "gpt", "head", ("ssh",), ("culm",), 0.0))
        launches_folder()
    finally:
        os.umask(before)
    assert [mode_of(tmp_path / "culm" / name) for name in ("", "heads", "launches")] == [0o700] * 3
    assert mode_of(tmp_path / "culm" / "heads" / "gpt-1.json") == 0o600


def test_code_is_not_taken_from_a_cache_that_others_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("def job(): ...\n")
    packed = pack_job(str(tmp_path / "job.py"))
    cache = tmp_path / "cache"
    planted = cache / packed.digest
    planted.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(RunError, match="others can write to it: set XDG_CACHE_HOME"):
        unpack_job(packed.data, packed.digest, cache)


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped"])
def test_an_archive_writes_nothing_outside_of_its_folder(name: str, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    data = zlib.compress(packed.getvalue())
    with pytest.raises(tarfile.FilterError) if name.startswith("..") else contextlib.nullcontext():
        unpack_job(data, hashlib.sha256(data).hexdigest(), tmp_path / "cache" / "jobs")
    assert not list(tmp_path.glob("*escaped*"))
    assert not Path("/tmp/escaped").exists()


@pytest.mark.parametrize("launch", ["../gpt", "a/b", ".", ""])
def test_a_launch_that_is_sent_to_a_head_stays_in_its_folder(
    launch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULM_HOME", str(tmp_path / "culm"))
    order = msgspec.msgpack.encode(HeadOrder(launch, "", b"", "job.py", ()))
    with pytest.raises(UsageError, match="cannot be the name of a launch"), received_job(order):
        raise AssertionError("it was unpacked")
