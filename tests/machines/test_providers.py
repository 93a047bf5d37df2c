"""Machine providers: what they print for --dry-run, what they refuse, and how they read the words of their engines."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from culm.cli import main
from culm.cli.launching import down_command
from culm.errors import UsageError
from culm.machines.agent_process import describe_agent_end
from culm.machines.engines.slurm_machines import parse_elements
from culm.machines.engines.ssh_hosts import Host, parse_hosts
from culm.machines.engines.trace_machines import present_nodes
from culm.machines.launch_order import LaunchOrder
from culm.machines.launch_registry import RegisteredLaunch, find_launches, known_launches
from culm.machines.machine_gpus import gpus_of_machines
from culm.machines.machine_provider import LaunchSpec, MachineRequest, ProviderSettings
from culm.machines.machine_provider_registry import open_machine_provider
from culm.machines.suitable_instances import suitable_instances
from culm.market import load_catalogue
from culm.market.market_trace import MarketTrace, NodeEvent

ONE = MachineRequest(count=1)
JOB = """
import torch
from culm import Job

def job():
    return Job(
        layers=[lambda: torch.nn.Linear(2, 2)], loss=torch.nn.functional.mse_loss, data=[(torch.zeros(2),) * 2] * 4,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), global_batch=2, micro_batch=1, steps=1,
    )
