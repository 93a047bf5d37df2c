"""Planning leaves no garbage. What a real leader plans is exempted from garbage collection as soon as it is planned, so
that objects that refer to each other would stay for good, with every loss more of them."""

from __future__ import annotations

import collections
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from tests.tiny_jobs import job

from culm.cluster.leader import planning_calls
from culm.cluster.leader.planning_calls import PlanningCalls
from culm.testing import Faults
from culm.testing.simulated_cluster import simulate


@pytest.fixture
def garbage(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """The garbage of all plans of the test, by type, and the number of calls by name."""
    found: collections.Counter[str] = collections.Counter()

    def watch(owner: Any, name: str) -> None:
        plan = getattr(owner, name)

        def plan_and_count(*args: Any) -> Any:
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                planned = plan(*args)
                if isinstance(planned, Iterator):
                    planned = iter([*planned])
                gc.collect()
            finally:
                gc.set_debug(0)
                found.update(type(each).__qualname__ for each in gc.garbage)
                gc.garbage.clear()
            found[f"calls of {name}"] += 1
            return planned

        monkeypatch.setattr(owner, name, plan_and_count)

    watch(PlanningCalls, "_plan_recovery")
    watch(PlanningCalls, "_plan_reshape")
    watch(planning_calls, "surviving_cluster")
    watch(planning_calls, "precompute_next_plans")
    yield found
    gc.garbage.clear()


@pytest.mark.parametrize(
    ("request_", "faults"),
    [
        ({"strategy": "reroute", "reconfigure": "never"}, Faults().kill(3, step=1, nth=3).warn(1, step=3, seconds=5.0)),
        ({"strategy": "shadow", "reconfigure": "never"}, Faults().kill(3, step=1, nth=3).join(4, step=2)),
        ({"strategy": "reroute", "reconfigure": "bamboo"}, Faults().kill((2, 3), step=2)),
        ({"strategy": "templates"}, Faults().kill(3, step=2)),
    ],
    ids=["reroute", "shadow", "reshape", "templates"],
)
def test_plans_leave_no_garbage(garbage: collections.Counter[str], request_: dict[str, Any], faults: Faults) -> None:
    simulate(job(steps=6), pipelines=2, stages=2, faults=faults, cost=lambda *_: 0.01, latency=0.001, **request_)
    calls = {name: garbage.pop(name) for name in [*garbage] if name.startswith("calls of ")}
    assert sum(calls.values()) > 0
    assert garbage == {}
