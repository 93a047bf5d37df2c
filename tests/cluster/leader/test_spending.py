"""What a run costs, to the cent: simulated clusters in virtual time, with the production code of agents and leader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.tiny_jobs import job

from culm.cluster.run_setup import encode
from culm.errors import BudgetReached
from culm.market.rental_cost import RentalTerms
from culm.observe.report.cost_reader import read_cost
from culm.plan.rent.fleet_decision import FleetDecision
from culm.testing import Faults, simulate
from culm.testing.simulated_cluster import NO_FAULTS, Cluster

ACTION_S = 10.0
"""Virtual seconds of an action: a run takes minutes of virtual time, more than the shortest billed time."""


def run(tmp_path: Path, *, steps: int = 8, faults: Faults = NO_FAULTS, out: str = "run", **options: Any) -> Any:
    return simulate(
        job(steps=steps),
        faults=faults,
        cost=lambda *_: ACTION_S,
        pipelines=2,
        stages=2,
        strategy="reroute",
        out=str(tmp_path / out),
        **options,
    )


def cost_of(tmp_path: Path, out: str = "run") -> dict[str, Any]:
    found = read_cost(str(tmp_path / out))
    assert found is not None
    return found.as_json()


def events(tmp_path: Path, kind: str, out: str = "run") -> list[dict[str, Any]]:
    lines = (tmp_path / out / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_four_nodes_that_stay_cost_their_price_for_the_whole_run(tmp_path: Path) -> None:
    done = run(tmp_path, instance="p3.2xlarge", market="spot", node_price=1.8)
    cost = cost_of(tmp_path)
    assert done.summary["cost_usd"] == pytest.approx(4 * 1.8 * done.virtual_s / 3600, rel=1e-6)
    assert cost["cost_usd"] == done.summary["cost_usd"]
    assert [(row["market"], row["nodes"]) for row in cost["kinds"]] == [("spot", 4)]
    # The same steps on demand: every step takes as long as one without a disturbance, at 3.06 $/h a node.
    ends = [json.loads(line)["t"] for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
    assert done.summary["cost_on_demand_usd"] == pytest.approx(8 * step_s * 4 * 3.06 / 3600, rel=1e-6)


def test_without_a_price_a_run_costs_nothing_and_has_no_account(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert (done.summary["cost_usd"], done.summary["cost_on_demand_usd"]) == (0.0, None)
    assert read_cost(str(tmp_path / "run")) is None


class Bill:
    """What the nodes cost, from when their keys appear in the store and vanish: independent of the leader's account."""

    def __init__(self, cluster: Cluster) -> None:
        self.clock, self.begun, self.ended = cluster.clock, dict[int, float](), dict[int, float]()
        cluster.store.listen("nodes/", self._on_change)

    def _on_change(self, change: Any) -> None:
        node = int(change.key.rpartition("/")[2])
        if change.value is None:
            self.ended[node] = self.clock.now()
        else:
            self.begun.setdefault(node, self.clock.now())

    def seconds(self, end: float) -> dict[int, float]:
        """Billed seconds of each node of a run that ends then."""
        return {node: max(60.0, min(end, self.ended.get(node, end)) - began) for node, began in self.begun.items()}


def price(node: int) -> RentalTerms:
    return RentalTerms(usd_h=1.0 + node, on_demand_usd_h=10.0, instance=f"kind{node % 2}", market="spot")


