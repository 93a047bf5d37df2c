"""`culm launch --on ray` on a real cluster of several nodes: one is removed, another one is added."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.machines.launched_jobs import launched_job

pytestmark = [pytest.mark.real, pytest.mark.waits(20), pytest.mark.usefixtures("forked_programs")]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose head runs no agents."""
    pytest.importorskip("ray", reason="ray is missing: pip install ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        yield made
    finally:
        made.shutdown()


def test_a_removed_node_is_replaced_by_an_added_one_and_the_weights_are_those_of_a_failure_free_run(
    tmp_path: Path, cluster: Any, culm_program: str
) -> None:
    first, _ = cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)
    options = ["--on", "ray", "--option", f"address={cluster.address}", "--program", culm_program]
    options += ["--nodes", "2", "--pipelines", "2", "--suspect-after", "2", "--address", "127.0.0.1"]
    with launched_job(tmp_path, *options) as launched:
        launched.wait_for("steps 1/")
        cluster.remove_node(first, allow_graceful=False)
        launched.wait_for("is gone: its node or actor was lost")
        launched.wait_for("1 machine could not be had")
        cluster.add_node(num_cpus=1)
        launched.wait_for("node 2 runs layers")
        launched.wait_for_steps(3)
        summary = launched.finish()
        assert summary["state_sha256"] == launched.expected_sha256()
        assert summary["preemptions"] == 1
    assert launched.processes() == []
    assert list((launched.home / "launches").iterdir()) == []


def test_what_a_killed_supervisor_has_left_is_listed_and_ended(tmp_path: Path, cluster: Any, culm_program: str) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    options = ["--on", "ray", "--option", f"address={cluster.address}", "--program", culm_program]
    with launched_job(tmp_path, *options, "--nodes", "2", "--pipelines", "2", "--address", "127.0.0.1") as launched:
        launched.wait_for("steps 1/")
        record = next((launched.home / "launches").glob("*/launch.json"))
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        assert launched.process.wait(60) == 1, launched.output
        assert "2 of 2" in launched.culm("list")
        assert f"nothing of {launched.name}" in launched.culm("down", launched.name)
        assert launched.processes() == []
        assert "nothing is launched" in launched.culm("list")
