"""The forecast of graph training: work counts, seconds, dollars, and the value of each system."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError, UsageError
from culm.gnn.plan import (
    NAMED_GRAPHS,
    THROUGHPUT_RATES,
    ForecastInputs,
    GraphWorkload,
    choose_plan,
    count_epoch_work,
    rates_by_name,
)
from culm.gnn.plan.dorylus_table import DORYLUS_TABLE, DorylusRow, agrees_with_row, forecast_row
from culm.gnn.plan.epoch_forecast import (
    best_elastic_forecast,
    fewest_servers,
    forecast_cpu,
    forecast_elastic,
    forecast_gpu,
    mean_ghost_copies,
)
from culm.gnn.plan.gnn_prices import prices_for_year
from culm.gnn.plan.training_plan import with_instance_workers

workloads = st.builds(
    GraphWorkload,
    name=st.just("any"),
    vertices=st.integers(100, 10**8),
    edges=st.integers(100, 10**10),
    features=st.integers(1, 2000),
    classes=st.integers(2, 200),
    hidden=st.integers(1, 512),
    layers=st.integers(1, 4),
    model=st.sampled_from(["gcn", "gat"]),
    heads=st.integers(1, 4),
)


def make_inputs(shape: GraphWorkload = NAMED_GRAPHS["amazon"], year: str = "2021") -> ForecastInputs:
    rates = "paper" if year == "2021" else "measured"
    return ForecastInputs(shape=shape, rates=rates_by_name(rates), prices=prices_for_year(year))


@pytest.mark.parametrize(("graph", "ratio"), [("amazon", 2.96), ("friendster", 1.46), ("reddit-small", 0.40)])
def test_tensor_work_to_graph_work_is_as_published(graph: str, ratio: float) -> None:
    assert count_epoch_work(NAMED_GRAPHS[graph], "gather-first").ratio == pytest.approx(ratio, abs=0.005)


@given(workloads)
def test_the_cheapest_order_never_gathers_more_and_multiplies_the_same(shape: GraphWorkload) -> None:
    theirs, ours = count_epoch_work(shape, "gather-first"), count_epoch_work(shape, "cheapest")
    assert ours.gather <= theirs.gather
    assert ours.macs == theirs.macs


def test_caching_the_first_gather_makes_amazon_eight_times_cheaper_to_gather() -> None:
    theirs, ours = (count_epoch_work(NAMED_GRAPHS["amazon"], order) for order in ("gather-first", "cheapest"))
    assert theirs.gather / ours.gather == pytest.approx((300 + 2 * 64) / (2 * 25))


@pytest.mark.parametrize("row", DORYLUS_TABLE, ids=lambda row: f"{row.graph}-{row.model}")
def test_the_forecast_agrees_with_the_published_table(row: DorylusRow) -> None:
    plan = forecast_row(row)
    assert agrees_with_row(row, plan)
    for system in ("cpu", "gpu"):
        assert 0.5 < plan.value_gain(system) / row.value_gain(system) < 2


def test_elastic_workers_gain_most_with_attention_and_gpus_win_on_the_small_dense_graph() -> None:
    gains = {(row.graph, row.model): forecast_row(row).value_gain("cpu") for row in DORYLUS_TABLE}
    assert max(gains, key=gains.__getitem__) == ("amazon", "gat")
    small = forecast_row(DORYLUS_TABLE[0])
    assert small.systems["gpu"].value > max(small.elastic.value, small.systems["cpu"].value)


def test_in_2026_gpus_have_the_best_value_and_lambda_is_bound_by_its_network() -> None:
    plan = choose_plan(make_inputs(year="2026"))
    assert plan.best.system == "gpu"
    assert plan.value_gain("cpu") < 1
    assert max(plan.elastic.split, key=plan.elastic.split.__getitem__) == "workers"


@given(workloads, st.sampled_from(["2021", "2026"]))
def test_every_plan_is_finite_and_its_best_is_the_best(shape: GraphWorkload, year: str) -> None:
    plan = choose_plan(make_inputs(shape, year), servers=4)
    forecasts = plan.systems
    assert all(0 < f.epoch_s < float("inf") and 0 < f.epoch_usd < float("inf") for f in forecasts.values())
    assert plan.best.value == max(f.value for name, f in forecasts.items() if name != "sampling")
    assert plan.elastic.workers >= 1 and plan.elastic.intervals >= 1


@given(workloads, st.integers(1, 64))
def test_more_overlap_is_never_slower(shape: GraphWorkload, workers: int) -> None:
    base, machine = make_inputs(shape), prices_for_year("2021").machine("c5n.2xlarge")
    times = [forecast_elastic(replace(base, mode=mode), machine, 4, workers).epoch_s for mode in ("async", "pipe")]
    assert times == sorted(times)


def test_synchronous_layers_cost_the_sum_of_servers_and_workers() -> None:
    base, machine = make_inputs(), prices_for_year("2021").machine("c5n.2xlarge")
    forecast = forecast_elastic(replace(base, mode="sync"), machine, 8, 100)
    assert forecast.epoch_s == pytest.approx(sum(forecast.split.values()))
    assert forecast.epochs == 1


def test_staleness_costs_epochs_in_async_mode() -> None:
    base, machine = make_inputs(), prices_for_year("2021").machine("c5n.2xlarge")
    epochs = [forecast_elastic(replace(base, staleness=s), machine, 8, 100).epochs for s in (0, 1, 5)]
    assert epochs == [1.08, 1.41, 1.41]


def test_no_number_of_workers_has_a_better_value_than_the_chosen_one() -> None:
    base, machine = make_inputs(), prices_for_year("2021").machine("c5n.2xlarge")
    best = best_elastic_forecast(base, machine, 8)
    tried = [forecast_elastic(base, machine, 8, count).value for count in range(1, 800, 7)]
    assert best.value >= 0.98 * max(tried)


def test_tasks_last_about_the_target_duration() -> None:
    plan = choose_plan(make_inputs(), servers=8)
    busy = plan.elastic.split["workers"] * plan.elastic.workers
    tasks = plan.elastic.intervals * 8 * plan.inputs.work.calls
    assert 0.05 < busy / tasks < 0.1


@given(workloads, st.integers(1, 256), st.floats(0.01, 1))
def test_ghost_copies_are_bounded_by_servers_and_cut_edges(shape: GraphWorkload, servers: int, cut: float) -> None:
    copies = mean_ghost_copies(shape, servers, cut)
    assert 0 <= copies <= servers - 1
    assert copies <= cut * shape.degree * 1.5 + 1e-9


def test_one_server_exchanges_no_ghosts() -> None:
    assert forecast_cpu(make_inputs(), prices_for_year("2021").machine("c5n.2xlarge"), 1).split["ghosts"] == 0


def test_the_fewest_servers_hold_the_graph() -> None:
    machine = prices_for_year().machine("c5n.2xlarge")
    inputs = make_inputs(NAMED_GRAPHS["friendster"], "2026")
    servers = fewest_servers(inputs, machine)
    assert inputs.work.held < servers * machine.memory_gib * 2**30
    assert fewest_servers(inputs, replace(machine, memory_gib=2 * machine.memory_gib)) < servers


def test_a_graph_that_no_cluster_holds_is_rejected() -> None:
    huge = replace(NAMED_GRAPHS["friendster"], edges=10**15)
    with pytest.raises(PlanError, match="use a larger instance"):
        choose_plan(make_inputs(huge, "2026"))


def test_workers_on_instances_cost_less_than_lambda_for_the_same_work() -> None:
    base = make_inputs(year="2026")
    machine = base.prices.machine("c5n.2xlarge")
    assert with_instance_workers(base, machine).prices.elastic.cost(1, 1) < base.prices.elastic.cost(
        base.rates.worker_gb, 1
    )


def test_gpus_are_in_the_order_of_their_data_sheets() -> None:
    base = make_inputs(year="2026")
    times = [
        forecast_gpu(base, base.prices.machine(name), 1).epoch_s for name in ("g4dn.xlarge", "g5.xlarge", "p5.4xlarge")
    ]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"servers": 0}, "servers is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"instance": "p3.2xlarge"}, "has GPUs"),
        ({"instance": "c5n.3xlarge"}, r"did you mean c5n\.\w+"),
        ({"gpu_instance": "c5.2xlarge"}, "no rates of its GPU"),
    ],
)
def test_invalid_plan_options_are_rejected_by_name(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        choose_plan(make_inputs(), **wrong)  # type: ignore[arg-type]


def test_rates_name_their_source() -> None:
    assert "not measured by us" in THROUGHPUT_RATES["paper"].source
    assert "measured on" in THROUGHPUT_RATES["measured"].source
    with pytest.raises(UsageError, match="paper or measured"):
        rates_by_name("guessed")
