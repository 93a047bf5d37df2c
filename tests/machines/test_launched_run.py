"""The machines of a launch are ended whatever happens, and a fleet acts on what its provider says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.machines.scripted_machines import ScriptedMachines

from culm.cli import main
from culm.config import RunConfig
from culm.errors import RunError
from culm.machines.fleet_controller import FleetController, FleetTarget, MachineOffer
from culm.machines.join_token import JoinToken, encode_token
from culm.machines.launch_order import LaunchOrder
from culm.machines.launch_registry import known_launches
from culm.machines.launched_run import open_launch
from culm.machines.machine_fleet import MachineFleet
from culm.machines.machine_provider import LaunchSpec, MachineRequest, ProviderSettings
from culm.testing.virtual_time import VirtualClock, run_virtual

SCRIPTED = "tests.machines.scripted_machines:ScriptedMachines"
TOKEN = encode_token(JoinToken(endpoints=("https://10.0.0.1:2379",), secret=b"s" * 32))
SPEC = LaunchSpec(launch="gpt-1", job="gpt", token=TOKEN)
SPOT = MachineRequest(count=1, market="spot")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CULM_HOME", str(tmp_path))
    monkeypatch.setattr(ScriptedMachines, "downs", 0)
    monkeypatch.setattr(ScriptedMachines, "failing_downs", 0)
    monkeypatch.setattr("culm.machines.machine_fleet._TEARDOWN_RETRY_S", 0.0)


async def launch_and(error: BaseException | None, said: list[str]) -> None:
    order = LaunchOrder(launch="gpt-1", job="gpt", provider=SCRIPTED, requests=(SPOT,))
    async with open_launch(order, RunConfig(nodes=2, join=TOKEN), "gpt", said.append) as launched:
        assert (launched.config.join, launched.config.job_name) == (TOKEN, "gpt")
        assert [launch.is_supervised for launch in known_launches()] == [True]
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [None, RunError("the run failed"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_machines_are_ended_after_success_errors_and_interrupts(error: BaseException | None) -> None:
    try:
        asyncio.run(launch_and(error, []))
    except BaseException as raised:
        assert type(raised) is type(error)
    assert ScriptedMachines.downs == 1
    assert known_launches() == []


def test_an_engine_that_does_not_answer_once_is_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedMachines, "failing_downs", 2)
    said: list[str] = []
    asyncio.run(launch_and(None, said))
    assert said == ["the machines cannot be ended yet: the engine does not answer"] * 2
    assert known_launches() == []


def test_machines_that_cannot_be_ended_are_reported_and_listed_until_culm_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ScriptedMachines, "failing_downs", 4)
    said: list[str] = []
    asyncio.run(launch_and(None, said))
    assert said[-1] == "machines may be left: the engine does not answer; end them with culm down gpt"
    (launch,) = known_launches()
    assert not launch.is_supervised
    with pytest.raises(SystemExit) as ended:
        main(["down", "gpt"])
    assert ended.value.code == 0
    assert "nothing of gpt (gpt-1 on " in capsys.readouterr().out
    assert known_launches() == []


def test_a_launch_that_costs_money_asks_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "gpt.py").write_text("def job(): raise AssertionError('nobody may load it')\n")
    command = ["launch", str(tmp_path / "gpt.py"), "--on", SCRIPTED, "--nodes", "2", "--spot"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert "costs money, and there is no terminal to ask on: add --yes" in said.err
    assert "$2.000/h" in said.out
    assert known_launches() == []
    with pytest.raises(SystemExit):
        main([*command, "--dry-run"])
    assert capsys.readouterr().out.startswith("2 machines: culm agent --join env --job gpt")


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--max-price", "-1"], 2, "--max-price is -1: use dollars per hour above 0"),
        (["--max-price", "nan"], 2, "--max-price is nan: use dollars per hour above 0"),
        (
            ["--max-price", "2.5"],
            2,
            "--max-price is 2.5, and the cheapest of these machines costs $3.000/h: allow more",
        ),
        (["--max-price", "0.5", "--spot"], 0, "costs $1.000/h now: none is started before a price falls"),
        (["--max-price", "1", "--spot"], 0, "$2.000/h"),
        (["--option", "region"], 2, "--option 'region' is not an assignment: write name=value, as in --option region="),
        (["--env", "A"], 2, "--env 'A' is not an assignment"),
        (["--instance", "p3.8xlarge"], 0, "a node has a worker for each of its 4 GPUs"),
        (["--instance", "p3.8xlarge", "--workers-per-node", "1"], 0, "machines have 4 GPUs, and --workers-per-node 1"),
        (["--instance", "p3.8xlarge,p3.2xlarge"], 2, "(p3.8xlarge has 4, p3.2xlarge has 1)"),
        (["--env", "A B=1"], 2, "--env names 'A B', which is no environment variable"),
        (["--env", "WANDB_API_KEY=x"], 0, "--env WANDB_API_KEY is not kept secret"),
        (["--price", "-1"], 2, "--price is -1: use dollars per hour of a machine, 0 or more"),
        (["--price", "nan"], 2, "--price is nan: use dollars per hour of a machine"),
        (["--price", "0.25"], 0, "$0.500/h"),
        (["--price", "1", "--spot", "--deadline", "1h"], 2, "--price is 1, and 2 kinds of machines may be used"),
        (["--deadline", "1h"], 0, "the odds are not known: measure the job on such a machine with culm profile"),
        (["--out", "runs/a"], 0, "--out is 'runs/a', a folder that all machines on scripted must share"),
    ],
)
def test_what_a_launch_could_not_keep_is_said_or_refused_before_it_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], code: int, sentence: str
) -> None:
    (tmp_path / "gpt.py").write_text("def job(): raise AssertionError('nobody may load it')\n")
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(tmp_path / "gpt.py"), "--on", SCRIPTED, "--nodes", "2", "--dry-run", *options])
    assert ended.value.code == code
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("hosts", "options", "words"),
    [
        ("two", [], "a node has a worker for each of its 2 GPUs: --workers-per-node changes that"),
        ("two,four,away", [], "(two has 2, four has 4): all nodes have as many workers as the fewest"),
        ("four,four", [], "a node has a worker for each of its 2 GPUs"),
        ("two,none", [], "(two has 2, none has 0)"),
        ("four", ["--workers-per-node", "1"], ""),
        ("away", [], ""),
    ],
)
def test_agents_on_hosts_use_the_gpus_that_the_hosts_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, hosts: str, options: list[str], words: str
) -> None:
    """A host that does not answer is left out, and one that is named twice divides its GPUs."""
    (tmp_path / "gpt.py").write_text("def job(): raise AssertionError('nobody may load it')\n")
    for name, count in {"two": 2, "four": 4}.items():
        program = tmp_path / name / "nvidia-smi"
        program.parent.mkdir()
        lines = [f"GPU {number}: H200 (UUID: GPU-{number})\n  MIG 1g" for number in range(count)]
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{chr(10).join(lines)}\nEND\n")
        program.chmod(0o755)
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\n[ $1 = away ] && exit 255\nPATH={tmp_path}/$1:$PATH exec $2\n"
    )
    ssh.chmod(0o755)
    nodes = str(len(hosts.split(",")))
    command = ["--on", "hosts", "--hosts", hosts, "--nodes", nodes, "--option", f"ssh={ssh}", "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(tmp_path / "gpt.py"), *command, *options])
    said = capsys.readouterr().err
    assert ended.value.code == 0, said
    assert words in said if words else "GPU" not in said


def test_a_fleet_replaces_what_the_market_takes_and_says_what_it_waits_for() -> None:
    said: list[str] = []
    provider = ScriptedMachines(ProviderSettings(launch="gpt-1"))
    provider.capacity = 2

    async def main() -> None:
        clock = VirtualClock()
        joined: dict[str, bool] = {}
        target = FleetTarget(count=3, offers=(MachineOffer(SPOT, 1.0),))
        fleet = MachineFleet(
            provider,
            SPEC,
            FleetController(target),
            clock,
            in_run=lambda: joined,
            on_line=said.append,
            on_give_up=said.append,
        )
        keeping = asyncio.create_task(fleet.keep())
        await clock.sleep(5)
        joined.update({"m1": True, "m2": True})
        await clock.sleep(60)
        assert [line for line in said if line.startswith("2 of 3 machines have joined, waiting for")]
        provider.capacity = 3
        await clock.sleep(300)
        assert sorted(provider.all) == ["m1", "m2", "m3"]
        joined["m3"] = True
        provider.outage = "the engine is down"
        await clock.sleep(60)
        provider.outage = ""
        provider.end("m2")
        del joined["m2"]
        await clock.sleep(60)
        keeping.cancel()

    run_virtual(main())
    assert said[0] == "requesting 3 machines (spot): 0 of 3 machines are there"
    assert said[1] == "1 machine could not be had: asking again in 2 s"
    assert sum("the machines cannot be listed" in line for line in said) == 1
    assert "machine m2 is gone: taken" in said
    assert provider.all["m4"].state == "running"


def test_agents_report_what_their_machine_costs() -> None:
    request = MachineRequest(count=2, instance="g5.xlarge", market="spot", zone="us-east-1a")
    priced = LaunchSpec(launch="gpt-1", job="gpt", token=TOKEN, prices={("g5.xlarge", "spot", "us-east-1a"): 0.4})
    line = priced.agent_command_line(request)
    assert "--market spot --price 0.4 --instance g5.xlarge" in line
    assert "--price" not in SPEC.agent_command_line(request)


def test_a_deadline_makes_on_demand_machines_an_offer_and_a_budget_needs_no_price(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "gpt.py").write_text("def job(): raise AssertionError('nobody may load it')\n")
    command = ["launch", str(tmp_path / "gpt.py"), "--on", SCRIPTED, "--nodes", "2", "--spot", "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--deadline", "48h", "--budget", "500", "--out", str(tmp_path / "run")])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert "$2.000/h" in said.err
    assert "$6.000/h" in said.err
