"""A command that tests fork cannot be told from one that is started anew."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.cli.cli_process import CULM, JOBS, culm
from tests.program_fork_server import StartProgram, forked_programs

pytestmark = pytest.mark.real


@pytest.mark.parametrize("words", [["--version"], ["run", "nowhere.py"], ["schedule", "zb", "--stages", "2"]])
def test_it_says_the_same_and_ends_with_the_same_code(
    words: list[str], program_fork_server: StartProgram, tmp_path: Path
) -> None:
    anew = culm(*words, cwd=tmp_path)
    with forked_programs(program_fork_server):
        forked = culm(*words, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (anew.returncode, anew.stdout, anew.stderr)


def test_it_has_its_folder_its_streams_and_its_session_and_can_be_killed(
    program_fork_server: StartProgram, tmp_path: Path
) -> None:
    with forked_programs(program_fork_server), (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [CULM, "run", f"{JOBS}:endless"], stdout=said, stderr=said, cwd=tmp_path, start_new_session=True
        )
    place = Path(f"/proc/{process.pid}")
    found = [(place / name).readlink() for name in ("cwd", "fd/1", "fd/2")]
    session = os.getsid(process.pid)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert found == [tmp_path, tmp_path / "said", tmp_path / "said"]
    assert session == process.pid
