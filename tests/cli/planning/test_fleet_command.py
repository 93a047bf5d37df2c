"""`culm plan --model` without an instance: which fleet to rent, by deadline and budget."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from culm.cli import main
from culm.cli.planning.fleet_command import parse_count, parse_deadline, show_progress
from culm.errors import UsageError
from culm.plan.rent import fleet_search
from culm.plan.rent.fleet_search import Fleet, FleetGoal, FleetOffer
from culm.plan.rent.rental_options import RentalQuery

INSTANCES = ("g5.xlarge", "p4d.24xlarge")


@pytest.fixture
def small_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two instances and few node counts: the search over all takes seconds."""
    from culm.market.catalogue import PriceCatalogue, load_catalogue

    kept = PriceCatalogue(tuple(m for m in load_catalogue().instances if m.instance in INSTANCES))
    monkeypatch.setattr("culm.estimates.fleet_estimate.load_catalogue", lambda _: kept)
    monkeypatch.setattr("culm.plan.rent.fleet_search.NODE_COUNTS", (1, 4))
    monkeypatch.setattr("culm.sim.fleet_spread.SIMULATED_MARKETS", 3)


def invoke(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(("plan", "--model", "bert-large", *arguments))
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.mark.usefixtures("small_catalogue")
def test_the_cheapest_and_the_fastest_within_the_limits(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--tokens", "100M", "--deadline", "2d", "--budget", "40/h")
    code, out, _ = invoke(capsys, *limits, "--json")
    assert code == 0
    found = json.loads(out)
    cheapest, fastest = found["cheapest"], found["fastest"]
    assert cheapest["usd"] == min(fleet["usd"] for fleet in found["fleets"])
    assert fastest["hours"] == min(fleet["hours"] for fleet in found["fleets"])
    for fleet in found["fleets"]:
        assert fleet["hours"] <= 48
        assert fleet["cost_per_h"] <= 40
        assert fleet["market"] == "on demand" or fleet["usd"] == fleet["spread"]["usd"][1]
    assert {fleet["market"] for fleet in found["fleets"]} == {"spot", "on demand"}
    assert (found["nodes"], found["cost_per_h"]) == (cheapest["nodes"], cheapest["cost_per_h"])
    assert found["goal"]["samples"] == pytest.approx(100e6 / 512)


@pytest.mark.usefixtures("small_catalogue")
def test_people_get_answers_reasons_a_table_and_a_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page, plan = tmp_path / "plot.html", tmp_path / "p.toml"
    code, out, _ = invoke(capsys, "--budget", "40/h", "--plot", str(page), "--out", str(plan))
    assert code == 0
    for told in ("cheapest", "fastest", "samples/s expected", "10-90 %", "cost $", "for 1B tokens: set --tokens"):
        assert told in out
    assert "plotly" in page.read_text().lower()
    assert "workers_per_node" in plan.read_text()


@pytest.mark.usefixtures("small_catalogue")
def test_no_number_of_the_table_is_cut_off_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = invoke(capsys, "--tokens", "20B")
    assert code == 0
    assert "\N{HORIZONTAL ELLIPSIS}" not in out


@pytest.mark.usefixtures("small_catalogue")
def test_a_requested_number_of_nodes_is_compared_whatever_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capsys, "--tokens", "100M", "--nodes", "5", "--on-demand", "--json")
    assert code == 0
    assert {fleet["nodes"] for fleet in json.loads(out)["fleets"]} == {5}


@pytest.mark.usefixtures("small_catalogue")
def test_the_count_within_the_limits_is_that_of_all_compared_fleets(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = invoke(capsys, "--tokens", "100M", "--deadline", "200d", "--json")
    found = json.loads(out)
    assert found["feasible"] == found["compared"] == 8


@pytest.mark.usefixtures("small_catalogue")
def test_an_interrupted_search_shows_the_fleets_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("culm.estimates.fleet_estimate.simulate_spread", interrupt)
    code, out, _ = invoke(capsys, "--tokens", "100M", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["notes"][0] == "interrupted: times and costs are estimates, no market was simulated"
    assert all(fleet["spread"] is None for fleet in found["fleets"])

    estimated = fleet_search._fleets_of_offer
    offers: list[object] = []

    def interrupt_third(source: FleetOffer, base: RentalQuery, goal: FleetGoal) -> Iterable[Fleet]:
        offers.append(source)
        if len(offers) == 3:
            interrupt()
        return estimated(source, base, goal)

    monkeypatch.setattr(fleet_search, "_fleets_of_offer", interrupt_third)
    code, out, _ = invoke(capsys, "--tokens", "100M", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["notes"][0] == "interrupted: only 2 of 4 offers were compared, and no market was simulated"
    assert {fleet["instance"] for fleet in found["fleets"]} == {"g5.xlarge"}


def test_without_a_terminal_progress_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("estimating fleets", after_s=0.0) as show:
        show(1, 2, "g5.xlarge, spot")
        show(2, 2, "")
    assert capsys.readouterr().err == "estimating fleets: 1 of 2 (g5.xlarge, spot)\n"


@pytest.mark.usefixtures("small_catalogue")
def test_limits_that_cannot_be_met_say_by_how_much_and_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = invoke(capsys, "--tokens", "2000B", "--deadline", "1h", "--budget", "20/h")
    assert code == 2
    assert "no fleet finishes within 1 h for 20 $/h: the fastest" in err
    assert "times as long; use --deadline " in err
    code, _, err = invoke(capsys, "--budget", "0.01/h")
    assert code == 2
    assert "no fleet that holds the model costs 0.01 $/h or less: the cheapest is 1 x g5.xlarge, spot" in err


def test_counts_and_times_as_people_write_them() -> None:
    assert [parse_count(text) for text in ("2B", "1.5t", "300000", "3e9")] == [2e9, 1.5e12, 3e5, 3e9]
    assert [parse_deadline(text) for text in ("3d", "36h", "90min", None)] == [72, 36, 1.5, float("inf")]
    with pytest.raises(UsageError, match="--tokens 'many' is not a number of tokens"):
        parse_count("many")
    with pytest.raises(UsageError, match="--deadline 'soon' is not a time"):
        parse_deadline("soon")
