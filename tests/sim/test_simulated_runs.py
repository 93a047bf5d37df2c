"""Time, work and cost add up, whatever happens and however a strategy responds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from culm.market import MarketModel, MarketTrace, NodeEvent, generate_trace
from culm.schedule import Costs
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import (
    MeanInterval,
    NodePrice,
    simulate,
    simulate_trace,
    simulated_strategies,
    steady_trace,
    student_t_975,
)
from culm.sim.simulated_strategy import SimulationContext
from culm.sim.workload import Workload

WORK = Workload(
    name="small",
    pipelines=3,
    stages=4,
    micro_batches=9,
    micro_batch=2,
    costs=Costs(forward=0.1, input=0.1, weight=0.1),
    state_bytes=4e9,
    least_stages=2,
    layers=12,
)
PRICE = NodePrice(spot=1.0, on_demand=3.0)
CHARGES = ClusterCosts()
HOUR = 3600.0
SCENE = SimulationContext.create(WORK, CHARGES)
TOLD = SimulationContext.create(WORK, ClusterCosts(notice_s=120))


def trace(*changes: tuple[float, str, int], nodes: int = 12, hours: float = 2.0, zones: int = 1) -> MarketTrace:
    """This many nodes from the start; then (hour, add or remove, number of the node)."""
    there = [NodeEvent(0.0, "add", f"n{n}", f"z{n % zones}") for n in range(nodes)]
    later = [NodeEvent(h * HOUR, "add" if k == "add" else "remove", f"n{n}", f"z{n % zones}") for h, k, n in changes]
    return MarketTrace((*there, *later), hours * HOUR)


def _short_rest_s(market: MarketTrace) -> float:
    """What nodes that were lost within their first minute are billed beyond their time."""
    began: dict[str, float] = {}
    rest = 0.0
    for event in market.events:
        if event.kind == "add":
            began[event.node] = event.t
        else:
            rest += max(0.0, 60.0 - (event.t - began.pop(event.node)))
    return rest


@pytest.mark.parametrize("name", simulated_strategies())
@given(
    seed=st.integers(0, 10**6),
    rate=st.floats(0, 3),
    group=st.floats(1, 6),
    available=st.floats(0.3, 1),
    told=st.booleans(),
)
@example(seed=1107, rate=1.5, group=2.0, available=0.34375, told=False)  # a pipeline with several holes at once
@settings(max_examples=12)
def test_time_work_and_money_add_up(
    name: str, seed: int, rate: float, group: float, available: float, told: bool
) -> None:
    market = MarketModel(nodes=14, hours=2, rate=rate, group=group, available=available, zones=2)
    events = generate_trace(market, seed)
    run = simulate_trace(TOLD if told else SCENE, name, events, PRICE)
    assert sum(run.seconds_by_kind.values()) == pytest.approx(2 * HOUR)
    assert min(run.seconds_by_kind.values()) >= -1e-6
    if name == "on-demand":
        assert run.usd == pytest.approx(run.node_seconds / HOUR * 3.0)
    else:
        assert run.usd == pytest.approx((run.node_seconds + _short_rest_s(events)) / HOUR)
    fastest = WORK.samples / min(
        SCENE.step_times.healthy(3), SCENE.step_times.unequal_depths(14)[0], SCENE.step_times.one_f_one_b(3)
    )
    assert 0 <= run.samples <= run.seconds_by_kind.get("train", 0.0) * fastest * (1 + 1e-9)
    # No sample without its work: a worker runs one action at a time.
    assert run.samples / WORK.micro_batch * WORK.micro_batch_s <= run.node_seconds * (1 + 1e-9)
    assert [point.t for point in run.points] == sorted(point.t for point in run.points)


@pytest.mark.parametrize("name", simulated_strategies())
def test_the_same_trace_gives_the_same_run(name: str) -> None:
    market = generate_trace(MarketModel(nodes=14, hours=2, rate=1.0), 3)
    first, second = (simulate_trace(SimulationContext.create(WORK, CHARGES), name, market, PRICE) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["reroute", "checkpoint", "drop", "migrate"])
def test_without_losses_a_run_trains_all_the_time_but_for_its_start(name: str) -> None:
    run = simulate_trace(SCENE, name, steady_trace(12, 2 * HOUR), PRICE)
    waits = CHARGES.warm_up_s + CHARGES.restart_s
    stalls = run.seconds_by_kind["checkpoint"]
    assert run.seconds_by_kind["train"] == pytest.approx(2 * HOUR - waits - stalls)
    assert run.samples == pytest.approx(run.seconds_by_kind["train"] * WORK.samples / SCENE.step_times.healthy(3))


def test_after_a_loss_peers_take_over_at_the_speed_of_the_plan() -> None:
    run = simulate_trace(SimulationContext.create(WORK, CHARGES, "never"), "reroute", trace((1.0, "remove", 5)), PRICE)
    one_lost = min(SCENE.step_times.rerouted(3, tuple(int(s == at) for s in range(4))) for at in range(4))
    assert run.points[-1].rate == pytest.approx(WORK.samples / one_lost)
    assert run.rollbacks == 0
    assert run.seconds_by_kind["detect"] == CHARGES.detect_s


def test_a_newcomer_fills_the_hole() -> None:
    run = simulate_trace(SCENE, "reroute", trace((1.0, "remove", 5), (1.2, "add", 20)), PRICE)
    assert run.points[-1].rate == pytest.approx(WORK.samples / SCENE.step_times.healthy(3))


def test_a_stage_without_a_holder_goes_back_to_the_checkpoint() -> None:
    one_pipeline = replace(WORK, pipelines=1)
    run = simulate_trace(
        SimulationContext.create(one_pipeline, CHARGES), "reroute", trace((1.0, "remove", 0), nodes=4), PRICE
    )
    assert run.rollbacks == 1
    assert 0 < run.seconds_by_kind["undone"] <= CHARGES.checkpoint_every_s + CHARGES.load_s(WORK) + 1


def test_none_loses_everything_and_checkpoint_what_came_after_the_last_one() -> None:
    lossy = trace((1.9, "remove", 5), nodes=13)
    none, checkpoint = (simulate_trace(SCENE, name, lossy, PRICE) for name in ("none", "checkpoint"))
    assert none.seconds_by_kind["undone"] > 1.8 * HOUR
    assert checkpoint.seconds_by_kind["undone"] < 400
    assert checkpoint.samples > 5 * none.samples


def test_drop_trains_with_fewer_samples_and_the_same_step() -> None:
    run = simulate_trace(SCENE, "drop", trace((1.0, "remove", 5)), PRICE)
    assert run.points[-1].rate == pytest.approx(2 / 3 * WORK.samples / SCENE.step_times.healthy(3))


def test_a_notice_leaves_nothing_to_detect_or_to_redo() -> None:
    run = simulate_trace(TOLD, "reroute", trace((1.0, "remove", 5)), PRICE)
    assert "detect" not in run.seconds_by_kind
    assert "redo" not in run.seconds_by_kind


def test_zones_are_spread_so_that_losing_one_leaves_a_holder_of_every_stage() -> None:
    zone = [(1.0, "remove", n) for n in range(0, 12, 3)]
    run = simulate_trace(SCENE, "reroute", trace(*zone, zones=3), PRICE)
    assert run.preemptions == 4
    assert run.rollbacks == 0


def test_a_name_that_comes_again_is_warmed_up_again() -> None:
    again = trace((0.0, "add", 12), (0.005, "remove", 12), (0.01, "add", 12), nodes=11)
    run = simulate_trace(SCENE, "checkpoint", again, PRICE)
    full = next(
        point.t for point in run.points if point.rate == pytest.approx(WORK.samples / SCENE.step_times.healthy(3))
    )
    assert full >= 0.01 * HOUR + CHARGES.warm_up_s


def test_with_too_few_nodes_a_run_waits() -> None:
    run = simulate_trace(SCENE, "reroute", trace(nodes=3), PRICE)
    assert run.samples == 0
    assert run.seconds_by_kind == {"wait": 2 * HOUR}


def test_auto_is_not_worse_than_what_it_chooses_from() -> None:
    traces = [generate_trace(MarketModel(nodes=12, hours=12, rate=0.5, available=0.8), seed) for seed in range(5)]
    result = simulate(WORK, traces, ["auto", "reroute", "templates"], cluster_costs=CHARGES, price=PRICE)
    best = max(result[name].goodput.value for name in ("reroute", "templates"))
    assert result["auto"].goodput.value >= 0.99 * best


def test_on_demand_costs_its_own_price_for_all_nodes() -> None:
    run = simulate_trace(SCENE, "on-demand", trace(nodes=5), PRICE)
    assert run.usd == pytest.approx(12 * 3.0 * 2)
    assert run.preemptions == 0


def test_plans_are_found_again() -> None:
    traces = [generate_trace(MarketModel(nodes=12, hours=12, rate=0.5), seed) for seed in range(3)]
    result = simulate(WORK, traces, ["reroute"], cluster_costs=CHARGES, price=PRICE)["reroute"]
    assert result.plan_hits > 3 * result.plan_misses > 0


def test_intervals_are_those_of_student() -> None:
    assert [student_t_975(n) for n in (1, 2, 4, 9, 99)] == pytest.approx([12.706, 4.303, 2.776, 2.262, 1.984], rel=0.01)
    assert MeanInterval.from_values([1.0, 3.0]).low == pytest.approx(2 - 12.706)
    assert MeanInterval.from_values([5.0]) == MeanInterval(5.0, 5.0, 5.0)
    assert math.isinf(MeanInterval.from_values([math.inf, 1.0]).value)


ALONE = replace(WORK, pipelines=1, least_stages=4)


def test_auto_keeps_shadows_where_there_are_no_peers_and_losses_are_frequent() -> None:
    often = trace(*((0.1 + 0.15 * n, "remove" if n % 2 == 0 else "add", 1) for n in range(12)), nodes=4)
    shadows, none = (
        simulate_trace(SimulationContext.create(ALONE, replace(CHARGES, shadow=cost)), "auto", often, PRICE)
        for cost in (0.02, 100.0)
    )
    assert shadows.rollbacks == 0 < none.rollbacks
    assert shadows.samples > none.samples


def test_a_shadow_that_goes_with_its_successor_leaves_the_checkpoint() -> None:
    scene = SimulationContext.create(ALONE, replace(CHARGES, shadow=0.0))
    apart, neighbours = (
        simulate_trace(scene, "auto", trace((1.0, "remove", 0), (1.0, "remove", other), nodes=4), PRICE)
        for other in (2, 1)
    )
    assert (apart.rollbacks, neighbours.rollbacks) == (0, 1)
