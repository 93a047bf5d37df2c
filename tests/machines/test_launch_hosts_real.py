"""`culm launch --on hosts` over a real sshd on each of three hosts, one of which is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.machines.launched_jobs import LIMIT_S, LaunchedJob, launched_job
from tests.machines.ssh_lab import ssh_lab, why_not

pytestmark = [
    pytest.mark.real,
    pytest.mark.waits(12),
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]


def test_a_host_that_is_cut_off_is_replaced_and_the_weights_are_those_of_a_failure_free_run(
    tmp_path: Path, culm_program: str
) -> None:
    with ssh_lab(tmp_path, "a", "b", "c") as hosts:
        a, b, c = hosts.addresses()
        options = ["--on", "hosts", "--hosts", f"{a},{b},{c}", "--option", f"ssh={hosts.ssh}"]
        options += ["--option", "lost_after=1", "--program", culm_program, "--address", hosts.network.address("laptop")]
        options += ["--nodes", "2", "--pipelines", "2", "--suspect-after", "2"]
        with launched_job(tmp_path, *options, prefix=hosts.network.command("laptop")) as launched:
            launched.wait_for("steps 1/")
            assert not [line for line in launched.processes() if "culm1-" in line]
            hosts.network.silence("b")
            launched.wait_for(f"machine {b}-1 is gone: {b} cannot be reached")
            launched.wait_for("node 2 runs layers")
            launched.wait_for_steps(3)
            hosts.network.heal("b")
            summary = launched.finish()
            assert summary["state_sha256"] == launched.expected_sha256()
            assert summary["preemptions"] >= 1
        assert launched.processes() == []
        assert [path for name in hosts.names for path in hosts.home(name).iterdir()] == []
        assert_nothing_is_launched(launched)


def assert_nothing_is_launched(launched: LaunchedJob) -> None:
    assert list((launched.home / "launches").iterdir()) == []


def test_an_unreachable_host_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    options = ["--on", "hosts", "--hosts", "nowhere.invalid", "--nodes", "1", "--stages", "1"]
    with launched_job(tmp_path, *options, "--address", "127.0.0.1") as launched:
        assert launched.process.wait(LIMIT_S) == 1
        launched.wait_for(
            "the launch is given up: 3 machines in a row could not join: no connection to nowhere.invalid"
        )
        assert_nothing_is_launched(launched)
