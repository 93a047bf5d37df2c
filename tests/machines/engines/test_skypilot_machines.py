"""Machines of SkyPilot: the tasks that are submitted, and what becomes of its managed jobs.

No cloud can be reached in tests: calls go to a stand-in for its SDK. Where SkyPilot is installed, tasks are validated
against its schema, too.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import types
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from culm.errors import RunError, UsageError
from culm.machines.engines.skypilot_machines import task_config
from culm.machines.join_token import JoinToken, encode_token
from culm.machines.machine_provider import LaunchSpec, Machine, MachineProvider, MachineRequest, ProviderSettings
from culm.machines.machine_provider_registry import open_machine_provider

TOKEN = encode_token(JoinToken(("https://10.0.0.5:2379",), bytes(range(32)), b"f" * 32, "root"))
SPEC = LaunchSpec(launch="gpt-a1", job="gpt", token=TOKEN, image="docker:registry.example/culm:1")
SPOT = MachineRequest(count=2, instance="g5.xlarge", market="spot")
REQUESTS = (
    SPOT,
    MachineRequest(count=1, instance="A100:8", zone="us-east-1a", labels={"team": "ml"}),
    MachineRequest(count=1),
)
OPTIONS = {"infra": "aws/us-east-1"}


class ClusterNotUpError(Exception):
    """As SkyPilot's: there is no jobs controller yet."""


