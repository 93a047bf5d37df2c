"""Random runs whose shape changes on the way: what is drawn can be survived, and strikes in the midst of the change."""

from __future__ import annotations

import functools

import pytest
from tests.known import hurt

from culm import Job
from culm.cluster.blows import Blow, Join, Kill, Partition, Pause, Warn
from culm.plan.relayout import parse
from culm.testing import Faults
from culm.testing.chaos import Scenario, covered, draw, face, job_of
from culm.testing.cluster import LEASE_S
from culm.testing.faults import Wish

DRAWN = [draw(seed, changing=True) for seed in range(300)]


def lost(scenario: Scenario) -> list[Blow]:
    """The faults that nodes are lost by."""
    lethal = [f for f in scenario.faults.all if isinstance(f, Kill | Warn | Pause | Partition)]
    return [f for f in lethal if not isinstance(f, Pause | Partition) or f.seconds > LEASE_S]


def test_most_runs_are_what_they_would_be_without_those_whose_shape_changes() -> None:
    drawn = [draw(seed) for seed in range(200)]
    others = [scenario for scenario in drawn if scenario.steps == 4]
    assert 0.6 < len(others) / len(drawn) < 0.9
    assert not [fault for scenario in others for fault in scenario.faults.all if isinstance(fault, Wish)]
    assert [draw(s.seed, changing=True) for s in drawn if s.steps > 4] == [s for s in drawn if s.steps > 4]


def test_without_a_checkpoint_one_node_is_lost_at_the_most_and_no_pipeline_is_alone() -> None:
    bare = [scenario for scenario in DRAWN if "checkpoints" not in scenario.features]
    assert {sum(len(fault.nodes) for fault in lost(scenario)) for scenario in bare} == {0, 1}
    wishes = [f for scenario in bare for f in scenario.faults.all if isinstance(f, Wish)]
    assert min(len(parse(wish.layout)) for wish in wishes) == 2
    assert min(scenario.pipelines for scenario in bare) == 2


def test_with_checkpoints_nothing_happens_before_the_first_and_somebody_is_always_left() -> None:
    kept = [scenario for scenario in DRAWN if "checkpoints" in scenario.features]
    steps = [f.step for s in kept for f in s.faults.all if isinstance(f, Blow) and f.step is not None]
    assert min(steps) == 3
    nodes = {s.seed: s.pipelines * s.stages - sum(len(f.nodes) for f in lost(s)) for s in kept}
    assert min(nodes.values()) == 2
    assert max(sum(len(f.nodes) for f in lost(s)) for s in kept) > 2


def test_givers_takers_and_newcomers_are_struck_with_every_word() -> None:
    blows = [fault for scenario in DRAWN for fault in scenario.faults.all if isinstance(fault, Blow)]
    for moment in ("given", "moved", "adopt", "standing"):
        assert {blow.word for blow in blows if blow.at == moment} == {"kill", "warn", "pause", "partition", "outage"}
    newcomers = [f for s in DRAWN for f in lost(s) if max(f.nodes) >= s.pipelines * s.stages]
    assert newcomers
    assert any(isinstance(blow, Join) and blow.count > 1 for blow in blows)
    assert {scenario.reconfigure for scenario in DRAWN} == {"cost", "bamboo", "never"}
    assert {len(scenario.zones) for scenario in DRAWN} == {0, 2, 3}


def test_shapes_do_change_and_faults_strike_while_they_do() -> None:
    """A few of the shortest show it already."""
    short = [scenario for scenario in DRAWN if scenario.steps == 8][:6]
    counts = covered([face(scenario) for scenario in short])
    assert sum(times for changes, times in counts["changes of shape"].items() if changes != "0") > 3
    assert {"given", "moved", "adopt", "standing"} <= counts["moment"].keys()
    assert counts["strategy"]["templates"] > 1


@functools.cache
def plain() -> Job:
    return job_of((), True, 4, 6)


@pytest.mark.parametrize("silence", [True, False], ids=["with what it had sent", "alone"])
@pytest.mark.parametrize("node", range(4))
def test_a_node_may_be_lost_as_soon_as_it_has_given_its_layers_away(node: int, silence: bool) -> None:
    """Where what it had sent goes with it, others wait for layers that never come."""
    faults = Faults().wish("1x4", step=1).kill(node, at="given", silence=silence)
    run = hurt(plain(), faults, pipelines=2, stages=2, strategy="reroute")
    assert run.summary["preemptions"] == 1


def test_who_took_layers_and_ran_nothing_of_them_yet_completes_a_step_with_the_others() -> None:
    """Batch norm: what its forwards record is part of the sums, and this one does not know how much that is."""
    faults = Faults().wish("2+1+1", node=0, step=5, nth=4).wish("3+2+2+2", node=0, step=2, nth=4)
    faults = faults.kill(0, at="moved", silence=True).pause(2, at="standing", seconds=0.302)
    scenario = Scenario(
        seed=7280,
        features=("batch norm", "clip"),
        exact=True,
        micro_batches=4,
        pipelines=2,
        stages=2,
        schedule="zb",
        strategy="shadow-lazy",
        faults=faults.pause(1, at="moved", seconds=0.92),
        steps=10,
        reconfigure="never",
        zones=("a", "b", "c"),
    )
    assert face(scenario).failure == ""


def test_a_wish_says_itself_as_code() -> None:
    faults = Faults().wish("3+2", node=1, step=2, nth=3)
    assert eval(str(faults), {"Faults": Faults}) == faults
