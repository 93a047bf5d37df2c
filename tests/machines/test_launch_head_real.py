"""`culm launch --head HOST` over a real sshd on each host: the run does not need the machine that launched it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.machines.launched_jobs import LIMIT_S, LaunchedJob, launched_job
from tests.machines.ssh_lab import SshLab, ssh_lab, why_not

pytestmark = [
    pytest.mark.real,
    pytest.mark.waits(20),
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def head_options(hosts: SshLab, culm_program: str) -> list[str]:
    """Launch with the first host as head, and machines on the others."""
    head, *others = hosts.addresses()
    options = ["--head", head, "--head-ssh", hosts.ssh, "--program", culm_program, "--on", "hosts"]
    options += ["--hosts", ",".join(others), "--option", f"ssh={hosts.ssh}", "--option", "lost_after=1"]
    return [*options, "--nodes", "2", "--pipelines", "2", "--suspect-after", "2"]


def summary_of(launched: LaunchedJob) -> dict[str, Any]:
    """The summary of the run, when it has ended."""
    path, until = launched.folder / "run" / "summary.json", time.monotonic() + LIMIT_S
    while not path.exists() or launched.processes():
        assert time.monotonic() < until, launched.processes()
        time.sleep(0.1)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def files_of(hosts: SshLab) -> list[str]:
    """What is left in the home folders of the hosts, besides what the head keeps of the run for a week."""
    found = [path for name in hosts.names for path in hosts.home(name).rglob("*") if path.is_file()]
    return [str(path) for path in found if path.parent.parent.name != "runs"]


def test_the_run_goes_on_without_the_machine_that_launched_it_and_replaces_a_lost_host(
    tmp_path: Path, culm_program: str
) -> None:
    with ssh_lab(tmp_path, "head", "a", "b", "c") as hosts:
        laptop = hosts.network.command("laptop")
        with launched_job(tmp_path, *head_options(hosts, culm_program), prefix=laptop) as launched:
            launched.wait_for("steps 1/")
            hosts.network.silence("laptop")
            launched.process.kill()
            launched.process.wait()
            launched.wait_for_steps(3)
            hosts.network.silence("b")
            launched.wait_for_event("lost")
            launched.wait_for_event("node_joined", node=2)
            launched.wait_for_steps(3)
            hosts.network.heal("b")
            launched.hurry_file.touch()
            summary = summary_of(launched)
            assert summary["state_sha256"] == launched.expected_sha256()
            assert summary["preemptions"] >= 1
            assert files_of(hosts) == []
            hosts.network.heal("laptop")
            assert "nothing is launched" in launched.culm("list")
            assert "is gone" in launched.culm("logs", launched.name)
            assert f"nothing of {launched.name}" in launched.culm("down", launched.name)
            assert list((launched.home / "heads").iterdir()) == []


def test_a_launch_on_a_head_is_listed_stopped_and_ended_from_here(tmp_path: Path, culm_program: str) -> None:
    with ssh_lab(tmp_path, "head", "a", "b") as hosts:
        laptop = hosts.network.command("laptop")
        options = [*head_options(hosts, culm_program), "--detach"]
        with launched_job(tmp_path, *options, prefix=laptop) as launched:
            assert launched.process.wait(LIMIT_S) == 0, launched.output
            assert json.loads(launched.lines[-1]) == {"job": launched.name}
            launched.wait_for_steps(1)
            (row,) = json.loads(launched.culm("list", "--json"))
            head = hosts.network.address("head")
            assert (row["job"], row["head"], row["running"], row["supervised"]) == (launched.name, head, 2, True)
            assert "step 0:" in launched.culm("logs", launched.name)
            launched.culm("stop", launched.name)
            summary = summary_of(launched)
            assert 0 < summary["steps"] < 600
            assert json.loads(launched.culm("list", "--json")) == []
            assert f"nothing of {launched.name}" in launched.culm("down", launched.name)
            assert files_of(hosts) == []
