from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks.resilience import FULL, QUICK, STRATEGIES, Effort, Result, pause, run, shape, spread, table
from rich.console import Console

from culm.cluster.blows import Kill
from culm.schedule import generate

if TYPE_CHECKING:
    from benchmarks.job import Cut, GPTSpec

STEP_S = {"none": 0.1, "reroute": 0.1, "shadow-lazy": 0.105, "shadow": 0.11}
HELD_UP_S = 0.35


class Fake:
    """A factory of runs whose steps take the time of their strategy; one with a kill is held up in the hit step."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int, int]] = []
        self.kills: list[str] = []
        self.open = 0

    def __call__(self, spec: GPTSpec, cut: Cut, schedule: str, **more: Any) -> FakeRun:
        del spec, schedule
        self.open += 1
        self.started.append((more["strategy"], more["pipelines"], len(cut)))
        self.kills += more.get("kills", ())
        return FakeRun(self, STEP_S[more["strategy"]], bool(more.get("kills")))


class FakeRun:
    def __init__(self, factory: Fake, step_s: float, killed: bool) -> None:
        self.factory, self.step_s, self.killed = factory, step_s, killed
        self.summary: dict[str, Any] = {}
        self.ended_at: list[float] = []

    def round(self, steps: int) -> float:
        for step in range(len(self.ended_at), len(self.ended_at) + steps):
            took = self.step_s + (HELD_UP_S if self.killed and step == 4 else 0.0)
            self.ended_at.append((self.ended_at[-1] if self.ended_at else 0.0) + took)
        return steps * self.step_s

    def close(self) -> None:
        self.factory.open -= 1
        self.summary = {
            "memory": {"kept_bytes": 4_000_000, "peak_rss_bytes": 700_000_000},
            "bubble_share": 0.5,
            "recoveries": [{"detect_ms": 12.0}],
        }


@pytest.fixture
def found() -> Result:
    return run(Fake(), quick=True)


def test_the_overhead_is_what_a_step_takes_longer_than_under_none(found: Result) -> None:
    assert {n: c["overhead"] for n, c in found["strategies"].items()} == pytest.approx(
        {"reroute": 0.0, "shadow-lazy": 0.05, "shadow": 0.1}
    )
    assert found["strategies"]["shadow"]["overhead_ci"] == pytest.approx([0.1, 0.1])


def test_the_pause_is_what_the_hit_step_takes_longer_than_the_others(found: Result) -> None:
    for name, cost in found["strategies"].items():
        assert cost["pause_s"] == pytest.approx(HELD_UP_S)
        assert cost["pause_steps"] == pytest.approx(HELD_UP_S / STEP_S[name])
    assert found["detect_ms"] == {"median": 12.0, "p90": 12.0, "max": 12.0}


def test_the_result_is_the_json_that_was_promised(found: Result) -> None:
    again = json.loads(json.dumps(found))
    assert again.keys() >= {"strategies", "detect_ms", "compute", "cores", "workers"}
    assert again["compute"] == "real"
    promised = {"overhead", "overhead_ci", "vs_undisturbed", "vs_checkpoint", "bubble_share"}
    promised |= {"pause_steps", "pause_bound_steps", "pause_s"}
    assert all(cost.keys() >= promised for cost in again["strategies"].values())
    assert set(again["strategies"]) == set(STRATEGIES)


def test_both_sides_take_turns_in_being_started_first_and_none_is_left_open() -> None:
    fake = Fake()
    run(fake, effort=Effort(jobs=QUICK.jobs, rounds=4, starts=2, round_s=0.1, kills=0))
    assert [name for name, _, _ in fake.started[:4]] == ["none", "reroute", "reroute", "none"]
    assert fake.open == 0


def test_there_is_a_core_for_each_worker_where_there_are_two() -> None:
    for cores in (2, 4, 8, 16):
        for name in STRATEGIES:
            pipelines, stages = shape(name, cores)
            assert pipelines * stages <= cores
            assert pipelines > 1 if name == "reroute" else stages > 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("effort", [FULL, QUICK], ids=["full", "quick"])
def test_every_kill_of_the_bench_is_at_an_action_that_its_node_runs(strategy: str, effort: Effort) -> None:
    fake = Fake()
    for cores in (2, 4, 16):
        pipelines, stages = shape(strategy, cores)
        plan = generate("1f1b", pipelines=pipelines, stages=stages, micro_batches=effort.spec.micro_batches)
        fake.kills.clear()
        for number in range(pipelines * stages):
            pause(fake, effort, strategy, pipelines, stages, number)
        for kill in fake.kills:
            Kill.parse(kill).settled(plan, steps=6)


def test_the_spread_of_nothing_is_nothing_and_of_one_is_that() -> None:
    assert spread([]) == {"median": None, "p90": None, "max": None}
    assert spread([3.0]) == {"median": 3.0, "p90": 3.0, "max": 3.0}


def test_the_table_has_a_line_for_each_strategy(found: Result) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(table(found))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in shown for name in STRATEGIES)
    assert "+10.0%" in shown
    assert "700 MB" in shown
