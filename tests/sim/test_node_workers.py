"""Nodes with several workers are billed, lost and replaced as one; plan and simulation agree where nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from culm.cli import main
from culm.market.market_trace import MarketTrace, NodeEvent
from culm.market.trace_generator import PRESETS, generate_trace
from culm.market.trace_limit import limit_nodes
from culm.schedule import Costs
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, parse_strategy_names, simulate, steady_trace
from culm.sim.engine import workers_of_node
from culm.sim.workload import Workload

HOUR = 3600.0
PRICE = NodePrice(spot=10.0, on_demand=30.0)
WORKLOAD = Workload(
    pipelines=4, stages=4, micro_batches=32, costs=Costs(forward=0.1, input=0.1, weight=0.1), workers_per_node=8,
    least_stages=2, layers=8, state_bytes=1e9,
)  # fmt: skip


def culm_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main((*arguments, "--json"))
    shown = capsys.readouterr()
    assert not ended.value.code, shown.err
    found = json.loads(shown.out)
    assert isinstance(found, dict)
    return found


def test_a_node_is_billed_once_however_many_workers_it_has() -> None:
    assert (WORKLOAD.workers, WORKLOAD.nodes, WORKLOAD.spare_workers) == (16, 2, 0)
    outcomes = simulate(
        WORKLOAD, [steady_trace(2, 4 * HOUR)], parse_strategy_names("all"), cluster_costs=ClusterCosts(), price=PRICE
    )
    for name, outcome in outcomes.items():
        assert outcome.cost_per_h.value == pytest.approx(60.0 if name == "on-demand" else 20.0), name
        assert outcome.mean(lambda run: run.node_seconds / run.seconds) == pytest.approx(2)


def test_the_loss_of_a_node_takes_all_its_workers() -> None:
    """Without its eight workers the other node has two of the four pipelines."""
    events = (*steady_trace(2, HOUR).events, NodeEvent(HOUR, "remove", "node2"))
    trace = MarketTrace(events, 2 * HOUR)
    run = simulate(WORKLOAD, [trace], ["checkpoint"], cluster_costs=ClusterCosts(), price=PRICE)["checkpoint"].runs[0]
    assert run.preemptions == 1
    assert [point.nodes for point in run.points][-1] == 1
    rates = [point.rate for point in run.points if point.rate]
    assert rates[-1] < 0.75 * rates[0]


def test_workers_of_one_node_count_as_one_place_that_can_be_lost() -> None:
    workers = workers_of_node("n", "a", 4)
    assert len({worker.name for worker in workers}) == 4
    assert {worker.zone for worker in workers} == {"a/n"}
    assert workers_of_node("n", "a", 1)[0].zone == "a"


def test_peers_on_different_nodes_survive_the_loss_of_one() -> None:
    events = (*steady_trace(2, HOUR).events, NodeEvent(HOUR, "remove", "node1"))
    outcome = simulate(
        WORKLOAD, [MarketTrace(events, 2 * HOUR)], ["reroute"], cluster_costs=ClusterCosts(), price=PRICE
    )["reroute"]
    assert outcome.mean(lambda run: run.rollbacks) == 0
    assert outcome.mean(lambda run: run.preemptions) == 1


@given(seed=st.integers(0, 1000), nodes=st.integers(1, 40))
def test_a_renter_never_has_more_nodes_than_wanted_and_all_that_the_market_has_below_that(
    seed: int, nodes: int
) -> None:
    trace = generate_trace(PRESETS["p3"], seed)
    limited = limit_nodes(trace, nodes)
    assert limited.peak <= nodes
    alive = {count.t: count.alive for count in limited.counts}
    for count in trace.counts:
        if count.t in alive:
            assert alive[count.t] == min(nodes, count.alive)


CALM = ("--market", "rate=0,available=1", "--hours", "2", "--seeds", "1", "--strategy", "reroute,templates,on-demand")
REQUESTS = [
    ("bert-large", "p3.2xlarge", 16),
    ("bert-large", "p4d.24xlarge", 4),
    ("gpt-3-6.7b", "p5.48xlarge", 8),
    ("gpt-3-2.7b", "g5.xlarge", 12),
    ("gpt-2", "g4dn.12xlarge", 3),
    ("llama-3-8b", "p5.48xlarge", 3),
]


@pytest.mark.parametrize("schedule", ["1f1b", "planned"])
@pytest.mark.parametrize(("model", "instance", "nodes"), REQUESTS)
def test_plan_and_calm_simulation_agree(
    model: str, instance: str, nodes: int, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request = ("--model", model, "--instance", instance, "--nodes", str(nodes), "--schedule", schedule)
    planned = culm_json(capsys, "plan", *request)
    simulated = culm_json(capsys, "simulate", *request, *CALM)
    for key in ("nodes", "workers", "cost_per_h", "step_s", "schedule_name"):
        assert planned[key] == pytest.approx(simulated[key]) if key != "schedule_name" else planned[key] == schedule
    assert planned["slots"] == pytest.approx(planned["step_s"]), "the plan in the JSON is that of the schedule"
    choice, workload = planned["choices"][0], simulated["workload"]
    assert [choice[key] for key in ("pipelines", "stages", "micro_batches")] == [
        workload[key] for key in ("pipelines", "stages", "micro_batches")
    ]
    strategies = simulated["strategies"]
    assert isinstance(strategies, dict)
    calm = choice["micro_batch"] * choice["micro_batches"] / choice["step_s"]
    for name in ("reroute", "templates", "on-demand"):
        assert strategies[name]["goodput"] / strategies[name]["split"]["train"] == pytest.approx(calm, rel=0.01), name
        assert 0 < strategies[name]["of_ideal"] <= 1
    assert strategies["reroute"]["cost_per_h"] == pytest.approx(planned["cost_per_h"])


def test_the_dollars_of_whole_instances(capsys: pytest.CaptureFixture[str]) -> None:
    request = ("--model", "bert-large", "--instance", "p4d.24xlarge", "--nodes", "4")
    found = culm_json(capsys, "simulate", *request, *CALM)
    strategies = found["strategies"]
    assert isinstance(strategies, dict)
    assert strategies["on-demand"]["cost_per_h"] == pytest.approx(87.83, abs=0.005)


def test_a_market_that_cannot_provide_the_nodes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    request = ("--model", "bert-large", "--instance", "p3.2xlarge", "--nodes", "16", "--on", "2022-06-30")
    with pytest.raises(SystemExit):
        main(("simulate", *request, "--market", "p3", "--seeds", "2", "--strategy", "templates", "--json"))
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["nodes"] == 16
    assert found["strategies"]["templates"]["nodes"] <= 16
    assert "of 16 nodes on average, 16 at most: only those are trained on and paid for" in shown.err


@settings(deadline=None, max_examples=4)
@given(
    seed=st.integers(0, 100), schedule=st.sampled_from(["planned", "1f1b", "zb"]), workers=st.sampled_from([1, 2, 4, 8])
)
def test_no_strategy_is_faster_than_the_ideal(seed: int, schedule: str, workers: int) -> None:
    workload = Workload(
        pipelines=2, stages=4, micro_batches=8, costs=Costs(forward=0.1, input=0.1, weight=0.1, send=0.01),
        workers_per_node=workers, schedule=schedule, least_stages=2, layers=8,
    )  # fmt: skip
    market = PRESETS["p3"].__class__(nodes=workload.nodes, hours=1, rate=0.5)
    outcomes = simulate(
        workload, [generate_trace(market, seed)], parse_strategy_names("all"), cluster_costs=ClusterCosts(), price=PRICE
    )
    for name, outcome in outcomes.items():
        assert outcome.goodput.value <= workload.ideal_samples_per_s, name
