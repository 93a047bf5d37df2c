from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benchmarks.computed import SPEC, Computed
from benchmarks.detection import detected, spread, took
from benchmarks.emulated import Emulated, Nap
from benchmarks.lanes import Lanes
from benchmarks.resilience_losses import Ran, Scene, under_losses, undisturbed
from benchmarks.resilience_overhead import STRATEGIES as MEASURED
from benchmarks.resilience_overhead import overhead, shape
from benchmarks.resilience_pause import HIT, STEPS, late
from benchmarks.resilience_plan import ORDER, QUICK, STRATEGIES
from benchmarks.resilience_result import Cost, Result, table
from rich.console import Console

from benchmarks import detection, resilience_pause, slow
from culm.api import pickled
from culm.checkpoint import Storage
from culm.cluster.setup import STRATEGIES as ABLE
from culm.cluster.setup import Request
from culm.providers.local import LocalNursery, local_run
from culm.testing import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.job import Cut, GPTSpec

STEP_S = {"none": 0.1, "reroute": 0.1, "shadow-lazy": 0.105, "shadow": 0.11}
SCENE = Scene(pipelines=2, stages=2, each=2, unit_s=0.004, steps=12, loss_every=6.0, back_after=3.0)


class Fake:
    """A factory of runs whose steps take the time of their strategy."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.rounds: list[tuple[float, tuple[int, ...]]] = []
        self.open = 0

    def __call__(self, spec: GPTSpec, cut: Cut, schedule: str, **more: Any) -> FakeRun:
        del spec, cut, schedule
        self.open += 1
        self.started.append(more["strategy"])
        return FakeRun(self, STEP_S[more["strategy"]])


class FakeRun:
    def __init__(self, factory: Fake, step_s: float) -> None:
        self.factory, self.step_s = factory, step_s
        self.cores: tuple[int, ...] = ()
        self.summary: dict[str, Any] = {}

    def round(self, steps: int) -> float:
        self.factory.rounds.append((self.step_s, self.cores))
        return steps * self.step_s

    def move(self, cores: Sequence[int]) -> None:
        self.cores = tuple(cores)

    def close(self) -> None:
        self.factory.open -= 1
        self.summary = {"memory": {"kept_bytes": 4_000_000}, "bubble_share": 0.5}


@pytest.mark.parametrize("strategy", MEASURED)
def test_the_overhead_is_what_a_step_takes_longer_than_under_none(strategy: str) -> None:
    found = overhead(Fake(), QUICK.effort, strategy, 2, 2)
    assert found["overhead"] == pytest.approx(STEP_S[strategy] / STEP_S["none"] - 1)
    assert found["overhead_ci"] == pytest.approx([found["overhead"]] * 2)


def test_where_there_are_cores_for_both_they_run_at_the_same_time_and_change_places() -> None:
    fake = Fake()
    found = overhead(fake, replace(QUICK.effort, rounds_together=8, starts=2), "shadow", 1, 2, cores=range(5))
    assert found["together"]
    assert found["rounds"] == 8
    assert found["overhead"] == pytest.approx(STEP_S["shadow"] / STEP_S["none"] - 1)
    moved = [where for step_s, where in fake.rounds if where and step_s == STEP_S["none"]]
    assert set(moved) == {(0, 1), (2, 3)}
    assert all(before != after for before, after in pairwise(moved[:5]))
    assert not overhead(fake, QUICK.effort, "shadow", 1, 2, cores=range(3))["together"]


def test_both_sides_take_turns_in_being_started_first_and_none_is_left_open() -> None:
    fake = Fake()
    overhead(fake, replace(QUICK.effort, rounds=4, starts=2), "reroute", 2, 1)
    assert fake.started == ["none", "reroute", "reroute", "none"]
    assert fake.open == 0


def test_there_is_a_core_for_each_worker_where_there_are_two() -> None:
    for cores in (2, 4, 8, 16):
        for name in MEASURED:
            pipelines, stages = shape(name, cores)
            assert pipelines * stages <= cores
            assert pipelines > 1 if name == "reroute" else stages > 1


def test_every_strategy_of_this_version_but_none_is_left_out() -> None:
    assert set(STRATEGIES) == set(ABLE) & set(ORDER) == set(ABLE)


def test_losses_come_at_their_interval_and_each_node_is_back_after_its_while() -> None:
    moves = SCENE.losses(0.5).moves
    removed = {move.node: move.t for move in moves if move.kind == "remove"}
    added = [move.t for move in moves if move.kind == "add"]
    assert [round(t / 0.5 / 6.0 - 0.5) for t in removed.values()] == list(range(len(removed)))
    assert added == pytest.approx([t + 1.5 for t in removed.values()])


def test_whom_the_losses_take_is_there_and_every_strategy_gets_the_same() -> None:
    losses = SCENE.losses(1.0)
    there = {event.node for event in losses.first}
    for move in losses.moves:
        assert (move.node in there) == (move.kind == "remove")
        there ^= {move.node}
        assert SCENE.nodes - 1 <= len(there) <= SCENE.nodes
    assert losses == SCENE.losses(1.0) != replace(SCENE, seed=1).losses(1.0)


@pytest.mark.parametrize("lag", [0.0, 1.0], ids=["at its end", "with the next"])
def test_a_pause_is_what_the_last_open_step_is_late_by_whenever_steps_are_committed(lag: float) -> None:
    calm = [step + lag for step in range(STEPS - 1)] + [float(STEPS - 1)]  # one second a step
    ended = [2 * t for t in calm[: HIT - 1]] + [2 * HIT + 3.0] * (STEPS - HIT + 1)  # half as fast
    held = late(ended, calm, HIT, 0.5)
    assert (held.pause_s, held.step_s) == pytest.approx((3.0, 2.0))
    assert held.pause_steps == pytest.approx(1.5)
    assert not held.within
    assert late(ended, calm, HIT, 1.2).within


def test_a_loss_is_known_when_the_last_member_has_begun_the_epoch_without_the_node() -> None:
    events = [
        {"t": 1.0, "kind": "epoch", "members": [0, 1, 2]},
        {"t": 1.1, "kind": "ready", "node": 0, "seconds": 0.0},
        {"t": 2.1, "kind": "epoch", "members": [0, 2]},
        {"t": 2.3, "kind": "ready", "node": 0, "seconds": 0.1},
        {"t": 2.4, "kind": "ready", "node": 2, "seconds": 0.3},
    ]
    assert took(events, 1, 2.0) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="without node 0"):
        took(events, 0, 2.0)


def test_the_spread_of_nothing_is_nothing_and_of_one_is_that() -> None:
    assert spread([]) == {"median": None, "p90": None, "max": None}
    assert spread([3.0]) == {"median": 3.0, "p90": 3.0, "max": 3.0}


def test_how_long_layers_sleep_changes_nothing_of_what_is_learned() -> None:
    asleep, awake = (Emulated(stages=2, micro_batches=2, unit_s=s, steps=2, exact=True).job() for s in (0.001, 0.0))
    assert reference(asleep).state_sha256 == reference(awake).state_sha256


def test_the_gradients_of_a_layer_that_sleeps_are_those_of_one_that_does_not() -> None:
    layer = Nap(0.0)
    x = torch.ones(1, 8, requires_grad=True)
    layer(x).sum().backward()
    expected = torch.autograd.grad(torch.tanh(x @ layer.weight).sum(), (x, layer.weight))
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(layer.weight.grad, expected[1])


def test_slow_storage_has_what_was_written_to_it_and_takes_its_time_for_shards_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.slow.time.sleep", slept.append)
    slow.register()
    storage = Storage(slow.place(str(tmp_path), write_s=11, read_s=17))
    storage.write("step/a.safetensors", b"weights")
    storage.write("step/manifest.json", b"{}")
    assert storage.read("step/a.safetensors") == b"weights"
    assert storage.list("step") == ["a.safetensors", "manifest.json"]
    storage.delete("step")
    assert not storage.exists("step/manifest.json")
    assert slept == [11, 17]


def cost(**known: float) -> Cost:
    fields = dict.fromkeys(Cost.__annotations__)
    return {**fields, **known}  # type: ignore[typeddict-item]


def test_the_table_has_a_line_for_each_strategy() -> None:
    scene = {"pipelines": 4, "stages": 4, "step_s": 2.0, "loss_every_steps": 10.0, "back_after_steps": 5.0}
    result = Result(
        strategies={name: cost(vs_undisturbed=0.5) for name in STRATEGIES} | {"none": cost()},
        detect_ms={"median": 40.0, "p90": 50.0, "max": 60.0},
        compute="emulated",
        overhead_compute="real",
        scene=scene,
        checkpoint={},
        grid=[],
        bamboo={"ratio": 3.8},
        real=None,
        lanes=2,
        kills={},
        cores=2,
        workers=16,
    )
    console = Console(file=io.StringIO(), width=120)
    console.print(table(result))
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert all(name in shown for name in STRATEGIES)
    assert all(text in shown for text in ("50%", "emulated", "3.80 times", "40 ms"))
    assert json.loads(json.dumps(result))["strategies"].keys() == set(STRATEGIES)


def test_the_json_has_the_names_that_were_promised() -> None:
    promised = {"overhead", "overhead_ci", "vs_undisturbed", "vs_checkpoint", "bubble_share"}
    promised |= {"pause_steps", "pause_bound_steps", "pause_s"}
    assert Cost.__annotations__.keys() >= promised
    assert Result.__annotations__.keys() >= {"strategies", "detect_ms", "compute", "cores", "workers"}


@pytest.fixture(scope="module")
def nursery(forked: None) -> Any:
    with LocalNursery() as made:
        yield made


@pytest.fixture(scope="module")
def calm(nursery: LocalNursery) -> Ran:
    """What nothing befell."""
    return undisturbed(SCENE, nursery)


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_under_the_same_losses_none_is_lost_and_reroute_goes_on(nursery: LocalNursery, calm: Ran) -> None:
    assert calm.goodput > 0
    scene = replace(SCENE, loss_every=float(SCENE.steps))  # a busy machine has to be done with one before the next
    assert under_losses(scene, nursery, "none", calm.step_s).goodput == 0
    ran = under_losses(scene, nursery, "reroute", calm.step_s)
    assert ran.goodput > 0
    assert ran.summary["preemptions"] >= 1
    assert (ran.summary["samples_lost"], ran.summary["samples_duplicated"]) == (0, 0)


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_a_checkpoint_on_slow_storage_is_gone_back_to(nursery: LocalNursery, calm: Ran, tmp_path: Path) -> None:
    scene = replace(SCENE, loss_every=2.0 * SCENE.steps)  # a busy machine has to write one between two losses
    out = slow.place(str(tmp_path), write_s=0.01, read_s=0.05)
    ran = under_losses(
        replace(scene, steps=2 * scene.steps),
        nursery,
        "checkpoint",
        calm.step_s,
        out=out,
        checkpoint_every=2,
        replace_within=5.0,
    )
    assert "checkpoint" in {each["source"] for each in ran.summary["recoveries"]}
    assert list(tmp_path.glob("checkpoints/*"))


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_nodes_that_really_compute_know_slow_storage_too(nursery: LocalNursery, tmp_path: Path) -> None:
    work = Computed(stages=2, micro_batches=2, steps=2, spec=replace(SPEC, width=16, tokens=8))
    out = slow.place(str(tmp_path), write_s=0.01, read_s=0.01)
    asked = Request(pipelines=1, stages=2, cuts=work.cuts, out=out, checkpoint_every=1)

    async def ran() -> dict[str, Any]:
        async with local_run(nursery, pickled(work.job()), asked) as run:
            return dict((await run.result()).summary or {})

    assert asyncio.run(ran())["steps"] == 2
    assert list(tmp_path.glob("checkpoints/*"))


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_a_struck_node_is_detected_and_its_pause_has_a_bound(
    nursery: LocalNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "PIPELINES", 2)
    monkeypatch.setattr(resilience_pause, "PIPELINES", 1)  # a shadow needs no more
    (ms,) = detected(nursery, 1)
    assert ms > 0
    with Lanes(nursery, 1) as lanes:
        (held,) = resilience_pause.held(lanes, "shadow", kills=1, unit_s=0.004)
    assert held.step_s > 0
    assert held.bound_steps >= 0