@pytest.mark.parametrize(
    "faults",
    [
        Faults().kill(3, after_s=700.0),
        Faults().kill(0, step=2, at="0F0"),  # the leader
        Faults().kill(2, after_s=150.0).join(after_s=200.0).join(after_s=300.0),  # the second one finds no slot
        Faults().kill((0, 3), after_s=390.0).join(after_s=400.0),
        Faults().warn(1, seconds=90.0, after_s=250.0).join(after_s=260.0).kill(0, after_s=500.0),
    ],
    ids=["kill", "leader", "joins", "leader and another", "notice, join, leader"],
)
def test_the_account_is_exact_through_kills_joins_and_leader_loss(tmp_path: Path, faults: Faults) -> None:
    bills: list[Bill] = []

    async def watch(cluster: Cluster) -> None:
        bills.append(Bill(cluster))

    done = run(tmp_path, steps=12, faults=faults, script=watch, rental=price)
    assert not done.faults_not_reached(faults)
    seconds = bills[0].seconds(done.virtual_s)
    expected = sum(price(node).usd_h * billed / 3600 for node, billed in seconds.items())
    assert done.summary["cost_usd"] == pytest.approx(expected, rel=1e-9)
    rows = {row["node"]: row for row in cost_of(tmp_path)["nodes"]}
    for node, billed in seconds.items():
        assert max(60.0, rows[f"node {node}"]["hours"] * 3600) == pytest.approx(billed, abs=1e-6)


def test_price_changes_are_billed_from_when_they_are_known(tmp_path: Path) -> None:
    async def raise_price(cluster: Cluster) -> None:
        await cluster.clock.sleep(300.0)
        cluster.change_price(2, 7.2)

    done = run(tmp_path, script=raise_price, node_price=3.6)
    assert done.summary["cost_usd"] == pytest.approx(
        (3 * done.virtual_s * 3.6 + 300.0 * 3.6 + (done.virtual_s - 300.0) * 7.2) / 3600, rel=1e-9
    )
    assert [(event["node"], event["usd_h"]) for event in events(tmp_path, "price_changed")] == [(2, 7.2)]
    assert [change["usd_per_h"] for change in cost_of(tmp_path)["nodes"][2]["usd_per_h"]] == [3.6, 7.2]


def test_the_program_that_rents_machines_may_report_their_prices(tmp_path: Path) -> None:
    """As `culm launch` does: before or after a node registers, since when it is rented, and again with a new price."""

    async def tell(cluster: Cluster) -> None:
        terms = RentalTerms(usd_h=3.6, on_demand_usd_h=7.2, instance="big", market="spot", rented_at=-60.0)
        for node in (0, 1, 9):  # there is no node 9
            cluster.store.write(f"rentals/{node}", encode(terms))
        await cluster.clock.sleep(300.0)
        cluster.store.write("rentals/2", encode(terms))
        cluster.store.write("rentals/0", encode(msgspec.structs.replace(terms, usd_h=7.2)))

    done = run(tmp_path, script=tell)
    later = done.virtual_s - 300.0
    expected = 3.6 * (3 * (done.virtual_s + 60.0)) + 3.6 * later
    assert done.summary["cost_usd"] == pytest.approx(expected / 3600, rel=1e-9)
    assert [row["node"] for row in cost_of(tmp_path)["nodes"]] == ["node 0", "node 1", "node 2"]


def test_waiting_and_recovery_are_distinguished_from_training(tmp_path: Path) -> None:
    faults = Faults().kill(3, after_s=290.0).join(after_s=300.0).join(after_s=300.0)
    run(tmp_path, steps=12, faults=faults, node_price=3.6)
    cost = cost_of(tmp_path)
    recovered = sum(event["decide_ms"] + event["move_ms"] + event["redo_ms"] for event in events(tmp_path, "recovered"))
    rows = {row["node"]: row for row in cost["nodes"]}
    assert rows["node 5"]["waiting_usd"] == pytest.approx(rows["node 5"]["usd"])  # no slot is free for it
    assert rows["node 1"]["waiting_usd"] == pytest.approx(rows["node 2"]["waiting_usd"])  # until the first step
    assert rows["node 1"]["waiting_usd"] <= 4 * ACTION_S * 3.6 / 3600
    assert 0 < rows["node 1"]["recovery_usd"] * 1000 <= 1.5 * recovered
    assert cost["recovery_usd"] > 0


