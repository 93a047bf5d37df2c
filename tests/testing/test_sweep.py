"""The sweep: kill each node at each of its actions, under every strategy that survives: the same is learned.

A job of 2 pipelines x 3 stages, killed in its second step, or in its first where sums need not be exact; three steps
follow. The truth is one process. In other shapes, and where several are lost, strategies take turns: together they meet
every moment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import pytest
import torch
from tests.known import hasty, ready, truth
from torch import nn

from culm.cluster.blows import Blow
from culm.cluster.setup import STRATEGIES, Setup
from culm.job import Job
from culm.schedule import Plan
from culm.testing import Faults
from culm.testing.cluster import Simulated
from culm.testing.survive import endure

from .jobs import job

pytestmark = pytest.mark.skipif("shadow" not in STRATEGIES, reason="no strategy survives a loss yet")
SURVIVING = ("shadow", "shadow-lazy", "reroute")
SCHEDULES = ("1f1b", "zb")
HASTY = "1f1b in haste"
"""Gradients that others wait for go on before the weights are done: the last backwards come in halves."""
STEP = 1
T = TypeVar("T")


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """In one call of torch: there are a thousand runs."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@functools.cache
def described(exact: bool = True) -> Job:
    """Four layers, so that a stage has one of them or two."""
    return job(steps=(STEP if exact else 0) + 4, exact=exact, optimizer=adamw)


@functools.cache
def prepared(pipelines: int, stages: int, schedule: str, strategy: str, exact: bool) -> Setup:
    plain = "1f1b" if schedule == HASTY else schedule
    made = ready(described(exact), pipelines=pipelines, stages=stages, schedule=plain, strategy=strategy)
    return hasty(made) if schedule == HASTY else made


def survive(faults: Faults, setup: Setup, exact: bool) -> Simulated:
    run = endure(described(exact), setup, faults, 0, truth(described(exact)))
    assert not run.missed(faults), f"{faults} was to strike, and {run.missed(faults)} did not"
    assert run.summary["preemptions"] == sum(len(fault.nodes) for fault in faults.all if isinstance(fault, Blow))
    return run


def moments(setup: Setup, node: int) -> Iterator[str]:
    """All that a node does in a step, and that the leader commits it."""
    for action in Plan.from_text(setup.plan).workers[node]:
        yield str(action)
        if str(action).endswith("S"):
            yield f"{action}+"
    if node == 0:
        yield "commit"


def in_turn(strategy: str, all_moments: Iterable[T], of: int = 3) -> list[T]:
    """Every third of the moments, or every second: strategies begin with different ones."""
    return list(all_moments)[SURVIVING.index(strategy) % of :: of]


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("node", range(6))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_node_killed_at_any_of_its_actions_changes_nothing_that_is_learned(
    strategy: str, schedule: str, node: int, exact: bool
) -> None:
    setup = prepared(2, 3, schedule, strategy, exact)
    for at in moments(setup, node):
        survive(Faults().kill(node, at=at, step=STEP if exact else 0), setup, exact)


@pytest.mark.parametrize("node", range(3))
@pytest.mark.parametrize("schedule", [HASTY, "zb"])
@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
def test_one_pipeline_alone_survives_by_its_shadows(strategy: str, schedule: str, node: int) -> None:
    setup = prepared(1, 3, schedule, strategy, True)
    for at in in_turn(strategy, moments(setup, node), of=2):
        survive(Faults().kill(node, at=at, step=STEP), setup, True)


@pytest.mark.parametrize("schedule", [HASTY, "zb"])
@pytest.mark.parametrize("strategy", SURVIVING)
def test_three_pipelines_survive_too(strategy: str, schedule: str) -> None:
    """Of each of the three: the first stage of one, the last of another."""
    setup = prepared(3, 2, schedule, strategy, True)
    for node in (0, 3, 4):
        for at in in_turn(strategy, moments(setup, node)):
            survive(Faults().kill(node, at=at, step=STEP), setup, True)


@pytest.mark.parametrize(("schedule", "pair"), list(zip(SCHEDULES * 2, [(0, 1), (1, 2), (4, 5), (2, 3)], strict=True)))
@pytest.mark.parametrize("strategy", SURVIVING)
def test_neighbours_may_be_lost_together(strategy: str, schedule: str, pair: tuple[int, int]) -> None:
    """Also across the end of a pipeline, and with all that they had sent."""
    setup = prepared(2, 3, schedule, strategy, True)
    for number, at in enumerate(in_turn(strategy, moments(setup, pair[0]))):
        survive(Faults().kill(pair, at=at, step=STEP, silence=number % 2 == 1), setup, True)


@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_whole_pipeline_may_be_lost_at_once(strategy: str) -> None:
    setup = prepared(2, 3, "1f1b", strategy, True)
    for pipeline in ((0, 1, 2), (3, 4, 5)):
        for at in in_turn(strategy, moments(setup, pipeline[1])):
            survive(Faults().kill(pipeline, at=at, step=STEP), setup, True)


@pytest.mark.parametrize("moment", ["standing", "adopt"])
@pytest.mark.parametrize(("second", "first_at_its"), [(0, "beginning"), (2, "end"), (3, "beginning"), (5, "end")])
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_second_node_may_be_lost_during_the_recovery_from_the_first(
    strategy: str, second: int, first_at_its: str, moment: str
) -> None:
    """At its report of what it has, and when it is about to take the new epoch over, the leader included. Schedules
    take turns: each meets both moments, the leader, and a first loss at the beginning and at the end."""
    schedule = SCHEDULES[(second % 3 // 2 + (second >= 3) + (moment == "adopt") + SURVIVING.index(strategy)) % 2]
    setup = prepared(2, 3, schedule, strategy, True)
    nth = 2 if moment == "adopt" else 1  # the first epoch is adopted, too
    at = "1F0" if first_at_its == "beginning" else "1R" if schedule == "zb" else "1S+"
    survive(Faults().kill(1, at=at, step=STEP).kill(second, at=moment, nth=nth), setup, True)


@pytest.mark.parametrize("second", [0, 3])
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_second_node_may_be_lost_while_the_step_is_done_again(strategy: str, second: int) -> None:
    setup = prepared(2, 3, "1f1b", strategy, True)
    for nth in in_turn(strategy, range(1, 8)):
        survive(Faults().kill(1, at="1B1", step=STEP).kill(second, step=STEP + 1, nth=nth), setup, True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", SURVIVING)
def test_a_node_that_falls_silent_for_too_long_is_lost_and_what_it_says_later_is_not_heard(
    strategy: str, schedule: str
) -> None:
    setup = prepared(2, 3, schedule, strategy, True)
    for node, hurt in ((0, Faults().pause), (4, Faults().partition)):
        for at in in_turn(strategy, moments(setup, node))[::2]:
            survive(hurt(node, at=at, step=STEP, seconds=2.5), setup, True)
