"""`culm launch --on kubernetes` against kmock, with local processes in place of the containers of Pods."""

from __future__ import annotations

import os
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.machines.engines.emulated_cluster import EmulatedCluster, api_server, emulated_cluster
from tests.machines.launched_jobs import LIMIT_S, launched_job, processes_in

pytestmark = [
    pytest.mark.real,
    pytest.mark.waits(10),
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.skipif(not (find_spec("kmock") and find_spec("yaml")), reason="kmock stands in for Kubernetes"),
]


def wait_for_pods(cluster: EmulatedCluster, count: int) -> None:
    until = time.monotonic() + LIMIT_S
    while len(cluster.pods) < count:
        assert time.monotonic() < until, cluster.pods
        time.sleep(0.1)


def test_an_exact_run_goes_through_an_eviction_and_leaves_nothing_in_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    containers = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with api_server(tmp_path) as api:
        with (
            emulated_cluster(api, tmp_path / "pods", containers) as cluster,
            launched_job(
                tmp_path,
                *["--on", "kubernetes", "--image", "registry.example/culm:1", "--yes", "--option", "price=2.5"],
                *["--spot", "--option", "spot-label=eks.amazonaws.com/capacityType=SPOT"],
                *["--pipelines", "2", "--stages", "1", "--strategy", "reroute", "--address", "127.0.0.1"],
                *["--program", shlex.join([sys.executable, "-m", "culm"])],
            ) as launched,
        ):
            launched.wait_for("nodes up 2/2")
            launched.wait_for_steps(2)
            (evicted, _) = sorted(cluster.pods)
            cluster.evict(evicted)
            wait_for_pods(cluster, 3)
            launched.wait_for("node 2 joined")
            launched.wait_for_steps(2)
            summary = launched.finish()
            assert summary["state_sha256"] == launched.expected_sha256()
            assert (summary["preemptions"], summary["samples_lost"], summary["samples_duplicated"]) == (1, 0, 0)
            assert summary["cost_usd"] > 0
            assert "has left job nap" in cluster.pods[evicted].log
            jobs = {pod.job for pod in cluster.pods.values()}
            assert len(jobs) == 2  # a Job has replaced its Pod, and no further machine was requested
        assert api.leftovers() == []
    assert not list((tmp_path / "home" / "launches").iterdir())
    assert processes_in(tmp_path) == []
