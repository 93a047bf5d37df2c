"""Nodes that come and go as a market had them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_jobs import Nap, job

from culm import Job
from culm.cli.progress_display import ProgressDisplay
from culm.cli.running.run_launcher import launch_run
from culm.config import RunConfig
from culm.errors import UsageError
from culm.market import MarketTrace, NodeEvent, read_trace
from culm.providers.execute_run import RunResources
from culm.providers.local_provider import ForkServerClient
from culm.providers.trace_market import RentalSchedule, TraceMarket, schedule_rental
from culm.providers.trace_replay import replay_rental
from culm.testing import reference, run_virtual
from culm.testing.virtual_time import VirtualClock
from culm.training import pickle_job

if TYPE_CHECKING:
    from culm.providers.run_handle import RunHandle

STEPS = 40
P3 = Path(__file__).parents[2] / "../shared/traces/bamboo/p3-trace.csv"


def market(*events: tuple[float, str, str]) -> MarketTrace:
    made = tuple(NodeEvent(t, "add" if kind == "+" else "remove", node, "z") for t, kind, node in events)
    return MarketTrace(made, made[-1].t)


def told(events: tuple[NodeEvent, ...]) -> list[str]:
    return [f"{event.t:g} {'+' if event.kind == 'add' else '-'}{event.node}" for event in events]


def test_a_run_begins_when_the_market_has_as_many_nodes_as_it_wants() -> None:
    rental = schedule_rental(market((0, "+", "a"), (60, "+", "b"), (120, "+", "c"), (180, "-", "a")), 2)
    assert [event.node for event in rental.initial_nodes] == ["a", "b"]
    assert rental.trace_start_s == 60
    assert told(rental.changes) == ["120 -a", "120 +c"]


def test_a_preempted_node_is_replaced_when_another_joins() -> None:
    rental = schedule_rental(market((0, "+", "a"), (0, "+", "b"), (60, "-", "a"), (90, "+", "c")), 2, speedup=30)
    assert told(rental.changes) == ["2 -a", "3 +c"]


def test_no_more_nodes_are_rented_than_wanted() -> None:
    rental = schedule_rental(market((0, "+", "a"), (0, "+", "b"), (10, "+", "c"), (20, "-", "c"), (30, "-", "b")), 2)
    assert told(rental.changes) == ["30 -b"]


def test_a_machine_that_is_replaced_at_once_counts_as_another_one() -> None:
    rental = schedule_rental(market((0, "+", "a"), (60, "-", "a"), (60, "+", "a")), 1)
    assert told(rental.changes) == ["60 -a", "60 +a"]


def test_the_share_of_the_nodes_is_the_mean_over_time() -> None:
    rental = schedule_rental(market((0, "+", "a"), (0, "+", "b"), (10, "-", "a"), (30, "+", "c")), 2)
    assert rental.mean_capacity(10) == 1.0
    assert rental.mean_capacity(20) == pytest.approx(0.75)
    assert rental.mean_capacity(40) == pytest.approx(0.75)
    assert rental.mean_capacity(0) == 1.0


def test_a_market_that_never_has_enough_nodes_is_refused_with_the_number_that_it_has() -> None:
    with pytest.raises(UsageError, match="trace never has 3 nodes at once: use --nodes 2"):
        schedule_rental(market((0, "+", "a"), (1, "+", "b")), 3)


class Recorded:
    """Nodes that are only written down: when which came, and went with how much notice."""

    def __init__(self) -> None:
        self.nodes, self.seen, self.clock = self, list[str](), VirtualClock()

    async def wait_for_first_step(self) -> None:
        pass

    async def start(self, zones: list[str]) -> tuple[int]:
        self.seen.append(f"{self.clock.now():g} +")
        return (9,)

    def stop(self, node: int, notice_s: float) -> None:
        self.seen.append(f"{self.clock.now():g} -{node} in {notice_s:g}")


def test_notices_are_given_in_time_and_not_before_their_node_has_joined() -> None:
    first, run = (NodeEvent(0, "add", "a"), NodeEvent(0, "add", "b")), Recorded()
    moves = (
        NodeEvent(5, "remove", "a"),
        NodeEvent(100, "add", "c"),
        NodeEvent(115, "remove", "c"),
        NodeEvent(120, "remove", "b"),
    )
    run_virtual(replay_rental(RentalSchedule(first, moves, 0.0, 30.0), cast("RunHandle", run), run.clock))
    assert run.seen == ["0 -0 in 5", "90 -1 in 30", "100 +", "100 -9 in 15"]


@pytest.mark.parametrize(("option", "fields"), [("--speedup", {"speedup": 0.0}), ("--notice", {"notice_s": -1.0})])
def test_a_speed_or_a_notice_that_is_none_is_refused(option: str, fields: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=option):
        schedule_rental(market((0, "+", "a")), 1, **fields)


def test_impossible_events_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n1000,remove,b\n")
    with pytest.raises(UsageError, match="removes b, which is not present"):
        read_trace(tmp_path / "trace.csv")


@pytest.mark.skipif(not P3.is_file(), reason="the published traces are not here")
def test_a_published_trace_keeps_a_run_as_full_as_its_market_was() -> None:
    trace = read_trace(P3)
    rental = schedule_rental(trace, 24, speedup=60)
    assert len(rental.initial_nodes) == 24
    assert 0.5 < rental.mean_capacity((trace.span_s - rental.trace_start_s) / 60) < 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=40), st.integers(1, 4))
def test_a_run_has_what_the_market_has_up_to_what_it_wants(drawn: list[tuple[int, int]], nodes: int) -> None:
    """Whatever comes and goes, and however many at once."""
    there: set[str] = set()
    events, t = [], 0.0
    for wait, number in drawn:
        t, node = t + wait, f"n{number}"
        events.append(NodeEvent(t, "remove" if node in there else "add", node))
        there ^= {node}
    trace = MarketTrace(tuple(events), t)
    if max((count.alive for count in trace.counts), default=0) < nodes:
        with pytest.raises(UsageError):
            schedule_rental(trace, nodes)
        return
    rental = schedule_rental(trace, nodes)
    rented = {event.node for event in rental.initial_nodes}
    expected = {count.t - rental.trace_start_s: min(count.alive, nodes) for count in trace.counts}
    for move in rental.changes:
        assert (move.node in rented) == (move.kind == "remove")
        rented ^= {move.node}
    for at, alive in expected.items():
        if at >= 0:
            moved = sum(1 if move.kind == "add" else -1 for move in rental.changes if move.t <= at)
            assert nodes + moved == alive


def described(seconds: float = 0.004) -> Job:
    return job(layers=[partial(Nap, seconds)] * 4, steps=STEPS, exact=True)


@pytest.fixture(scope="module")
def failure_free() -> str:
    """What is learned where nodes stay, by layers that do not nap."""
    return reference(described(0.0)).state_sha256


@pytest.mark.real
def test_a_replayed_trace_takes_nodes_and_brings_new_ones_and_no_bit_differs(
    fork_server: ForkServerClient, failure_free: str, tmp_path: Path
) -> None:
    trace = market((0, "+", "a"), (0, "+", "b"), (0, "+", "c"), (0, "+", "d"), (20, "-", "b"), (40, "+", "e"))
    out = tmp_path / "run"
    config = RunConfig(pipelines=2, stages=2, strategy="reroute", out=str(out))
    summary = launch_run(
        pickle_job(described()),
        RunResources(config=config, market=TraceMarket(trace, speedup=100)),
        ProgressDisplay(),
        fork_server=fork_server,
    )
    assert summary["state_sha256"] == failure_free
    assert (summary["preemptions"], summary["samples_lost"], summary["samples_duplicated"]) == (1, 0, 0)
    assert 0 < summary["capacity_share"] < 1
    assert summary["ideal_goodput"] > 0
    assert summary["of_ideal"] == summary["goodput"] / summary["ideal_goodput"] <= 1
    assert json.loads((out / "summary.json").read_text())["of_ideal"] == summary["of_ideal"]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [e["node"] for e in events if e["kind"] == "lost"] == [1]
    assert [e["members"] for e in events if e["kind"] == "epoch"][-1] == [0, 4, 2, 3]


@pytest.mark.real
def test_a_trace_may_take_a_whole_zone_of_the_nodes_that_the_run_began_with(
    fork_server: ForkServerClient, failure_free: str
) -> None:
    """By their numbers nodes 0 and 2 would both hold stage 0, and both are in zone a."""
    there = [NodeEvent(0.0, "add", f"n{i}", "ab"[i % 2]) for i in range(4)]
    taken = [NodeEvent(20.0, "remove", node, "a") for node in ("n0", "n2")]
    summary = launch_run(
        pickle_job(described()),
        RunResources(
            config=RunConfig(pipelines=2, stages=2, strategy="reroute"),
            market=TraceMarket(MarketTrace((*there, *taken), 20.0), speedup=100),
        ),
        ProgressDisplay(),
        fork_server=fork_server,
    )
    assert {each["source"] for each in summary["recoveries"]} == {"peers"}
    assert summary["preemptions"] == 2
    assert summary["state_sha256"] == failure_free


@pytest.mark.real
def test_a_node_that_a_trace_removes_with_notice_gets_the_time_left(
    fork_server: ForkServerClient, failure_free: str, tmp_path: Path
) -> None:
    """A notice shorter than a step is handed over in, a longer one is worked in: so it has to be the right one."""
    trace = market((0, "+", "a"), (0, "+", "b"), (0, "+", "c"), (0, "+", "d"), (10, "-", "b"))
    out = tmp_path / "run"
    summary = launch_run(
        pickle_job(described()),
        RunResources(
            config=RunConfig(pipelines=2, stages=2, strategy="reroute", out=str(out)),
            market=TraceMarket(trace, speedup=100, notice_s=7.5),
        ),
        ProgressDisplay(),
        fork_server=fork_server,
    )
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [(e["node"], e["seconds"]) for e in events if e["kind"] == "notice"] == [(1, 7.5)]
    assert [(each["lost"], each["source"]) for each in summary["recoveries"]] == [([1], "notice")]
    assert summary["state_sha256"] == failure_free