def test_a_resumed_run_adds_to_what_was_spent_before(tmp_path: Path) -> None:
    first = run(tmp_path, steps=4, node_price=3.6, checkpoint_every=2)
    second = run(tmp_path, steps=8, node_price=7.2, resume=str(tmp_path / "run"), out="more")
    third = run(tmp_path, steps=10, resume=str(tmp_path / "more"), out="last")  # its nodes have no price
    spent = 4 * first.virtual_s * 3.6 / 3600
    assert second.summary["cost_usd"] == pytest.approx(spent + 4 * second.virtual_s * 7.2 / 3600, rel=1e-9)
    assert third.summary["cost_usd"] == second.summary["cost_usd"]
    cost = cost_of(tmp_path, "more")
    assert cost["earlier_usd"] == pytest.approx(spent)
    assert (cost["steps"], cost["samples"]) == (8, 64)


@pytest.mark.parametrize("budget", [1.2, 2.0, 3.1])
def test_a_run_stops_with_a_checkpoint_before_its_budget_is_exceeded(tmp_path: Path, budget: float) -> None:
    with pytest.raises(BudgetReached, match=r"continue with --resume .* and a higher --budget"):
        run(tmp_path, steps=40, node_price=3.6, budget=budget)
    cost = cost_of(tmp_path)["cost_usd"]
    step_usd = cost / cost_of(tmp_path)["steps"]
    assert budget - 4 * step_usd < cost <= budget  # at most the open steps, one to the next check, and the checkpoint
    (stopped,) = events(tmp_path, "stopped")
    assert f"the budget of ${budget:.2f} is reached" in stopped["why"]
    # It resumes from the step it stopped at, and trains what a run without a budget trains.
    resumed = run(tmp_path, steps=40, node_price=3.6, resume=str(tmp_path / "run"), out="rest", budget=1000.0)
    assert resumed.weights_sha256 == run(tmp_path, steps=40, out="whole").weights_sha256
    assert resumed.summary["steps"] == 40


def test_a_budget_that_suffices_changes_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, node_price=3.6, budget=100.0, deadline=1e6)
    assert done.summary["steps"] == 8
    assert not events(tmp_path, "stopped") + events(tmp_path, "deadline_at_risk")


def test_a_run_that_waits_for_nodes_ends_before_the_budget_is_spent(tmp_path: Path) -> None:
    """One node of four is left: nothing is trained, and it costs money."""
    faults = Faults().kill((1, 2, 3), after_s=50.0)  # no holder of some layers is left

    with pytest.raises(BudgetReached, match="nothing of it was saved"):
        simulate(
            job(steps=40),
            faults=faults,
            cost=lambda *_: ACTION_S,
            pipelines=1,
            stages=4,
            strategy="checkpoint",
            replace_within=1e6,
            out=str(tmp_path / "run"),
            node_price=3.6,
            budget=0.5,
        )
    assert 0.4 < cost_of(tmp_path)["cost_usd"] <= 0.5


def test_an_endangered_deadline_is_an_event(tmp_path: Path) -> None:
    run(tmp_path, steps=12, faults=Faults().kill(3, after_s=300.0), deadline=1250.0)
    assert [event["kind"] for event in events(tmp_path, "deadline_at_risk")] == ["deadline_at_risk"]


def test_a_fleet_decision_is_recorded_with_its_reason_and_can_stop_the_run(tmp_path: Path) -> None:
    async def control(cluster: Cluster) -> None:
        await cluster.wait_until_committed(2)
        decision = FleetDecision(spot=3, on_demand=1, why="spot nodes alone would miss the deadline")
        cluster.store.write("wish/fleet", encode(decision))
        await cluster.wait_until_committed(4)
        cluster.store.write("wish/fleet", encode(FleetDecision(spot=0, on_demand=0, stop=True, why="too dear")))

    with pytest.raises(BudgetReached, match="too dear"):
        run(tmp_path, steps=40, node_price=1.0, script=control)
    assert [(event["spot"], event["on_demand"]) for event in events(tmp_path, "fleet")] == [(3, 1), (0, 0)]
