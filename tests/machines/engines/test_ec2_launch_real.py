"""`culm launch --on ec2` against a moto server, with local processes in place of the instances."""

from __future__ import annotations

import os
import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.machines.engines.emulated_instances import EmulatedInstance, emulated_instances
from tests.machines.engines.fake_aws import IMAGE, moto_server, set_up_account
from tests.machines.launched_jobs import LIMIT_S, launched_job, processes_in

pytestmark = [
    pytest.mark.real,
    pytest.mark.waits(15),
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.skipif(
        not (find_spec("moto") and find_spec("boto3") and find_spec("flask")), reason="moto[server] stands in for AWS"
    ),
]


def wait_for_line(instance: EmulatedInstance, text: str) -> None:
    until = time.monotonic() + LIMIT_S
    while text not in instance.log:
        assert time.monotonic() < until, instance.log
        time.sleep(0.1)


def test_an_exact_run_survives_a_recommendation_and_an_interruption_and_leaves_nothing_in_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto_server() as aws:
        set_up_account(aws, monkeypatch)
        agents = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        with (
            emulated_instances(aws, tmp_path / "instances", agents) as instances,
            launched_job(
                tmp_path,
                *["--on", "ec2", "--spot", "--instance", "g5.xlarge", "--image", IMAGE, "--yes"],
                *["--pipelines", "2", "--stages", "1", "--strategy", "reroute", "--address", "127.0.0.1"],
                *["--program", shlex.join([sys.executable, "-m", "culm"])],
            ) as launched,
        ):
            launched.wait_for("nodes up 2/2")
            launched.wait_for_steps(2)
            advised, interrupted = instances.known.values()
            instances.advise(advised.id)
            wait_for_line(advised, "EC2 recommends to replace this instance")
            launched.wait_for(f"machine {advised.id} is used until its replacement has joined: EC2 recommends")
            launched.wait_for("requesting 1 machine (spot g5.xlarge)")
            launched.wait_for(f"draining {advised.id}: EC2 recommends")
            before = len(launched.lines)
            wait_for_line(advised, "has left job nap")
            launched.wait_for("node 2 runs layers")
            instances.interrupt(interrupted.id)
            launched.wait_for("requesting 1 machine (spot g5.xlarge)", after=before)
            launched.wait_for("node 3 joined")
            launched.wait_for_steps(2)
            summary = launched.finish()
            assert summary["state_sha256"] == launched.expected_sha256()
            assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
            assert 0 < summary["cost_usd"] < summary["cost_on_demand_usd"]
            assert len(instances.known) == 4
            assert "has left job nap" in interrupted.log
        assert aws.leftovers() == []
        assert {each["State"]["Name"] for each in aws.instances()} == {"terminated"}
    assert not list((tmp_path / "home" / "launches").iterdir())
    assert processes_in(tmp_path) == []
