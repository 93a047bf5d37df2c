"""The norms of a segment reach every worker once, and no worker sends many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_jobs import job

from culm.runtime import norm_routes
from culm.runtime.norm_routes import next_receivers
from culm.testing import Faults, reference, simulate


def all_routes(
    runners: Sequence[int], receivers: Collection[int], stages: int, slots: int
) -> Mapping[int, Collection[int]]:
    return {slot: next_receivers(slot, runners, receivers, stages) for slot in range(slots)}


def reached(runners: Sequence[int], routes: Mapping[int, Collection[int]]) -> Counter[int]:
    """How often each slot gets the norms, if every slot sends them on once it has them."""
    counts: Counter[int] = Counter()
    waiting, done = [runners[0]], set[int]()
    while waiting:
        slot = waiting.pop()
        if slot in done:
            continue
        done.add(slot)
        to = [at for at in routes[slot] if at != slot]
        counts.update(to)
        waiting.extend(to)
    return counts


@given(
    pipelines=st.integers(1, 12),
    stages=st.integers(1, 6),
    stage=st.integers(0, 5),
    data=st.data(),
)
def test_every_receiver_gets_the_norms_exactly_once(
    pipelines: int, stages: int, stage: int, data: st.DataObject
) -> None:
    """Also with failed slots, and workers that run the segment beside their own."""
    slots = pipelines * stages
    failed = data.draw(st.sets(st.integers(0, slots - 1), max_size=slots // 3))
    staying = [slot for slot in range(slots) if slot not in failed]
    peers = [slot for slot in staying if slot % stages == stage % stages]
    extra = data.draw(st.sets(st.sampled_from(staying), max_size=2)) if staying else set()
    runners = sorted({*peers, *extra})
    if not runners:
        return
    counts = reached(runners, all_routes(runners, staying, stages, slots))
    assert counts == Counter(slot for slot in staying if slot != runners[0])


def test_in_a_large_cluster_no_worker_sends_more_than_a_frame_for_each_pipeline_and_stage() -> None:
    runners = range(3, 1024, 16)
    routes = all_routes(runners, range(1024), 16, 1024)
    assert max(len(to) for to in routes.values()) == 63 + 15
    assert len(routes[19]) == 15
    assert routes[4] == ()


MOMENTS = {"B1": 0, "R": 2, "S": 0, "S+": 2}
"""Moments of losses, and the node that is lost: a worker of the first pipeline, which sends norms, or of the second,
which forwards them."""


@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
@pytest.mark.parametrize("at", ["", *MOMENTS])
def test_forwarded_norms_do_not_change_a_bit(strategy: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_routes, "MOST_DIRECT", 0)
    clipped = job(clip_norm=0.05, exact=True, global_batch=12)
    faults = Faults()
    if at:
        node = MOMENTS[at]
        faults = faults.kill(node, at=f"{node % 2}{at}", step=1)
    result = simulate(clipped, faults=faults, pipelines=3, stages=2, strategy=strategy, suspect_after=2.0)
    assert result.state_sha256 == reference(clipped).state_sha256
    assert result.summary["preemptions"] == (1 if at else 0)