"""


def launch(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[object, str, str]:
    """(exit code, stdout, stderr) of `culm launch` for a job of two machines."""
    (tmp_path / "gpt.py").write_text(JOB)
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(tmp_path / "gpt.py"), "--nodes", "2", *arguments])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--on", "kubernets"], "there is no --on 'kubernets': did you mean kubernetes?"),
        (["--on", "no.such.module:Thing"], "--on no.such.module:Thing cannot be used, because the Python module no"),
        (
            ["--on", "json:JSONDecoder"],
            "is not a class with the methods of culm.machines.machine_provider.MachineProvider",
        ),
        (["--on", "local", "--option", "a=b"], "--option a: local has no such option, the known ones are none"),
        (["--on", "local", "--instance", "g5"], "--instance is 'g5': machines of --on local have no instance"),
        (["--on", "hosts"], "--hosts is missing: name the hosts"),
        (["--on", "hosts", "--hosts", "-oProxyCommand=x"], "which is not a host"),
        (["--on", "hosts", "--hosts", "a"], "--nodes is 2, and --hosts names 1: name more hosts"),
        (["--on", "hosts", "--hosts", "a", "--zone", "z"], "no host of --hosts is in it"),
        (["--on", "hosts", "--hosts", "a", "--program", ""], "--program is empty"),
        (["--on", "trace"], "--option trace is missing"),
        (["--on", "ray", "--option", "cpus=x"], "--option cpus is 'x': use a number"),
    ],
)
def test_a_wrong_request_is_refused_in_one_sentence_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    code, _, err = launch(capsys, tmp_path, *arguments)
    assert code == 2
    assert sentence in err
    assert err.count("\n") == 1


def test_a_dry_run_prints_commands_without_secrets_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = launch(capsys, tmp_path, "--on", "hosts", "--hosts", "ann@a,b zone=z,c", "--dry-run")
    assert code == 0
    lines = out.splitlines()[1:]
    assert [line.split()[:5] for line in lines] == [
        ["ssh", "ann@a", "culm", "agent", "--join"],
        ["ssh", "b", *lines[1].split()[2:5]],
    ]
    assert lines[1].endswith("--zone z")
    assert "culm1-" not in out
    assert "2 machines on hosts" in err
    assert "free" in err


@pytest.mark.parametrize(
    ("arguments", "missing", "part", "cost"),
    [
        (["slurm"], "--on slurm needs sbatch, scontrol", "#SBATCH --array=0-1", 0),
        (["kubernetes", "--image", "a:1", "--option", "price=1.5"], "no Kubernetes cluster", "kind: Job", 3.0),
        (
            ["ec2", "--image", "ami-1", "--instance", "p3.2xlarge", "--option", "region=us-east-1"],
            "AWS cannot be used",
            "TotalTargetCapacity",
            6.12,
        ),
        (
            ["skypilot", "--instance", "p3.2xlarge", "--option", "infra=aws/us-east-1"],
            "needs SkyPilot",
            "num_nodes: 1",
            6.12,
        ),
    ],
)
def test_a_dry_run_needs_nothing_of_the_engine_and_a_launch_names_what_is_missing(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    missing: str,
    part: str,
    cost: float,
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "sky", None)
    if arguments[0] == "kubernetes":
        pytest.importorskip("yaml")
    if arguments[0] == "ec2":
        pytest.importorskip("boto3")
    code, out, err = launch(capsys, tmp_path, "--on", *arguments, "--dry-run")
    assert code == 0, err
    assert part in out
    assert "culm: warning: this is not checked" in err
    assert missing in err
    code, out, _ = launch(capsys, tmp_path, "--on", *arguments, "--dry-run", "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["cost_per_h"] == pytest.approx(cost)
    assert part in answer["manifest"]
    code, _, err = launch(capsys, tmp_path, "--on", *arguments, "--yes")
    assert code == 2
    assert missing in err


def test_a_slurm_script_has_one_agent_per_element_a_notice_and_no_secret(tmp_path: Path) -> None:
    settings = ProviderSettings(launch="gpt-1", folder=str(tmp_path), options={"partition": "spot", "gres": "gpu:8"})
    spec = LaunchSpec(launch="gpt-1", job="gpt", token="culm1-secret", grace_s=60, environment={"A": "b c"})
    script = open_machine_provider("slurm", settings).manifest(spec, MachineRequest(count=16, instance="a100"))
    for line in ("--array=0-15", "--requeue", "--signal=B:TERM@60", "--partition=spot", "--gres=gpu:8", "--nodes=1"):
        assert f"#SBATCH {line}\n" in script
    assert "#SBATCH --constraint=a100\n" in script
    assert "export A='b c'\n" in script
    assert "secret" not in script
    assert "secret" not in repr(spec)


def test_any_instance_means_those_with_a_gpu_for_each_worker_cheapest_first() -> None:
    names = suitable_instances("ec2", {}, gpus=1, memory=20 << 30, spot=True)
    machines = [load_catalogue().find(name) for name in names]
    assert len(names) > 1
    assert all(m.cloud == "aws" and m.gpu_count == 1 and m.gpu_mem_gib >= 20 for m in machines)
    assert [m.spot_usd_h for m in machines] == sorted(m.spot_usd_h or 0.0 for m in machines)
    with pytest.raises(UsageError, match="--any needs the instance types of a cloud, and --on hosts has none"):
        suitable_instances("hosts", {}, gpus=1, memory=None, spot=True)
    with pytest.raises(UsageError, match="name types with --instance"):
        suitable_instances("ec2", {}, gpus=3, memory=None, spot=True)


NOTICED = """
import os, pathlib, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
print("seconds:", pathlib.Path(os.environ["CULM_NOTICE_FILE"]).read_text().strip(), flush=True)
"""


@pytest.mark.real
@pytest.mark.parametrize("provider", ["local", "hosts"])
def test_a_drained_agent_gets_the_announced_seconds(provider: str, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(NOTICED)
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nHOME={tmp_path}/home exec sh\n")
    (tmp_path / "ssh").chmod(0o700)
    (tmp_path / "provider").mkdir()
    options = {"hosts": "a", "ssh": str(tmp_path / "ssh")} if provider == "hosts" else {}
    spec = LaunchSpec(launch="gpt-1", job="gpt", token="t", program=(sys.executable, str(tmp_path / "agent.py")))

    async def wait_for(text: str) -> None:
        while not any(text in log.read_text() for log in tmp_path.rglob("log")):
            await asyncio.sleep(0.05)

    async def main() -> None:
        settings = ProviderSettings(launch="gpt-1", folder=str(tmp_path / "provider"), options=options)
        machines = open_machine_provider(provider, settings)
        (id_,) = await machines.request(spec, ONE)
        await wait_for("ready")
        await machines.drain([id_], 118.0)
        await wait_for("seconds: 118")
        await machines.down()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_hosts_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a  # the fast one\n\nann@b zone=east\n")
    assert parse_hosts("a,b,a") == (Host("a"), Host("b"), Host("a"))
    assert parse_hosts(f"@{tmp_path / 'hosts'}") == (Host("a"), Host("ann@b", "east"))
    with pytest.raises(UsageError, match="only zone=ZONE can follow"):
        parse_hosts("a speed=9")


def test_waiting_elements_of_slurm_share_a_line() -> None:
    waiting = "JobId=7 ArrayJobId=7 ArrayTaskId=0,2-3%4 JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0"
    assert [(e.element, e.state, e.reason) for e in parse_elements(waiting)] == [
        ("7_0", "PENDING", "Resources"),
        ("7_2", "PENDING", "Resources"),
        ("7_3", "PENDING", "Resources"),
    ]
    ended = "JobId=9 ArrayJobId=7 ArrayTaskId=1 JobState=FAILED Reason=None Restarts=2 ExitCode=2:0 StartTime=Unknown"
    (element,) = parse_elements(ended)
    assert (element.element, element.restarts, element.exit_status, element.reason) == ("7_1", 2, 2, "")
    assert (element.preempted_at, element.ends_at) == (None, None)
    taken = (
        "JobId=9 ArrayJobId=7 ArrayTaskId=1 JobState=RUNNING Restarts=0 ExitCode=0:0 StartTime=2026-11-19T20:00:00 "
        "EndTime=2026-11-19T20:10:15 PreemptTime=2026-11-19T20:10:00 Partition=low"
    )
    (element,) = parse_elements(taken)
    assert element.partition == "low"
    assert (element.preempted_at or 0.0) - element.started_at == 600.0
    assert (element.ends_at or 0.0) - (element.preempted_at or 0.0) == 15.0


def test_the_end_of_an_agent_is_explained_by_its_last_line() -> None:
    assert describe_agent_end(0, "culm: bye") == ("its agent has left the run", False)
    assert describe_agent_end(2, "x\nculm: no job 'gpt'\n") == ("its agent ended with exit code 2: no job 'gpt'", True)
    assert describe_agent_end(-9, "x") == ("its agent ended by SIGKILL", False)
    assert describe_agent_end(137, "x") == ("its agent ended by SIGKILL", False)
    assert describe_agent_end(None, "x") == ("its agent was killed", False)


def test_nodes_of_a_trace_are_there_between_their_events() -> None:
    events = (
        NodeEvent(0, "add", "a", "x"),
        NodeEvent(5, "add", "b"),
        NodeEvent(9, "remove", "a", "x"),
        NodeEvent(12, "add", "a"),
    )
    trace = MarketTrace(events, 20.0)
    assert [(node.number, node.zone, node.leaves_at) for node in present_nodes(trace, 6)] == [
        (0, "x", 9),
        (1, "", None),
    ]
    assert [node.number for node in present_nodes(trace, 10)] == [1]
    assert [node.number for node in present_nodes(trace, 12)] == [1, 3]


def test_a_launch_is_known_until_everything_of_it_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULM_HOME", str(tmp_path))
    order = LaunchOrder(launch="gpt-1a2b3c", job="gpt", provider="local", requests=(ONE,))
    registered = RegisteredLaunch("gpt", order, 4)
    (found,) = find_launches("gpt")
    assert (found.record.machines, found.is_supervised, found.folder.stat().st_mode & 0o777) == (4, True, 0o700)
    registered.close(forget=False)
    assert [each.is_supervised for each in find_launches("gpt-1a2b3c")] == [False]
    with pytest.raises(UsageError, match="did you mean gpt"):
        find_launches("gtp")
    found.forget()
    assert known_launches() == []


def test_down_of_a_launch_whose_supervisor_ends_everything_itself_says_that_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CULM_HOME", str(tmp_path))
    order = LaunchOrder(launch="gpt-1a2b3c", job="gpt", provider="hosts", options={"hosts": "a"}, requests=(ONE,))
    registered = RegisteredLaunch("gpt", order, 4)

    def end(name: str) -> None:
        registered.close(forget=True)
        raise UsageError(f"job {name!r} has just ended")

    monkeypatch.setattr(down_command, "find_job", end)
    with pytest.raises(SystemExit) as ended:
        main(["down", "gpt"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "culm: nothing of gpt (gpt-1a2b3c on hosts) is left\n"


def test_list_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULM_HOME", str(tmp_path))
    order = LaunchOrder(launch="gpt-1a2b3c", job="gpt", provider="local", requests=(ONE,))
    RegisteredLaunch("gpt", order, 4).close(forget=False)
    with pytest.raises(SystemExit):
        main(["list", "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["job"], row["wanted"], row["running"], row["problem"]) == (
        "gpt",
        4,
        0,
        "its supervisor has ended: culm down gpt",
    )
    with pytest.raises(SystemExit):
        main(["down", "--all"])
    assert "nothing of gpt (gpt-1a2b3c on local) is left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "instances", "gpus"),
    [
        ({}, [""], None),
        ({}, ["p3.8xlarge"], 4),
        ({}, ["A100:8"], 8),
        ({}, ["no-such-type"], None),
        ({"gpus": "2"}, ["p3.8xlarge"], 2),
        ({"gres": "gpu:4"}, [""], 4),
        ({"gres": "gpu:a100:3"}, [""], 3),
        ({"gres": "gpu"}, [""], 1),
        ({"gres": "gpu:a100"}, [""], 1),
        ({"gres": "license:1"}, [""], None),
    ],
)
def test_the_gpus_of_machines_are_what_the_request_says(
    options: dict[str, str], instances: list[str], gpus: int | None
) -> None:
    assert gpus_of_machines(options, instances) == gpus
