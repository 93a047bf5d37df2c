"""A fixed sample of the sweep on real processes: SIGKILL at the very action, and the same is learned."""

from __future__ import annotations

import asyncio
import functools

import pytest

from culm.api import pickled
from culm.cluster.setup import Request, Result
from culm.errors import UsageError
from culm.job import Job
from culm.providers.local import LocalNursery, local_run
from culm.testing import Trained, reference

from .jobs import job, linear

pytestmark = pytest.mark.real
PATIENCE_S = 60.0
SAMPLE = [
    ("reroute", "1f1b", "node=0 step=1 at=0F0"),
    ("reroute", "1f1b", "node=1 step=1 at=1F1"),
    ("reroute", "1f1b", "node=2 step=1 at=2B0"),
    ("reroute", "1f1b", "node=3 step=1 at=0B3"),
    ("reroute", "1f1b", "node=4 step=1 at=1R"),
    ("reroute", "1f1b", "node=5 step=1 at=2S"),
    ("reroute", "zb", "node=1 step=1 at=1B0"),
    ("reroute", "zb", "node=2 step=1 at=2I1"),
    ("reroute", "zb", "node=3 step=1 at=0S+"),
    ("reroute", "zb", "node=0 step=1 at=0R"),
    ("shadow", "1f1b", "node=0 step=1 at=0B1"),
    ("shadow", "1f1b", "node=1 step=1 at=1S"),
    ("shadow", "1f1b", "node=2 step=1 at=2F1"),
    ("shadow", "1f1b", "node=4 step=1 at=1B2"),
    ("shadow", "zb", "node=5 step=1 at=2W3"),
    ("shadow", "zb", "node=3 step=1 at=0R"),
    ("shadow", "zb", "node=1 step=1"),
    ("shadow-lazy", "1f1b", "node=2 step=1 at=2S+"),
    ("shadow-lazy", "1f1b", "node=3 step=1 at=0F2"),
    ("shadow-lazy", "1f1b", "node=5 step=1 at=2R"),
    ("shadow-lazy", "zb", "node=0 step=1 at=0I0"),
    ("shadow-lazy", "zb", "node=4 step=1 at=1W2"),
    ("shadow-lazy", "zb", "node=1 step=1 at=1F0"),
    ("shadow-lazy", "zb", "node=2 step=1"),
]


@functools.cache
def described() -> Job:
    return job(layers=[linear] * 6, steps=5)


@functools.cache
def truth() -> Trained:
    return reference(described())


def ending(nursery: LocalNursery, request: Request) -> Result:
    async def main() -> Result:
        async with local_run(nursery, pickled(described()), request) as run:
            return await run.result()

    async def bounded() -> Result:
        return await asyncio.wait_for(main(), PATIENCE_S)

    return asyncio.run(bounded())


@pytest.mark.parametrize(("strategy", "schedule", "kill"), SAMPLE)
def test_a_process_killed_at_an_action_changes_nothing_that_is_learned(
    nursery: LocalNursery, strategy: str, schedule: str, kill: str
) -> None:
    request = Request(pipelines=2, stages=3, schedule=schedule, strategy=strategy, kill=(kill,))
    result = ending(nursery, request)
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == truth().state_sha256
    assert result.summary["preemptions"] == 1
    assert result.summary["samples_lost"] == result.summary["samples_duplicated"] == 0


def test_two_processes_killed_one_after_the_other_change_nothing_either(nursery: LocalNursery) -> None:
    kill = ("node=1 step=1 at=1F0", "node=5 step=2 at=2S")
    result = ending(nursery, Request(pipelines=2, stages=3, strategy="reroute", kill=kill))
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == truth().state_sha256
    assert result.summary["preemptions"] == 2


def test_a_kill_that_could_never_happen_is_refused_before_anything_starts(nursery: LocalNursery) -> None:
    with pytest.raises(UsageError, match="node 1 never runs 2F0"):
        ending(nursery, Request(pipelines=2, stages=3, kill=("node=1 step=1 at=2F0",)))
