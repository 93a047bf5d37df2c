"""Nodes that come and go as a market had them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm import Job
from culm.api import pickled
from culm.cli.display import Display
from culm.cli.launch import launch
from culm.cluster.setup import Request
from culm.errors import UsageError
from culm.market import Event, Trace, read_trace
from culm.providers.local import LocalNursery
from culm.providers.rental import Market, Rental, rent
from culm.providers.trace import replay
from culm.testing import reference, run_virtual
from culm.testing.loop import VirtualClock

from .jobs import Nap, job

if TYPE_CHECKING:
    from culm.providers.run import LocalRun

STEPS = 40
P3 = Path(__file__).parents[2] / "../shared/traces/bamboo/p3-trace.csv"


def market(*events: tuple[float, str, str]) -> Trace:
    made = tuple(Event(t, "add" if kind == "+" else "remove", node, "z") for t, kind, node in events)
    return Trace(made, made[-1].t)


def told(events: tuple[Event, ...]) -> list[str]:
    return [f"{event.t:g} {'+' if event.kind == 'add' else '-'}{event.node}" for event in events]


def test_a_run_begins_when_the_market_has_as_many_nodes_as_it_wants() -> None:
    rental = rent(market((0, "+", "a"), (60, "+", "b"), (120, "+", "c"), (180, "-", "a")), 2)
    assert [event.node for event in rental.first] == ["a", "b"]
    assert rental.begins_s == 60
    assert told(rental.moves) == ["120 -a", "120 +c"]


def test_who_is_taken_away_is_replaced_when_somebody_comes() -> None:
    rental = rent(market((0, "+", "a"), (0, "+", "b"), (60, "-", "a"), (90, "+", "c")), 2, speedup=30)
    assert told(rental.moves) == ["2 -a", "3 +c"]


def test_nobody_is_rented_beyond_what_is_wanted() -> None:
    rental = rent(market((0, "+", "a"), (0, "+", "b"), (10, "+", "c"), (20, "-", "c"), (30, "-", "b")), 2)
    assert told(rental.moves) == ["30 -b"]


def test_a_machine_that_goes_and_comes_back_in_one_moment_is_another_one() -> None:
    rental = rent(market((0, "+", "a"), (60, "-", "a"), (60, "+", "a")), 1)
    assert told(rental.moves) == ["60 -a", "60 +a"]


def test_the_share_of_the_nodes_is_the_mean_over_time() -> None:
    rental = rent(market((0, "+", "a"), (0, "+", "b"), (10, "-", "a"), (30, "+", "c")), 2)
    assert rental.share(10) == 1.0
    assert rental.share(20) == pytest.approx(0.75)
    assert rental.share(40) == pytest.approx(0.75)
    assert rental.share(0) == 1.0


def test_a_market_that_never_has_enough_nodes_is_refused_with_the_number_that_it_has() -> None:
    with pytest.raises(UsageError, match="trace never has 3 nodes at once: use --nodes 2"):
        rent(market((0, "+", "a"), (1, "+", "b")), 3)


class Recorded:
    """Nodes that are only written down: when which came, and went with how much notice."""

    def __init__(self) -> None:
        self.nodes, self.seen, self.clock = self, list[str](), VirtualClock()

    async def begun(self) -> None:
        pass

    async def start(self, zones: list[str]) -> tuple[int]:
        self.seen.append(f"{self.clock.now():g} +")
        return (9,)

    def stop(self, node: int, notice_s: float) -> None:
        self.seen.append(f"{self.clock.now():g} -{node} in {notice_s:g}")


def test_a_notice_comes_in_time_whoever_comes_meanwhile_and_not_before_its_node() -> None:
    first, run = (Event(0, "add", "a"), Event(0, "add", "b")), Recorded()
    moves = (Event(5, "remove", "a"), Event(100, "add", "c"), Event(115, "remove", "c"), Event(120, "remove", "b"))
    run_virtual(replay(Rental(first, moves, 0.0, 30.0), cast("LocalRun", run), run.clock))
    assert run.seen == ["0 -0 in 5", "90 -1 in 30", "100 +", "100 -9 in 15"]


@pytest.mark.parametrize(("option", "fields"), [("--speedup", {"speedup": 0.0}), ("--notice", {"notice_s": -1.0})])
def test_a_speed_or_a_notice_that_is_none_is_refused(option: str, fields: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=option):
        rent(market((0, "+", "a")), 1, **fields)


def test_impossible_events_are_refused_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n1000,remove,b\n")
    with pytest.raises(UsageError, match="removes b, which is not there"):
        read_trace(tmp_path / "trace.csv")


@pytest.mark.skipif(not P3.is_file(), reason="the published traces are not here")
def test_a_published_trace_keeps_a_run_as_full_as_its_market_was() -> None:
    trace = read_trace(P3)
    rental = rent(trace, 24, speedup=60)
    assert len(rental.first) == 24
    assert 0.5 < rental.share((trace.span_s - rental.begins_s) / 60) < 1.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=40), st.integers(1, 4))
def test_a_run_has_what_the_market_has_up_to_what_it_wants(drawn: list[tuple[int, int]], nodes: int) -> None:
    """Whatever comes and goes, and however many at once."""
    there: set[str] = set()
    events, t = [], 0.0
    for wait, number in drawn:
        t, node = t + wait, f"n{number}"
        events.append(Event(t, "remove" if node in there else "add", node))
        there ^= {node}
    trace = Trace(tuple(events), t)
    if max((count.alive for count in trace.counts), default=0) < nodes:
        with pytest.raises(UsageError):
            rent(trace, nodes)
        return
    rental = rent(trace, nodes)
    rented = {event.node for event in rental.first}
    expected = {count.t - rental.begins_s: min(count.alive, nodes) for count in trace.counts}
    for move in rental.moves:
        assert (move.node in rented) == (move.kind == "remove")
        rented ^= {move.node}
    for at, alive in expected.items():
        if at >= 0:
            moved = sum(1 if move.kind == "add" else -1 for move in rental.moves if move.t <= at)
            assert nodes + moved == alive


def described(seconds: float = 0.004) -> Job:
    return job(layers=[partial(Nap, seconds)] * 4, steps=STEPS, exact=True)


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """What is learned where nodes stay, by layers that do not nap."""
    return reference(described(0.0)).state_sha256


@pytest.mark.real
def test_a_replayed_trace_takes_nodes_and_brings_new_ones_and_no_bit_differs(
    nursery: LocalNursery, undisturbed: str, tmp_path: Path
) -> None:
    trace = market((0, "+", "a"), (0, "+", "b"), (0, "+", "c"), (0, "+", "d"), (20, "-", "b"), (40, "+", "e"))
    out = tmp_path / "run"
    request = Request(pipelines=2, stages=2, strategy="reroute", out=str(out))
    summary = launch(
        pickled(described()),
        request,
        Display(),
        prepared=lambda _: None,
        market=Market(trace, speedup=100),
        nursery=nursery,
    )
    assert summary["state_sha256"] == undisturbed
    assert (summary["preemptions"], summary["samples_lost"], summary["samples_duplicated"]) == (1, 0, 0)
    assert 0 < summary["capacity_share"] < 1
    assert summary["ideal_goodput"] > 0
    assert summary["of_ideal"] == summary["goodput"] / summary["ideal_goodput"]
    assert json.loads((out / "summary.json").read_text())["of_ideal"] == summary["of_ideal"]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [e["node"] for e in events if e["kind"] == "lost"] == [1]
    assert [e["members"] for e in events if e["kind"] == "epoch"][-1] == [0, 4, 2, 3]


@pytest.mark.real
def test_a_trace_may_take_a_whole_zone_of_the_nodes_that_the_run_began_with(
    nursery: LocalNursery, undisturbed: str
) -> None:
    """By their numbers nodes 0 and 2 would both hold stage 0, and both are in zone a."""
    there = [Event(0.0, "add", f"n{i}", "ab"[i % 2]) for i in range(4)]
    taken = [Event(20.0, "remove", node, "a") for node in ("n0", "n2")]
    summary = launch(
        pickled(described()),
        Request(pipelines=2, stages=2, strategy="reroute"),
        Display(),
        prepared=lambda _: None,
        market=Market(Trace((*there, *taken), 20.0), speedup=100),
        nursery=nursery,
    )
    assert {each["source"] for each in summary["recoveries"]} == {"peers"}
    assert summary["preemptions"] == 2
    assert summary["state_sha256"] == undisturbed


@pytest.mark.real
def test_a_node_that_a_trace_takes_with_notice_knows_how_long_it_has(
    nursery: LocalNursery, undisturbed: str, tmp_path: Path
) -> None:
    """A notice shorter than a step is handed over in, a longer one is worked in: so it has to be the right one."""
    trace = market((0, "+", "a"), (0, "+", "b"), (0, "+", "c"), (0, "+", "d"), (10, "-", "b"))
    out = tmp_path / "run"
    summary = launch(
        pickled(described()),
        Request(pipelines=2, stages=2, strategy="reroute", out=str(out)),
        Display(),
        prepared=lambda _: None,
        market=Market(trace, speedup=100, notice_s=7.5),
        nursery=nursery,
    )
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [(e["node"], e["seconds"]) for e in events if e["kind"] == "notice"] == [(1, 7.5)]
    assert [(each["lost"], each["source"]) for each in summary["recoveries"]] == [([1], "notice")]
    assert summary["state_sha256"] == undisturbed
