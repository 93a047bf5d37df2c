"""`culm launch --on slurm` on a real cluster: elements of the job array are cancelled, warned and requeued."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.machines.launched_jobs import launched_job
from tests.machines.slurm_cluster import slurm_cluster, why_not

pytestmark = [
    pytest.mark.real,
    pytest.mark.waits(15),
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

LOCAL = ("--address", "127.0.0.1")


def test_elements_that_slurm_takes_away_are_replaced_and_the_weights_are_those_of_a_failure_free_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm") as slurm:
        for name, value in slurm.environment.items():
            monkeypatch.setenv(name, value)
        options = ["--on", "slurm", "--nodes", "2", "--pipelines", "2", "--suspect-after", "2", "--grace", "5"]
        with launched_job(tmp_path, *options, "--address", "127.0.0.1") as launched:
            launched.wait_for("steps 1/")
            job = slurm.run("squeue", "--noheader", "--format=%F").split()[0]
            slurm.run("scancel", f"{job}_1")
            launched.wait_for(f"machine {job}_1.0 is gone")
            launched.wait_for("node 2 runs layers")
            slurm.run("scontrol", "requeue", f"{job}_0")
            launched.wait_for(f"machine {job}_0.0 is gone: Slurm has requeued its job")
            launched.wait_for("node 3 runs layers")
            launched.wait_for_steps(3)
            summary = launched.finish()
            assert summary["state_sha256"] == launched.expected_sha256()
            assert summary["preemptions"] == 2
        assert slurm.run("squeue", "--noheader") == ""
        assert launched.processes() == []
        assert list((launched.home / "launches").iterdir()) == []
        assert not [
            path for path in slurm.config.parent.rglob("*") if path.is_file() and b"culm1-" in path.read_bytes()
        ]


def test_a_preempted_job_hands_over_within_its_grace_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm") as slurm:
        for name, value in slurm.environment.items():
            monkeypatch.setenv(name, value)
        with launched_job(tmp_path, "--on", "slurm", "--nodes", "2", "--pipelines", "2", *LOCAL) as launched:
            launched.wait_for("steps 1/")
            command = [
                "sbatch",
                "--parsable",
                "--partition=urgent",
                "--nodes=3",
                "--wrap=sleep 600",
                "--output=/dev/null",
            ]
            urgent = slurm.run(*command).strip()
            assert "Slurm preempts its job" in launched.wait_for("will be taken away in")
            assert launched.wait_for_event("notice")
            slurm.run("scancel", urgent)
            launched.wait_for("node 2 runs layers")
            summary = launched.finish()
            assert summary["state_sha256"] == launched.expected_sha256()
            assert summary["preemptions"] == 1
        assert slurm.run("squeue", "--noheader") == ""