@dataclass
class SkyStandIn:
    """The part of SkyPilot's SDK that is used: tasks from their configuration, and a queue of managed jobs."""

    queue_of_jobs: list[dict[str, Any]] = field(default_factory=list)
    tasks: list[dict[str, Any]] = field(default_factory=list)
    refuses: str = ""
    has_controller: bool = False

    def module(self) -> types.ModuleType:
        made: Any = types.ModuleType("sky")
        made.Task = types.SimpleNamespace(from_yaml_config=self.make_task)
        made.get = lambda request: request()
        made.jobs = types.SimpleNamespace(launch=self.launch, queue=self.queue, cancel=self.cancel)
        return made  # type: ignore[no-any-return]

    def make_task(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise ValueError(f"{self.refuses}\nand more")
        return config

    def launch(self, task: dict[str, Any], name: str) -> Any:
        def answer() -> None:
            self.tasks.append(task)
            self.has_controller = True
            words = f"1x(gpus=A10G:1, {task['resources'].get('instance_type', '')})"
            spot = "[spot]" if task["resources"]["use_spot"] else ""
            job = {"job_id": len(self.tasks), "job_name": name, "status": "RUNNING", "resources": words + spot}
            self.queue_of_jobs.append(job | {"zone": "us-east-1b", "start_at": 5.0, "failure_reason": None})

        return answer

    def queue(self, refresh: bool) -> Any:
        def answer() -> list[dict[str, Any]]:
            if not self.has_controller:
                raise ClusterNotUpError
            return self.queue_of_jobs

        return answer

    def cancel(self, job_ids: list[int]) -> Any:
        def answer() -> None:
            for job in self.queue_of_jobs:
                if job["job_id"] in job_ids:
                    job["status"] = "CANCELLED"

        return answer


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> SkyStandIn:
    made = SkyStandIn()
    monkeypatch.setitem(sys.modules, "sky", made.module())
    return made


def provider(launch: str = "gpt-a1", **options: str) -> MachineProvider:
    return open_machine_provider("skypilot", ProviderSettings(launch=launch, options={**OPTIONS, **options}))


def listed(machines: MachineProvider) -> dict[str, Machine]:
    return {machine.id: machine for machine in asyncio.run(machines.machines())}


def test_each_machine_is_a_managed_job_of_one_node_in_one_region(sky: SkyStandIn) -> None:
    machines = provider()
    machines.check(SPOT)
    assert listed(machines) == {}
    ids = asyncio.run(machines.request(SPEC, SPOT))
    assert len(set(ids)) == 2
    for id_, task in zip(ids, sky.tasks, strict=True):
        assert (task["num_nodes"], task["envs"]["CULM_MACHINE"]) == (1, id_)
        assert (task["resources"]["infra"], task["resources"]["use_spot"]) == ("aws/us-east-1", True)
        assert task["secrets"] == {"CULM_TOKEN": TOKEN}
        assert TOKEN not in task["run"]
        assert "--notice aws" in task["run"]
    found = listed(machines)
    assert {found[id_].state for id_ in ids} == {"running"}
    assert (found[ids[0]].zone, found[ids[0]].instance, found[ids[0]].market) == ("us-east-1b", "g5.xlarge", "spot")
    assert found[ids[0]].price_per_h == machines.price(SPOT)


@pytest.mark.parametrize(
    ("status", "state", "failed"),
    [
        ("RECOVERING", "pending", False),
        ("SUCCEEDED", "ended", False),
        ("FAILED", "ended", True),
        ("FAILED_SETUP", "ended", True),
        ("FAILED_NO_RESOURCE", "ended", False),
        ("CANCELLED", "ended", False),
    ],
)
def test_a_preempted_job_is_replaced_by_skypilot_and_a_failed_one_is_not(
    sky: SkyStandIn, status: str, state: str, failed: bool
) -> None:
    machines = provider()
    (id_,) = asyncio.run(machines.request(SPEC, MachineRequest(count=1)))
    sky.queue_of_jobs[0]["status"] = status
    assert (listed(machines)[id_].state, listed(machines)[id_].failed) == (state, failed)


def test_down_cancels_the_jobs_of_this_launch_only_and_may_be_repeated(sky: SkyStandIn) -> None:
    machines, other = provider(), provider("bert-b2")
    asyncio.run(machines.down())
    first, _ = asyncio.run(machines.request(SPEC, SPOT))
    asyncio.run(other.request(LaunchSpec(launch="bert-b2", job="bert", token=TOKEN), MachineRequest(count=1)))
    asyncio.run(machines.release([first]))
    assert [job["status"] for job in sky.queue_of_jobs] == ["CANCELLED", "RUNNING", "RUNNING"]
    asyncio.run(machines.down())
    asyncio.run(machines.down())
    assert [job["status"] for job in sky.queue_of_jobs] == ["CANCELLED", "CANCELLED", "RUNNING"]


def test_what_skypilot_refuses_is_one_sentence(sky: SkyStandIn) -> None:
    sky.refuses = "there is no such instance"
    with pytest.raises(UsageError, match=r"SkyPilot refuses such a machine: there is no such instance$"):
        provider().check(SPOT)
    with pytest.raises(RunError, match=r"SkyPilot started no machine: there is no such instance$"):
        asyncio.run(provider().request(SPEC, SPOT))
    with pytest.raises(UsageError, match="name a cloud and one region, as in infra=aws/us-east-1"):
        provider(infra="aws").check(SPOT)


def test_without_skypilot_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sky", None)
    with pytest.raises(UsageError, match=r"pip install 'skypilot\[aws\]'"):
        provider().check(SPOT)


@pytest.mark.skipif(not find_spec("yaml"), reason="needs PyYAML")
def test_a_dry_run_is_a_yaml_that_can_be_run_by_hand_and_holds_no_secret() -> None:
    text = provider(setup="pip install culm.whl").manifest(SPEC, SPOT)
    assert TOKEN not in text
    assert "#   sky jobs launch --name culm-gpt-a1-NUMBER --secret CULM_TOKEN" in text
    task = import_module("yaml").safe_load(text)
    assert (task["secrets"], task["setup"]) == ({"CULM_TOKEN": None}, "pip install culm.whl")


def test_the_agent_gets_the_zone_of_its_machine(tmp_path: Path) -> None:
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\necho "$@"\n')
    show.chmod(0o755)
    asked = MachineRequest(count=2, instance="g5.xlarge", market="spot", zone="us-east-1b")
    prices = {("g5.xlarge", "spot", "us-east-1b"): 0.5}
    spec = LaunchSpec(launch="a", job="gpt", token="", program=(str(show),), prices=prices)
    run = task_config("a-0", spec, asked, OPTIONS)["run"]
    environment = {"PATH": os.environ["PATH"], "SKYPILOT_CLUSTER_INFO": '{"cloud": "AWS", "zone": "us-east-1b"}'}
    done = subprocess.run(["sh", "-c", run], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("--price 0.5 --instance g5.xlarge --zone us-east-1b")


@pytest.mark.skipif(not find_spec("sky"), reason="SkyPilot is not installed: pip install skypilot")
@pytest.mark.parametrize("request_", REQUESTS)
def test_tasks_fit_the_schema_of_skypilot(request_: MachineRequest) -> None:
    options = {**OPTIONS, "cpus": "8+", "memory": "32+", "disk": "200", "setup": "true"}
    schemas, jsonschema = import_module("sky.utils.schemas"), import_module("jsonschema")
    task = task_config("culm-gpt-a1-0", SPEC, request_, options)
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task["resources"] | {"colour": "red"}, schemas.get_resources_schema())
