"""`culm.find_fleets`, `culm.compare_strategies`, `culm.estimate_deadline`, `culm.find_prices`, `culm.update_prices`,
`culm.profile` and `culm.doctor`: the same answers as their commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import tiny_jobs
from tests.cli.cli_process import JOBS

import culm
from culm.cli import main
from culm.machine_checks import machine_check
from culm.plan import Profile
from culm.sim import ClusterCosts


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON that a command prints."""
    with pytest.raises(SystemExit) as ended:
        main((*arguments, "--json"))
    assert not ended.value.code
    return json.loads(capsys.readouterr().out)


def test_strategies_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    markets = list[tuple[int, int]]()
    found = culm.compare_strategies(
        strategies=["reroute", "checkpoint"], hours=2, seeds=2, market="rate=0.3",
        cluster_costs=ClusterCosts(detect_s=2.0), on_market=lambda *at: markets.append(at),
    )  # fmt: skip
    assert capsys.readouterr() == ("", "")
    assert markets == [(0, 2), (1, 2)]
    options = ("--strategy", "reroute,checkpoint", "--hours", "2", "--seeds", "2", "--market", "rate=0.3")
    told = printed(capsys, "simulate", *options, "--set", "detect_s=2")
    assert {name: outcome.goodput.value for name, outcome in found.outcomes.items()} == {
        name: row["goodput"] for name, row in told["strategies"].items()
    }
    assert found.best.name == told["best"]
    with pytest.raises(culm.CulmError, match="there is no --strategy 'rerout'"):
        culm.compare_strategies(strategies=["rerout"])


def test_a_deadline_is_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = culm.estimate_deadline(deadline_s=6 * 3600, budget_usd=100, nodes=4, seeds=3, market="rate=0.2")
    options = ("--deadline", "6h", "--budget", "100", "--nodes", "4", "--seeds", "3", "--market", "rate=0.2")
    told = printed(capsys, "simulate", *options)["policies"]
    assert {name: len(found) for name, found in outcomes.items()} == dict.fromkeys(told, 3)
    for name, found in outcomes.items():
        assert sum(one.kept_both for one in found) / 3 == pytest.approx(told[name]["kept_both"])


def test_fleets_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = culm.find_fleets("gpt-2-medium", tokens=1e9, instance="g5.xlarge", nodes=(2, 8), deadline_h=24 * 14)
    told = printed(
        capsys, "plan", "--model", "gpt-2-medium", "--tokens", "1B", "--instance", "g5.xlarge", "--nodes", "2..8",
        "--deadline", "14d",
    )  # fmt: skip
    assert found.answer.cheapest is not None
    assert found.answer.cheapest.usd == pytest.approx(told["cheapest"]["usd"])
    assert list(found.notes) == told["notes"]
    with pytest.raises(culm.CulmError, match="no fleet"):
        culm.find_fleets("gpt-2-medium", tokens=1e9, instance="g5.xlarge", nodes=2, max_usd=0.01)


def test_prices_are_found_and_updated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = culm.find_prices(accelerator="V100", cloud="aws")
    told = printed(capsys, "prices", "--accelerator", "V100", "--cloud", "aws")["prices"]
    assert [machine.instance for machine in found] == [row["instance"] for row in told]
    with pytest.raises(culm.CulmError, match="--cloud is 'ibm'"):
        culm.find_prices(cloud="ibm")
    catalogue = tmp_path / "vms.csv"
    catalogue.write_text(
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone\n"
        "p3.2xlarge,V100,1,8,61,,3.06,0.5,us-east-1,us-east-1a\n"
    )
    update = culm.update_prices(str(catalogue), out=tmp_path / "own.csv", cloud="aws", on="2026-01-02")
    assert (update.rows, update.date, update.file) == (1, "2026-01-02", str(tmp_path / "own.csv"))
    (own,) = culm.find_prices(instance="p3.2xlarge", prices=tmp_path / "own.csv")
    assert own.spot_usd_h == 0.5


def test_layers_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in (tiny_jobs.job(), tiny_jobs.job, f"{JOBS}:brief"):
        found = culm.profile(job, overrides={"device": "cpu"})
        assert len(found.layers) > 1
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    assert capsys.readouterr() == ("", "")
    with pytest.raises(culm.CulmError, match="no such field"):
        culm.profile(tiny_jobs.job(), overrides={"devise": "cpu"})


def test_the_checks_of_a_machine_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "_private_etcd", lambda: "started")
    monkeypatch.setattr(machine_check, "_run_with_kill", lambda: "survived")
    found = culm.doctor(etcd="http://127.0.0.1:1")
    by_name = {check.name: check for check in found}
    assert by_name["your etcd"].state == "broken"
    assert [check.name for check in found if check.state == "broken"] == ["your etcd"]
    assert by_name["a run"].what == "survived"
