"""The simulator reproduces published tables, as far as possible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from culm.errors import PlanError, UsageError
from culm.market import generate_trace
from culm.market.trace_generator import PRESETS
from culm.sim.analytic_workload import analytic_workload
from culm.sim.bamboo_simulator import BambooCase, BambooSimulator
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.papers import PAPERS, PaperTableSet, TableRequest
from culm.sim.papers.bamboo_tables import TABLE2, table2, table3
from culm.sim.papers.best_way import POOLS, best_way, candidate_workloads, find_best_shape, pool_traces
from culm.sim.papers.oobleck_table import oobleck_table
from culm.sim.papers.slipstream_tables import slipstream_tables
from culm.sim.published_workload import PUBLISHED_SPEEDS, published_workload
from culm.sim.step_times import StepTimes


def test_every_cell_of_bamboos_simulation_is_within_two_percent() -> None:
    result = table3(TableRequest(seeds=40))
    assert [row["p"] for row in result.rows] == [0.01, 0.05, 0.10, 0.25, 0.50]
    for row in result.rows:
        for cell in ("throughput", "cost", "value"):
            assert row[cell] == pytest.approx(row["paper"][cell], rel=0.02), (row["p"], cell)
    assert result.as_json()["worst"] < 0.02


def test_bamboos_simulator_is_deterministic_for_a_seed() -> None:
    case = BambooCase(probability=0.25, steps=500)
    assert BambooSimulator(case, 7).run() == BambooSimulator(case, 7).run()
    assert BambooSimulator(case, 7).run() != BambooSimulator(case, 8).run()


def test_without_losses_bamboos_simulator_trains_at_full_speed() -> None:
    result = BambooSimulator(BambooCase(probability=0.0, steps=200_000), 0).run()
    assert result.preemptions == result.fatal_losses == 0
    assert result.throughput == pytest.approx(264 / 2.480, rel=0.05)


@pytest.mark.parametrize("name", PUBLISHED_SPEEDS)
def test_a_known_model_has_its_published_speed_on_demand(name: str) -> None:
    workload = published_workload(name, spot=False)
    rate = workload.samples / StepTimes(workload, ClusterCosts()).one_f_one_b(4)
    assert rate == pytest.approx(PUBLISHED_SPEEDS[name].samples_per_s, rel=0.06)


def test_an_unknown_model_gets_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean bert-large"):
        published_workload("bert-lrge")


def test_spot_pays_where_it_did_in_table_2() -> None:
    result = table2(TableRequest(seeds=2))
    assert len(result.rows) == 3 * len(TABLE2)
    differs = {(row["model"], row["rate"]) for row in result.rows if not row["agree"]}
    # In the paper these two are nearly even (0.33 against 0.33, 0.48 against 0.49).
    assert differs <= {("resnet-152", 0.33), ("gnmt-16", 0.33)}


def test_a_table_is_markdown() -> None:
    lines = table3(TableRequest(seeds=1)).to_markdown().splitlines()
    assert lines[0].startswith("## ")
    assert lines[3].startswith("|--")
    assert len(PAPERS) >= 2


SHARED = Path(__file__).parents[2] / "../shared/traces"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")


@pytest.fixture(scope="module")
def rerouting() -> PaperTableSet:
    return slipstream_tables(TableRequest(seeds=1))


def test_rerouting_beats_bamboo_and_the_schedule_adds_to_that(rerouting: PaperTableSet) -> None:
    for row in rerouting.tables[0].rows:
        assert row["ratio"]["bamboo"] > 1.1
        assert row["ratio"]["oobleck"] > 0.85
        assert all(row["ratio_as_published"][name] >= ratio for name, ratio in row["ratio"].items())


def test_repartitioning_can_beat_rerouting_and_vice_versa(rerouting: PaperTableSet) -> None:
    assert {row["better"] for row in rerouting.tables[1].rows} == {"reroute", "re-partition"}


@shared
def test_measured_steady_states_give_the_ordering_of_the_artefact() -> None:
    rows = {(row["model"], row["trace"]): row for row in oobleck_table(TableRequest(traces=SHARED)).rows}
    for trace in ("1h", "30m", "10m", "p3-trace", "g4dn-trace"):
        assert rows["BERT-large", trace]["oobleck"] > rows["BERT-large", trace]["varuna"] > 0
        assert rows["BERT-large", trace]["varuna"] > rows["BERT-large", trace]["bamboo"] > 0
    often = [rows["GPT-3-2.7B", trace]["varuna"] for trace in ("6h", "1h", "30m", "10m")]
    assert often == sorted(often, reverse=True)


def test_the_artefact_needs_its_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give --traces"):
        oobleck_table(TableRequest())
    with pytest.raises(UsageError, match="could not be read"):
        oobleck_table(TableRequest(traces=tmp_path))


@pytest.mark.parametrize("pool", POOLS)
def test_the_best_way_keeps_replicas_and_is_cheaper_than_on_demand(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours and three shapes are enough: the last of them is the best of all that are tried."""
    few = candidate_workloads("gpt-3-6.7b", POOLS[pool], PRESETS[pool].nodes)[:3]
    monkeypatch.setattr("culm.sim.papers.best_way.candidate_workloads", lambda *_: few)
    result = find_best_shape("gpt-3-6.7b", pool, [generate_trace(replace(PRESETS[pool], hours=2.0), 0)])
    assert result.workload == few[-1]
    best = result.strategies_by_cost(result.paper_price)[0]
    assert best.split(",")[0] in ("auto", "reroute", "templates", "migrate", "oobleck")
    assert result.usd_per_million(best, result.paper_price) < 0.6 * result.usd_per_million(
        "on-demand", result.paper_price
    )
    assert result.usd_per_million(best, result.current_price) < result.usd_per_million(
        "on-demand", result.current_price
    )


def test_without_files_a_pool_uses_the_fitted_market() -> None:
    assert pool_traces("p3", TableRequest(seeds=2)) == [generate_trace(PRESETS["p3"], seed) for seed in range(2)]


def test_a_folder_without_the_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no p3-trace\.csv"):
        best_way(TableRequest(traces=tmp_path))


def test_an_analytic_workload_fits_or_says_why_not() -> None:
    workload = analytic_workload("gpt-3-6.7b", "p3.2xlarge", nodes=32)
    assert workload.stages == workload.min_stages >= 8
    assert workload.pipelines * workload.stages <= 32
    with pytest.raises(PlanError, match="needs at least"):
        analytic_workload("gpt-3-6.7b", "p3.2xlarge", nodes=4)
