"""`culm simulate` as users type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from culm.cli import main

PLAN = """
name = "tiny"
pipelines = 2
stages = 3
micro_batches = 12
micro_batch = 4
state_bytes = 1e9
instance = "g5.xlarge"

[times]
forward = 0.1
input = 0.1
weight = [0.1, 0.1, 0.2]
"""


def culm(*arguments: str) -> int:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "p.toml"
    path.write_text(PLAN)
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.csv"
    nodes = "".join(f"0,add,n{n}\n" for n in range(7))
    path.write_text(nodes + "3600000,remove,n2\n5400000,remove,n4\n7200000,add,n9\n")
    return str(path)


def test_the_table_of_all_strategies_fits_into_120_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert culm("simulate", "--hours", "1", "--seeds", "2") == 0
    (heading,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" strategy ")]
    assert heading.split()[-3:] == ["lost", "work", "rollbacks"]


def test_all_strategies_over_a_trace(plan: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert culm("simulate", "--plan", plan, "--trace", trace, "--hours", "4", "--strategy", "all", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["hours"] == 4
    assert set(result["strategies"]) >= {
        "none", "checkpoint", "drop", "shadow", "shadow-lazy", "reroute", "migrate", "templates", "auto",
        "bamboo", "oobleck", "varuna", "checkpoint-restart", "on-demand",
    }  # fmt: skip
    for name, each in result["strategies"].items():
        assert {"goodput", "cost_per_h", "value", "usd_per_million", "split", "preemptions"} <= set(each), name
        assert sum(each["split"].values()) == pytest.approx(1)
        if each["usd_per_million"] is not None:
            assert each["usd_per_million"] == pytest.approx(each["cost_per_h"] / each["goodput"] / 3600 * 1e6)
    assert result["price"]["spot"] == 0.5091
    assert result["best"] in result["strategies"]


def test_markets_by_seed_come_with_intervals(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    market = ("--market", "rate=0.5,group=2.1,zones=3", "--seeds", "5", "--hours", "6")
    assert culm("simulate", "--plan", plan, *market, "--strategy", "reroute,checkpoint", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["runs"] == 5
    low, high = result["strategies"]["reroute"]["goodput_ci"]
    assert low < result["strategies"]["reroute"]["goodput"] < high


def test_a_measured_model_runs_on_the_instance_it_was_measured_on_also_with_other_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """32 nodes of the preset are scaled to 16, which is what is trained on and paid for at most."""
    words = ("--market", "p3", "--nodes", "16", "--strategy", "checkpoint", "--hours", "1", "--seeds", "1", "--json")
    assert culm("simulate", *words) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["nodes"] == 16
    assert found["price"]["instance"] == "p3.2xlarge"
    assert found["cost_per_h"] == pytest.approx(16 * found["price"]["spot"])
    assert "the market provides" in shown.err


def test_the_reconfigure_policy_can_be_chosen(plan: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    for policy in ("cost", "bamboo", "never"):
        options = ("--strategy", "reroute", "--reconfigure", policy, "--json")
        assert culm("simulate", "--plan", plan, "--trace", trace, *options) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["reconfigure"] == policy
        if policy == "never":
            assert not {"grow", "shrink", "depth", "uneven"} & set(result["strategies"]["reroute"]["decisions"])
    assert culm("simulate", "--plan", plan, "--trace", trace, "--reconfigure", "costs") == 2
    assert "there is no policy 'costs': did you mean 'cost'?" in capsys.readouterr().err


def test_a_table_and_a_picture_for_people(
    plan: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "s.svg"
    assert culm("simulate", "--plan", plan, "--trace", trace, "--svg", str(drawn)) == 0
    out = capsys.readouterr().out
    assert "on-demand" in out
    assert "drop leaves samples out" in out
    assert "samples per second" in drawn.read_text()


def test_prices_of_another_day(plan: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--strategy", "reroute", "--instance", "p3.2xlarge", "--on", "2022-06-30", "--json")
    assert culm("simulate", "--plan", plan, "--trace", trace, *options) == 0
    shown = capsys.readouterr()
    price = json.loads(shown.out)["price"]
    assert price.pop("warnings") == [line.removeprefix("culm: warning: ") for line in shown.err.splitlines()]
    assert price == {
        "instance": "p3.2xlarge", "spot": 0.918, "on_demand": 3.06, "as_of": "2022-01-01", "source": "Bamboo (NSDI'23)",
    }  # fmt: skip


def test_an_instance_without_a_known_price_is_refused(
    plan: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert culm("simulate", "--plan", plan, "--trace", trace, "--instance", "p5e.48xlarge") == 2
    assert "the spot price of p5e.48xlarge is not known: give it with --prices CSV" in capsys.readouterr().err


def test_the_published_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert culm("simulate", "--paper", "bamboo-table3", "--seeds", "2", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert {"p", "throughput", "cost", "value", "paper", "shipped"} == set(result["rows"][0])
    assert result["worst_shipped"] > 0.5 > result["worst"], "the step time is fitted, and the table says so"
    assert "worst" in result


WRONG = [
    (("--strategy", "rerout"), "did you mean reroute"),
    (("--paper", "bamboo-table4"), "did you mean bamboo-table"),
    (("--market", "rate=1", "--trace", "{trace}"), "both given"),
    (("--trace", "nowhere.csv"), "could not be read"),
    (("--plan", "nowhere.toml"), "could not be read"),
    (("--hours", "-1"), "--hours is -1"),
    (("--instance", "g5.xlrage"), "did you mean g5.xlarge"),
    (("--set", "detect=1"), "did you mean detect_s"),
    (("--set", "detect_s=-1"), "detect_s is -1"),
    (("--set", "detect_s=soon"), "use a number"),
    (("--model", "gpt-22"), "did you mean gpt-2"),
    (("--on", "yesterday"), "write it as"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG)
def test_an_invalid_request_gives_a_one_sentence_error(
    trace: str, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert culm("simulate", *(argument.format(trace=trace) for argument in arguments)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.startswith("culm: ")
    assert err.count("\n") == 1


BROKEN = [
    ("pipelines = 2\n", "has no table [times]"),
    (PLAN.replace("stages", "stagse"), "did you mean stages"),
    (PLAN.replace("forward", "foward"), "did you mean forward"),
    (PLAN.replace("pipelines = 2", "pipelines = 0"), "pipelines is 0"),
    (PLAN.replace("pipelines = 2", "pipelines = 20"), "a step has 12 micro-batches"),
    (PLAN.replace("forward = 0.1", "forward = -1"), "Costs.forward is -1"),
    (PLAN.replace('instance = "g5.xlarge"', ""), "names no instance"),
    (PLAN.replace("stages = 3", "stages = 9").replace("[0.1, 0.1, 0.2]", "0.1"), "never has more than 7 nodes"),
    ("pipelines =", "is not valid TOML"),
]


@pytest.mark.parametrize(("text", "says"), BROKEN)
def test_an_invalid_plan_file_gives_a_one_sentence_error(
    tmp_path: Path, trace: str, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.toml"
    path.write_text(text)
    assert culm("simulate", "--plan", str(path), "--trace", trace) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
