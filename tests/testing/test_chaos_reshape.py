"""Random runs whose shape changes: the faults are survivable, and some are injected during the change."""

from __future__ import annotations

import functools
import itertools

import pytest
from tests.cached_runs import run_with_faults

from culm import Job
from culm.cluster.node_faults import JoinNodes, KillNode, NodeFault, NoticeToNode, PartitionNode, PauseNode
from culm.plan.reshape.pipeline_shape import parse_depths
from culm.testing import Faults
from culm.testing.chaos import Scenario, coverage, make_job, random_scenario, run_scenario
from culm.testing.fault_schedule import LayoutRequest
from culm.testing.simulated_cluster import LEASE_S

PLATFORM_FAULTS = ("slow_node", "block_loop", "fail_storage", "stall_storage", "pause_store", "fail", "flip_memory")
DRAWN = [random_scenario(seed, reshaping=True) for seed in range(300)]


def lost(scenario: Scenario) -> list[NodeFault]:
    """The faults that cost nodes."""
    lethal = [f for f in scenario.faults.all if isinstance(f, KillNode | NoticeToNode | PauseNode | PartitionNode)]
    return [f for f in lethal if not isinstance(f, PauseNode | PartitionNode) or f.seconds > LEASE_S]


def has_fault_at(scenario: Scenario, moment: str) -> bool:
    return any(isinstance(fault, NodeFault) and fault.at == moment for fault in scenario.faults.all)


def test_most_scenarios_keep_their_shape() -> None:
    drawn = [random_scenario(seed) for seed in range(200)]
    others = [scenario for scenario in drawn if scenario.steps == 4]
    assert 0.6 < len(others) / len(drawn) < 0.9
    assert not [fault for scenario in others for fault in scenario.faults.all if isinstance(fault, LayoutRequest)]
    assert [random_scenario(s.seed, reshaping=True) for s in drawn if s.steps > 4] == [s for s in drawn if s.steps > 4]


def test_without_checkpoints_at_most_one_node_is_lost_and_there_are_several_pipelines() -> None:
    bare = [scenario for scenario in DRAWN if "checkpoints" not in scenario.features]
    assert {sum(len(fault.nodes) for fault in lost(scenario)) for scenario in bare} == {0, 1}
    requests = [f for scenario in bare for f in scenario.faults.all if isinstance(f, LayoutRequest)]
    assert min(len(parse_depths(request.layout)) for request in requests) == 2
    assert min(scenario.pipelines for scenario in bare) == 2


def test_with_checkpoints_faults_come_after_the_first_one_and_some_node_is_left() -> None:
    kept = [scenario for scenario in DRAWN if "checkpoints" in scenario.features]
    steps = [f.step for s in kept for f in lost(s) if f.step is not None]
    assert min(steps) == 3
    nodes = {s.seed: s.pipelines * s.stages - sum(len(f.nodes) for f in lost(s)) for s in kept}
    assert min(nodes.values()) == 2
    assert max(sum(len(f.nodes) for f in lost(s)) for s in kept) > 2


def test_senders_receivers_and_joining_nodes_get_every_kind_of_fault() -> None:
    node_faults = [
        fault
        for scenario in DRAWN
        for fault in scenario.faults.all
        if isinstance(fault, NodeFault) and fault.call_name not in PLATFORM_FAULTS
    ]
    for moment in ("layers_sent", "layers_received", "adopt", "inventory"):
        assert {fault.call_name for fault in node_faults if fault.at == moment} >= {
            "kill",
            "warn",
            "pause",
            "partition",
            "outage",
        }
    newcomers = [f for s in DRAWN for f in lost(s) if max(f.nodes) >= s.pipelines * s.stages]
    assert newcomers
    assert any(isinstance(fault, JoinNodes) and fault.count > 1 for fault in node_faults)
    assert {scenario.reconfigure for scenario in DRAWN} == {"cost", "bamboo", "never"}
    assert {len(scenario.zones) for scenario in DRAWN} == {0, 2, 3}


@pytest.mark.parametrize("moment", ["layers_sent", "layers_received", "adopt", "inventory"])
def test_shapes_do_change_and_faults_strike_while_they_do(moment: str) -> None:
    """Whether a moment comes depends on the other faults of a scenario: of the short ones with a fault at this moment,
    the first in which it comes shows it."""
    short = (scenario for scenario in DRAWN if scenario.steps == 8 and has_fault_at(scenario, moment))
    outcomes = (run_scenario(scenario) for scenario in itertools.islice(short, 8))
    struck = next((each for each in outcomes if each.reshape_count and coverage([each])["moment"].get(moment)), None)
    assert struck is not None
    assert struck.failure == ""


def test_templates_are_among_the_strategies_of_runs_whose_shape_changes() -> None:
    assert {"templates", "reroute", "shadow"} <= {scenario.strategy for scenario in DRAWN}


@functools.cache
def plain() -> Job:
    return make_job((), True, 4, 6)


@pytest.mark.parametrize("silence", [True, False], ids=["with what it had sent", "alone"])
@pytest.mark.parametrize("node", range(4))
def test_a_node_may_be_lost_as_soon_as_it_has_given_its_layers_away(node: int, silence: bool) -> None:
    """If its sent messages are lost with it, others wait for layers that never arrive."""
    faults = Faults().request_layout("1x4", step=1).kill(node, at="layers_sent", silence=silence)
    run = run_with_faults(plain(), faults, pipelines=2, stages=2, strategy="reroute")
    assert run.summary["preemptions"] == 1


def test_a_worker_that_received_layers_but_ran_none_completes_a_step_with_the_others() -> None:
    """Batch norm: the statistics of forwards are part of the sums, and this worker does not know their number."""
    faults = Faults().request_layout("2+1+1", node=0, step=5, nth=4).request_layout("3+2+2+2", node=0, step=2, nth=4)
    faults = faults.kill(0, at="layers_received", silence=True).pause(2, at="inventory", seconds=0.302)
    scenario = Scenario(
        seed=7280,
        features=("batch norm", "clip"),
        exact=True,
        micro_batches=4,
        pipelines=2,
        stages=2,
        schedule="zb",
        strategy="shadow-lazy",
        faults=faults.pause(1, at="layers_received", seconds=0.92),
        steps=10,
        reconfigure="never",
        zones=("a", "b", "c"),
    )
    assert run_scenario(scenario).failure == ""


def test_a_layout_request_prints_as_code() -> None:
    faults = Faults().request_layout("3+2", node=1, step=2, nth=3)
    assert eval(str(faults), {"Faults": Faults}) == faults
