"""`culm launch --on local` as users start it: machines are killed and replaced, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.machines.launched_jobs import launched_job

pytestmark = [pytest.mark.real, pytest.mark.waits(8), pytest.mark.usefixtures("forked_programs")]

PROVIDER = """
from culm.machines.engines.local_machines import LocalMachines

class PricedMachines(LocalMachines):
    name = "priced"
    costs_money = True

    def price(self, request):
        return 3600.0
"""


def test_a_killed_machine_is_replaced_and_the_weights_are_those_of_a_failure_free_run(
    tmp_path: Path, culm_program: str
) -> None:
    (tmp_path / "priced.py").write_text(PROVIDER)
    options = ["--on", "priced:PricedMachines", "--yes", "--spot", "--nodes", "2", "--pipelines", "2"]
    options += ["--address", "127.0.0.1", "--suspect-after", "2", "--program", culm_program]
    with launched_job(tmp_path, *options) as launched:
        launched.wait_for("steps 1/")
        (listed,) = json.loads(launched.culm("list", "--json"))
        assert (listed["job"], listed["running"], listed["wanted"], listed["supervised"]) == (launched.name, 2, 2, True)
        started = next((launched.home / "launches").glob("*/provider/machine-1/started.json"))
        assert not [line for line in launched.processes() if "culm1-" in line]
        os.killpg(json.loads(started.read_text())["pid"], signal.SIGKILL)
        launched.wait_for("machine machine-1 is gone: its agent ended by SIGKILL")
        launched.wait_for("node 2 runs layers")
        launched.wait_for_steps(3)
        summary = launched.finish()
        assert summary["state_sha256"] == launched.expected_sha256()
        assert summary["preemptions"] == 1
        at_least = summary["wall_s"]  # two machines for a dollar a second each, of which one was missing for a while
        assert summary["cost_usd"] > at_least
    assert launched.processes() == []
    assert list((launched.home / "launches").iterdir()) == []


def test_down_ends_what_a_killed_supervisor_has_left(tmp_path: Path) -> None:
    options = ["--on", "local", "--nodes", "2", "--pipelines", "2", "--address", "127.0.0.1"]
    with launched_job(tmp_path, *options) as launched:
        launched.wait_for("steps 1/")
        record = next((launched.home / "launches").glob("*/launch.json"))
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
        assert launched.process.wait(60) == 1, launched.output
        launched.wait_for(f"end its machines with culm down {launched.name}")
        assert f"its supervisor has ended: culm down {launched.name}" in " ".join(launched.culm("list").split())
        assert f"end them with culm down {launched.name}" in launched.culm("attach", launched.name, code=2)
        assert f"nothing of {launched.name}" in launched.culm("down", launched.name)
        assert launched.processes() == []
        assert "nothing is launched" in launched.culm("list")
