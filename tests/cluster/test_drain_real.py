"""Real SIGTERMs: a node that is told to go hands over what it has and ends well, and the others learn the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from culm import Job
from culm.api import pickled
from culm.cluster.setup import Request, Result
from culm.providers.local import LocalNursery, LocalRun, local_run
from culm.providers.nursery import Exited, Report
from culm.testing import reference

from .jobs import Nap, job

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked")]
PATIENCE_S = 120.0
STEPS = 9


class Watched(LocalNursery):
    """A nursery that remembers how its nodes ended."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: dict[int, int] = {}

    async def report(self) -> Report:
        found = await super().report()
        if isinstance(found, Exited):
            self.statuses[found.node] = found.status
        return found


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    made = Watched()
    with made:
        yield made


def slow(seconds: float = 0.005) -> Job:
    """Layers that take their time, so that there is a middle of a step to be told to go in."""
    return job(layers=[partial(Nap, seconds)] * 4, global_batch=16, steps=STEPS, exact=True)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The weights that are learned where nobody is told to go."""
    return reference(slow(0.0)).weights_sha256


def agents(nursery: LocalNursery) -> list[int]:
    """The processes of the agents, in the order of their nodes."""
    return sorted(map(int, Path(f"/proc/{nursery.pid}/task/{nursery.pid}/children").read_text().split()))


def told_to_go(
    nursery: Watched, who: Callable[[LocalRun], Sequence[int]], *, after: int = 3, **request: Any
) -> tuple[Result, list[int], dict[int, int]]:
    """How a run ends in which SIGTERM is sent to some agents in the midst of a step; these; all statuses."""

    async def main() -> tuple[Result, list[int]]:
        asked = Request(strategy="reroute", **{"pipelines": 2, "stages": 2, **request})
        async with local_run(nursery, pickled(slow()), asked) as run:
            await run.node_up()
            while len(agents(nursery)) < run.setup.nodes:  # the others are being forked
                await asyncio.sleep(0.001)
            for _ in range(after):
                await run.step()
            nodes = list(who(run))
            for pid in [agents(nursery)[node] for node in nodes]:
                os.kill(pid, signal.SIGTERM)
            return await run.result(), nodes

    async def bounded() -> tuple[Result, list[int]]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    nursery.statuses.clear()
    result, nodes = asyncio.run(bounded())
    assert agents(nursery) == []
    return result, nodes, dict(nursery.statuses)


def leader(run: LocalRun) -> int:
    return run.leader or 0


WHO: dict[str, tuple[int, Callable[[LocalRun], Sequence[int]]]] = {
    "a node": (1, lambda run: [1 - leader(run)]),
    "the leader": (1, lambda run: [leader(run)]),
    "two of one pipeline": (2, lambda run: [2, 3] if leader(run) < 2 else [0, 1]),
    "two of other stages, one of them the leader": (2, lambda run: [leader(run), 3 - leader(run)]),
}
"""With the stages of its two pipelines."""


@pytest.mark.parametrize("who", WHO)
def test_a_node_that_is_told_to_go_goes_and_nothing_is_lost_or_redone(
    watched: Watched, undisturbed: str, who: str
) -> None:
    stages, chosen = WHO[who]
    result, nodes, statuses = told_to_go(watched, chosen, stages=stages)
    assert result.summary is not None, result.message
    found = result.summary
    assert found["weights_sha256"] == undisturbed
    assert (found["steps"], found["samples_lost"], found["samples_duplicated"]) == (STEPS, 0, 0)
    recoveries: Any = found["recoveries"]
    assert sorted(node for each in recoveries for node in each["lost"]) == sorted(nodes)
    assert {(each["redone_actions"], each["source"]) for each in recoveries} == {(0, "notice")}
    assert statuses == dict.fromkeys(range(2 * stages), 0)


def test_a_node_that_is_told_to_go_before_the_first_step_is_done_without(watched: Watched, undisturbed: str) -> None:
    result, _, statuses = told_to_go(watched, lambda run: [1], after=0, stages=1)
    assert result.summary is not None, result.message
    assert result.summary["weights_sha256"] == undisturbed
    assert statuses == dict.fromkeys(range(2), 0)


def test_if_all_are_told_to_go_there_is_a_checkpoint_and_the_run_can_be_resumed(
    watched: Watched, undisturbed: str, tmp_path: Path
) -> None:
    result, _, statuses = told_to_go(watched, lambda run: range(4), out=str(tmp_path))
    assert result.error == "NodeLost"
    assert "every node has notice: the run ended before step" in result.message
    assert f"resume it with --resume {tmp_path}" in result.message
    assert statuses == dict.fromkeys(range(4), 0)
    resumed, _, _ = told_to_go(watched, lambda run: [], stages=1, resume=str(tmp_path))
    assert resumed.summary is not None, resumed.message
    assert resumed.summary["weights_sha256"] == undisturbed
