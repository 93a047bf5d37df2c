"""The forecast of graph training: counts, seconds, dollars, and which way is worth more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError, UsageError
from culm.gnn.plan import NAMED, RATES, Setting, Shape, epoch_work, plan, rates_of
from culm.gnn.plan.choose import on_instances
from culm.gnn.plan.forecast import best_elastic, cpu, elastic, gpu, replicas, servers_for
from culm.gnn.plan.paper import TABLE, Published, agrees, replayed
from culm.gnn.price import prices_of

shapes = st.builds(
    Shape,
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


def setting(shape: Shape = NAMED["amazon"], year: str = "2021") -> Setting:
    rates = "paper" if year == "2021" else "measured"
    return Setting(shape=shape, rates=rates_of(rates), prices=prices_of(year))


@pytest.mark.parametrize(("graph", "ratio"), [("amazon", 2.96), ("friendster", 1.46), ("reddit-small", 0.40)])
def test_tensor_work_to_graph_work_is_as_published(graph: str, ratio: float) -> None:
    assert epoch_work(NAMED[graph], "gather-first").ratio == pytest.approx(ratio, abs=0.005)


@given(shapes)
def test_the_cheapest_order_never_gathers_more_and_multiplies_the_same(shape: Shape) -> None:
    theirs, ours = epoch_work(shape, "gather-first"), epoch_work(shape, "cheapest")
    assert ours.gather <= theirs.gather
    assert ours.macs == theirs.macs


def test_a_kept_first_gather_makes_amazon_eight_times_cheaper_to_gather() -> None:
    theirs, ours = (epoch_work(NAMED["amazon"], order) for order in ("gather-first", "cheapest"))
    assert theirs.gather / ours.gather == pytest.approx((300 + 2 * 64) / (2 * 25))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.graph}-{row.model}")
def test_the_forecast_points_where_the_published_table_points(row: Published) -> None:
    made = replayed(row)
    assert agrees(row, made)
    for system in ("cpu", "gpu"):
        assert 0.5 < made.gain(system) / row.gain(system) < 2


def test_elastic_workers_pay_most_for_attention_and_gpus_win_on_the_small_dense_graph() -> None:
    gains = {(row.graph, row.model): replayed(row).gain("cpu") for row in TABLE}
    assert max(gains, key=gains.__getitem__) == ("amazon", "gat")
    small = replayed(TABLE[0])
    assert small.systems["gpu"].value > max(small.elastic.value, small.systems["cpu"].value)


def test_today_a_large_gpu_is_worth_more_than_cpus_and_lambda_is_not_worth_its_network() -> None:
    made = plan(setting(year="2026"))
    assert made.best.system == "gpu"
    assert made.gain("cpu") < 1
    assert max(made.elastic.split, key=made.elastic.split.__getitem__) == "workers"


@given(shapes, st.sampled_from(["2021", "2026"]))
def test_every_plan_is_finite_and_its_best_is_the_best(shape: Shape, year: str) -> None:
    made = plan(setting(shape, year), servers=4)
    assert all(0 < one.epoch_s < float("inf") and 0 < one.epoch_usd < float("inf") for one in made.systems.values())
    assert made.best.value == max(one.value for name, one in made.systems.items() if name != "sampling")
    assert made.elastic.workers >= 1 and made.elastic.intervals >= 1


@given(shapes, st.integers(1, 64))
def test_more_overlap_is_never_slower(shape: Shape, workers: int) -> None:
    base, machine = setting(shape), prices_of("2021").machine("c5n.2xlarge")
    times = [elastic(replace(base, mode=mode), machine, 4, workers).epoch_s for mode in ("async", "pipe")]
    assert times == sorted(times)


def test_synchronous_layers_cost_the_sum_of_servers_and_workers() -> None:
    base, machine = setting(), prices_of("2021").machine("c5n.2xlarge")
    found = elastic(replace(base, mode="sync"), machine, 8, 100)
    assert found.epoch_s == pytest.approx(sum(found.split.values()))
    assert found.epochs == 1


def test_staleness_costs_epochs_and_only_where_there_is_any() -> None:
    base, machine = setting(), prices_of("2021").machine("c5n.2xlarge")
    found = [elastic(replace(base, staleness=s), machine, 8, 100).epochs for s in (0, 1, 5)]
    assert found == [1.08, 1.41, 1.41]


def test_no_number_of_workers_is_worth_more_than_the_chosen_one() -> None:
    base, machine = setting(), prices_of("2021").machine("c5n.2xlarge")
    best = best_elastic(base, machine, 8)
    tried = [elastic(base, machine, 8, count).value for count in range(1, 800, 7)]
    assert best.value >= 0.98 * max(tried)


def test_tasks_last_about_as_long_as_they_should() -> None:
    made = plan(setting(), servers=8)
    busy = made.elastic.split["workers"] * made.elastic.workers
    tasks = made.elastic.intervals * 8 * made.setting.work.calls
    assert 0.05 < busy / tasks < 0.1


@given(shapes, st.integers(1, 256), st.floats(0.01, 1))
def test_copies_of_a_vertex_are_fewer_than_other_servers_and_than_cut_edges(
    shape: Shape, servers: int, cut: float
) -> None:
    found = replicas(shape, servers, cut)
    assert 0 <= found <= servers - 1
    assert found <= cut * shape.degree * 1.5 + 1e-9


def test_one_server_exchanges_nothing() -> None:
    assert cpu(setting(), prices_of("2021").machine("c5n.2xlarge"), 1).split["ghosts"] == 0


def test_the_fewest_servers_hold_the_graph() -> None:
    machine = prices_of().machine("c5n.2xlarge")
    one = setting(NAMED["friendster"], "2026")
    servers = servers_for(one, machine)
    assert one.work.held < servers * machine.memory_gib * 2**30
    assert servers_for(one, replace(machine, memory_gib=2 * machine.memory_gib)) < servers


def test_a_graph_that_no_cluster_holds_is_refused_with_a_way_out() -> None:
    huge = replace(NAMED["friendster"], edges=10**15)
    with pytest.raises(PlanError, match="take a larger instance"):
        plan(setting(huge, "2026"))


def test_workers_on_instances_cost_less_than_lambda_for_the_same_work() -> None:
    base = setting(year="2026")
    machine = base.prices.machine("c5n.2xlarge")
    assert on_instances(base, machine).prices.elastic.cost(1, 1) < base.prices.elastic.cost(base.rates.worker_gb, 1)


def test_gpus_of_several_kinds_are_in_the_order_of_their_data_sheets() -> None:
    base = setting(year="2026")
    times = [gpu(base, base.prices.machine(name), 1).epoch_s for name in ("g4dn.xlarge", "g5.xlarge", "p5.4xlarge")]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"servers": 0}, "servers is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"instance": "p3.2xlarge"}, "has GPUs"),
        ({"instance": "c5n.3xlarge"}, r"did you mean c5n\.\w+"),
        ({"gpu_instance": "c5.2xlarge"}, "no rates of a GPU"),
    ],
)
def test_what_can_not_be_planned_is_refused_by_name(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(setting(), **wrong)  # type: ignore[arg-type]


def test_rates_say_where_they_come_from() -> None:
    assert "not measured by us" in RATES["paper"].source
    assert "measured on" in RATES["measured"].source
    with pytest.raises(UsageError, match="paper or measured"):
        rates_of("guessed")
