"""Losses of every special kind, one by one: what happened is looked at, and the same is learned to the last bit.

Each test says what must have been the case among the survivors; a fault that misses its case fails it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
import torch
from tests.known import hurt, truth
from torch import Tensor, nn

from culm.errors import NodeLost
from culm.job import Job
from culm.plan.lineage import Standing
from culm.runtime import statistics
from culm.runtime.blueprint import probe
from culm.runtime.desk import Desk, Holding
from culm.testing import Faults, Simulated, simulate
from culm.testing.survive import Cost

from .jobs import WIDTH, job, linear

STEP = 1
"""The step in which nodes are lost; two follow."""
SURVIVING = ("shadow", "shadow-lazy", "reroute")


def even(_node: int, _step: int, action: str) -> float:
    """F, I, W and B take time, all else none."""
    return 0.01 if set(action) & set("FIWB") else 0.0


@dataclasses.dataclass
class Seen:
    """What could be seen of a run that lost nodes."""

    run: Simulated
    events: list[dict[str, Any]]
    done: list[tuple[int, int, str]]
    """(node, step, action), in order."""
    standings: list[Standing]
    """What survivors reported."""
    ghosts: list[tuple[int, int, int]]
    """(stage, step, version): layers as they were for a step, though their weights were further."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def recovered(self) -> dict[str, Any]:
        (only,) = self.run.summary["recoveries"]
        return dict(only)

    def reported(self, field: str, step: int, segment: int) -> list[int]:
        """In how many survivors' hands each lay: for each of them the number of such things."""
        return [
            sum(1 for each in getattr(standing, field) if tuple(each[:2]) == (step, segment))
            for standing in self.standings
        ]


class Eye:
    """Runs a job that loses nodes, and looks on."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.number = folder, 0
        self.standings: list[Standing] = []
        self.ghosts: list[tuple[int, int, int]] = []
        standing, ghost = Desk.standing, Holding.ghost

        def reported(desk: Desk) -> Standing:
            self.standings.append(standing(desk))
            return self.standings[-1]

        def called_up(holding: Holding, step: int) -> Any:
            if holding.version != step:
                self.ghosts.append((holding.stage, step, holding.version))
            return ghost(holding, step)

        patch.setattr(Desk, "standing", reported)
        patch.setattr(Holding, "ghost", called_up)

    def __call__(self, described: Job, faults: Faults, cost: Cost = even, **request: Any) -> Seen:
        """Raises AssertionError unless every fault strikes and the state at the end is that of one process."""
        self.number += 1
        self.standings.clear()
        self.ghosts.clear()
        out = self.folder / str(self.number)
        done: list[tuple[int, int, str]] = []

        def recorded(node: int, step: int, action: str) -> float:
            done.append((node, step, action))
            return cost(node, step, action)

        run = hurt(described, faults, cost=recorded, **{"pipelines": 2, "stages": 3, "out": str(out), **request})
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        return Seen(run, events, done, list(self.standings), list(self.ghosts))


@pytest.fixture
def survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Eye:
    return Eye(tmp_path, monkeypatch)


@functools.cache
def six(**fields: Any) -> Job:
    """Six layers, so that each of three stages has two; exact."""
    return job(**{"layers": [linear] * 6, "steps": STEP + 3, "exact": True, **fields})


# Reduce


def test_a_reduce_that_fails_half_way_leaves_some_with_the_sum_and_the_others_take_it_from_there(survive: Eye) -> None:
    """Three pipelines: of the peers of a lost node one has the sum, the other is yet to hear of it."""
    faults = Faults().slow_link(3, 5, latency=0.5).kill(1, at="1S", step=STEP)
    seen = survive(six(), faults, pipelines=3, stages=2, strategy="reroute")
    assert sorted(seen.reported("sums", STEP, 1)) == [0, 0, 0, 0, 1]
    assert [node for node, step, action in seen.done if step == STEP and action == "1S"] == [1, 3, 5]
    assert (5, STEP, "1R") in seen.done
    assert seen.done.count((5, STEP, "1R")) == 1  # it is not added up again


def test_a_reduce_that_nobody_has_completed_begins_again_from_untouched_sums(survive: Eye) -> None:
    faults = Faults().slow_link(1, None, latency=0.05).kill(1, at="1R", step=STEP, silence=True)
    seen = survive(six(), faults, pipelines=3, stages=2, strategy="reroute")
    assert sum(seen.reported("sums", STEP, 1)) == 0
    assert sum(seen.reported("summed", STEP, 1)) > 0
    assert seen.done.count((3, STEP, "1R")) == 2


def test_a_w_that_is_interrupted_in_its_add_has_been_added_once_and_is_not_run_again(survive: Eye) -> None:
    """Node 1 is at a W that would take it an hour when another is lost: it leaves the epoch with that W in its sum."""

    def slow(node: int, step: int, action: str) -> float:
        return 3600.0 if (node, step, action) == (1, STEP, "1W0") else even(node, step, action)

    seen = survive(six(), Faults().kill(5, at="2F3", step=STEP), slow, strategy="reroute", schedule="zb")
    assert seen.run.virtual_s < 3600.0
    assert [STEP, 1, 0] in [[*each[:3]] for standing in seen.standings for each in standing.summed]
    assert seen.done.count((1, STEP, "1W0")) == 1


# Shadows


def test_a_shadow_that_is_a_step_behind_makes_the_step_before_it_stands_in(survive: Eye) -> None:
    """The sum of the last stage is on its way to its shadow when the last stage is lost, and goes with it."""
    faults = Faults().late(2, 1, nth=10, seconds=1.0).kill(2, at="0S+", step=STEP, silence=True)
    seen = survive(six(), faults, pipelines=1, strategy="shadow-lazy", schedule="1f1b")
    behind = [s for s in seen.standings if max(s.versions.values()) > min(s.versions.values())]
    assert {1: STEP + 1, 2: STEP} in [standing.versions for standing in behind]
    assert seen.recovered["source"] == "shadow"


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_what_a_shadow_ran_ahead_is_not_run_again(survive: Eye, schedule: str) -> None:
    """The forward of the lost worker has been run in a bubble of its shadow: its backward alone is left."""
    eager, lazy = (
        survive(
            six(), Faults().kill(2, at="2F3", step=STEP), pipelines=1, strategy=strategy, schedule=schedule
        ).done.count((1, STEP, "2F0"))
        for strategy in ("shadow", "shadow-lazy")
    )
    assert (eager, lazy) == (1, 1)  # each once: ahead of the loss, and after it
    before = survive(six(), Faults().kill(2, at="2F3", step=STEP), pipelines=1, strategy="shadow", schedule=schedule)
    assert any(cell.segment == 2 for standing in before.standings for cell in standing.forwards)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
@pytest.mark.parametrize("again", [False, True])
def test_gradients_that_are_lost_on_the_way_when_the_sum_is_complete_are_made_from_the_tapes_of_a_replica(
    survive: Eye, schedule: str, again: bool
) -> None:
    """What node 2 sent to node 1 is still on a slow link when it dies; node 5 has added up with it. Node 1 has run the
    forwards of its replica. A second loss, of the one that has the sum, in the midst of that changes nothing."""
    faults = Faults().slow_link(2, 1, latency=0.5).kill(2, at="2S", step=STEP, silence=True)
    faults = faults.kill(5, at="adopt", nth=2) if again else faults
    seen = survive(six(), faults, pipelines=2, stages=3, strategy="shadow", schedule=schedule)
    assert [STEP, 2, 0] in [[*cell] for standing in seen.standings for cell in standing.forwards]
    assert (1, STEP, "2I0") in seen.done


def test_the_share_of_replica_forwards_that_found_a_bubble_is_reported() -> None:
    shape: dict[str, Any] = {"pipelines": 1, "stages": 3, "cost": even}
    share = simulate(six(), strategy="shadow", **shape).summary["bubble_share"]
    assert 0.0 < share <= 1.0
    assert simulate(six(), strategy="shadow-lazy", **shape).summary["bubble_share"] is None
    assert simulate(six(), strategy="none", **shape).summary["bubble_share"] is None


def test_eager_becomes_lazy_where_the_schedule_has_no_bubble_and_says_so(tmp_path: Path) -> None:
    """With equal stages and many micro-batches zero-bubble leaves next to nothing to run forwards in."""
    many = six(global_batch=24, micro_batch=1, steps=2)
    seen = probe(many).profile
    layers = [msgspec.structs.replace(layer, forward_s=1.0, input_s=1.0, weight_s=1.0) for layer in seen.layers]
    profile = msgspec.structs.replace(seen, layers=tuple(layers))
    profile.save(tmp_path / "profile.json")
    shape: dict[str, Any] = {"pipelines": 1, "stages": 2, "profile": str(tmp_path / "profile.json")}
    found = simulate(many, strategy="shadow", schedule="zb", cost=even, out=str(tmp_path), **shape)
    (started,) = [e for e in map(json.loads, (tmp_path / "events.jsonl").open()) if e["kind"] == "run_started"]
    assert "zb leaves" in started["why"]
    assert "so eager becomes lazy" in started["why"]
    assert found.summary["bubble_share"] is None


# What layers may be like


class Normed(nn.Module):
    """Its running statistics move once a step, in the order of the micro-batches, whoever ran them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(self.linear(x))
        return made


def tied() -> Job:
    return six(tied=(("0.weight", "5.weight"),))


def normed() -> Job:
    return six(layers=(Normed,) * 6)


def clipped() -> Job:
    return six(clip_norm=0.05)


MOMENTS = {"F0": 0, "B1": 2, "R": 0, "S": 1, "S+": 2}
"""Each with another node, where a tied group begins and ends among them."""


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("described", [tied, normed, clipped])
def test_tied_layers_batch_norm_and_clipping_survive_a_loss_at_any_moment(
    survive: Eye, described: Callable[[], Job], at: str
) -> None:
    """Strategies take turns: each meets every kind of layer, and every moment. Clipping has all step together."""
    node = MOMENTS[at]
    strategy = SURVIVING[([*MOMENTS].index(at) + [tied, normed, clipped].index(described)) % 3]
    seen = survive(described(), Faults().kill(node, at=f"{node}{at}", step=STEP), strategy=strategy)
    assert seen.run.summary["preemptions"] == 1


@pytest.mark.parametrize("nth", [4, 7])
def test_a_replica_that_stands_in_for_one_range_of_a_stage_need_not_have_run_the_others(survive: Eye, nth: int) -> None:
    """Of the step that is the first, nobody has told it what the batch norms of the ranges that it never ran record."""
    faults = Faults().kill(0, step=0, nth=nth)
    ways: dict[str, Any] = {"stages": 2, "schedule": "interleaved", "strategy": "shadow-lazy", "pipelines": 3}
    seen = survive(six(layers=(Normed,) * 8, global_batch=12), faults, **ways)
    assert seen.recovered["source"] == "shadow"


def test_clipping_clips_in_these_tests_and_tied_layers_stay_one() -> None:
    def moved(described: Job) -> Tensor:
        return torch.cat([p.reshape(-1) for p in truth(described).snapshot.parameters.values()])

    assert not torch.equal(moved(clipped()), moved(six()))
    assert not torch.equal(moved(tied()), moved(six()))


# Two open steps


def slow(stage: int) -> Cost:
    """The weight half of a stage takes long, so that others are a step further meanwhile."""
    return lambda node, step, action: 0.2 if action.startswith(f"{stage}W") else even(node, step, action)


def test_an_early_stepper_runs_again_with_the_weights_of_the_step_that_is_open(survive: Eye) -> None:
    """Stage 1 has stepped; then the first two workers of a pipeline are lost, and with them the gradients that stage 0
    was given. The other worker of stage 1 makes them once more, with the weights that they were made with."""
    faults = Faults().kill((0, 1), at="1S+", step=STEP)
    seen = survive(six(), faults, slow(0), strategy="reroute", schedule="zb")
    assert (1, STEP, STEP + 1) in seen.ghosts
    again = [action for node, step, action in seen.done if node == 4 and step == STEP]
    for micro in (0, 1):  # of the pipeline that is gone
        assert [again.count(f"1{kind}{micro}") for kind in "FIW"] == [1, 1, 0]  # its W is in the sum already


class Centred(nn.Module):
    """Its forward uses a buffer that every step moves."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        statistics.record(self, x.mean(0))
        return torch.tanh(self.linear(x - self.mean))

    def apply_statistics(self, mean: Tensor) -> None:
        self.mean.mul_(0.5).add_(mean, alpha=0.5)


def test_an_early_stepper_runs_again_with_the_buffers_of_the_step_that_is_open(survive: Eye) -> None:
    described = six(layers=(linear, linear, Centred, Centred, linear, linear))
    faults = Faults().kill((0, 1), at="1S+", step=STEP)
    seen = survive(described, faults, slow(0), strategy="reroute", schedule="zb")
    assert (1, STEP, STEP + 1) in seen.ghosts


def test_work_of_both_open_steps_is_completed(survive: Eye) -> None:
    """The last stage is still at the weights of a step when a worker in the middle is lost in the next."""
    faults = Faults().kill(1, at="1F1", step=STEP + 1)
    seen = survive(six(), faults, slow(2), strategy="reroute", schedule="zb")
    (epoch,) = [event for event in seen.of("epoch") if event["number"] > 1]
    assert epoch["open_steps"] == [STEP, STEP + 1]


# Who is lost


@pytest.mark.parametrize("strategy", SURVIVING)
@pytest.mark.parametrize(
    ("lost", "at"),
    [((1, 2), "1B1"), ((2, 3), "2F0"), ((0, 1, 2), "1B0"), ((3, 4, 5), "4B2"), ((0, 5), "2R")],
    ids=["neighbours", "across-pipelines", "first-pipeline", "second-pipeline", "first-and-last"],
)
def test_several_may_be_lost_at_once(survive: Eye, strategy: str, lost: tuple[int, ...], at: str) -> None:
    at = at if int(at[0]) < 3 else f"{int(at[0]) - 3}{at[1:]}"
    seen = survive(six(), Faults().kill(lost, at=at, step=STEP), strategy=strategy)
    assert sorted(node for each in seen.run.summary["recoveries"] for node in each["lost"]) == sorted(lost)
    assert seen.run.summary["preemptions"] == len(lost)


@pytest.mark.parametrize("strategy", SURVIVING)
@pytest.mark.parametrize("moment", ["standing", "adopt"])
def test_a_second_loss_during_recovery_starts_again_from_fresh_reports(
    survive: Eye, strategy: str, moment: str
) -> None:
    second = Faults().kill(3, at=moment, nth=2 if moment == "adopt" else 1)
    seen = survive(six(), Faults().kill(1, at="1B0", step=STEP) + second, strategy=strategy)
    assert [event["node"] for event in seen.of("lost")] == [1, 3]
    assert len(seen.standings) > 4  # who had reported before reports again
    assert seen.events[-1]["kind"] == "finished"


@pytest.mark.parametrize("strategy", SURVIVING)
@pytest.mark.parametrize("moment", [("standing", None, 1), ("adopt", None, 2), ("commit", STEP, 1)], ids=lambda m: m[0])
def test_every_loss_is_in_the_summary_once_though_the_leader_is_lost_while_it_makes_one_good(
    survive: Eye, strategy: str, moment: tuple[str, int | None, int]
) -> None:
    """Before it has decided, when its decision is in the store, and when the loss has just been made good."""
    at, step, nth = moment
    faults = Faults().kill(1, at="1B0", step=STEP) + Faults().kill(0, at=at, step=step, nth=nth)
    seen = survive(six(), faults, strategy=strategy)
    assert [event["node"] for event in seen.of("lost")] == [1, 0]
    lost = [recovered["lost"] for recovered in seen.run.summary["recoveries"]]
    assert lost == ([[1], [0]] if at == "commit" else [[0, 1]])


@pytest.mark.parametrize("strategy", SURVIVING)
@pytest.mark.parametrize("at", ["0S", "0S+", "commit"])
def test_the_leader_may_be_lost_in_the_optimizer_step_and_in_the_commit(survive: Eye, strategy: str, at: str) -> None:
    seen = survive(six(), Faults().kill(0, at=at, step=STEP), strategy=strategy)
    assert [event["kind"] for event in seen.events if event["kind"] in ("leader", "lost")] == ["leader", "lost"]
    assert seen.run.summary["steps"] == STEP + 3


def test_a_leader_that_was_taken_for_dead_writes_over_nothing_that_the_next_has_told(memory: str) -> None:
    """On a URL lines are put all at once: when it wakes up, what it knows is old."""
    faults = Faults().pause(0, step=STEP, nth=3, seconds=9.0)
    hurt(six(), faults, pipelines=2, stages=3, strategy="reroute", out=memory)
    with fsspec.open(f"{memory}/steps.jsonl", "r") as lines:
        assert [json.loads(line)["step"] for line in lines][-1] == six().steps - 1


def test_a_loss_after_every_node_has_stepped_redoes_nothing(survive: Eye) -> None:
    seen = survive(six(), Faults().kill(4, at="1S+", step=STEP), strategy="reroute")
    assert seen.recovered["redone_actions"] == 0


# No holder left


def test_without_a_holder_the_run_goes_back_to_the_newest_good_checkpoint_and_says_so(survive: Eye) -> None:
    faults = Faults().kill((1, 4), at="1B0", step=3)
    seen = survive(six(), faults, strategy="reroute", checkpoint_every=2)
    assert seen.recovered["source"] == "checkpoint"
    assert seen.of("epoch")[-1]["why"] == (
        "layers have no holder left: everyone goes on from the checkpoint after step 2"
    )
    assert (3, 2, "0F2") in seen.done
    assert seen.done.count((3, 2, "0F2")) == 2  # step 2 was committed, and is made again


def test_a_checkpoint_that_is_damaged_is_passed_over(survive: Eye, tmp_path: Path) -> None:
    """A newer one has lost its files when it is needed."""

    def spoiling(node: int, step: int, action: str) -> float:
        if (node, step, action) == (0, 5, "0F0"):
            for shard in (tmp_path / "1" / "checkpoints" / "step-00000004").glob("*.safetensors"):
                shard.write_bytes(b"")
        return even(node, step, action)

    faults = Faults().kill((1, 4), at="1B0", step=5)
    seen = survive(six(steps=7), faults, spoiling, strategy="reroute", checkpoint_every=2)
    assert seen.of("epoch")[-1]["why"].endswith("from the checkpoint after step 2")


def test_before_anything_is_learned_the_run_begins_anew(survive: Eye) -> None:
    seen = survive(six(), Faults().kill((1, 4), at="1B0", step=0), strategy="reroute")
    assert seen.of("epoch")[-1]["why"] == "layers have no holder left: everyone goes on as it began"


def test_without_a_holder_and_without_a_checkpoint_the_run_ends_in_one_sentence() -> None:
    with pytest.raises(NodeLost, match=r"nobody else holds its layers \(strategy reroute\): it had no checkpoint yet"):
        simulate(
            six(), faults=Faults().kill((1, 4), at="1B0", step=STEP), pipelines=2, stages=3, strategy="reroute"
        )  # fmt: skip


# Protection


@pytest.mark.parametrize(
    ("strategy", "pipelines", "lost"), [("reroute", 2, 4), ("shadow", 1, 1), ("shadow-lazy", 1, 1)]
)
def test_lost_protection_is_restored_and_the_time_at_risk_is_counted(
    survive: Eye, strategy: str, pipelines: int, lost: int
) -> None:
    """Stage 1 has one holder left: somebody gets a new copy of it."""
    seen = survive(six(steps=8), Faults().kill(lost, at="1B2", step=STEP), strategy=strategy, pipelines=pipelines)
    assert 1 in [event["stage"] for event in seen.of("protected")]
    assert seen.run.summary["at_risk_s"] > 0.0
    assert "a new copy of stage 1 to slot" in seen.of("epoch")[-1]["why"]


def test_the_new_copy_is_as_good_as_the_one_that_was_lost(survive: Eye) -> None:
    """Stage 1 loses one of its two holders, and when protection is restored the other one, too."""
    faults = Faults().kill(4, at="1B2", step=STEP).kill(1, at="1B1", step=6)
    seen = survive(six(steps=9), faults, strategy="reroute")
    assert [each["source"] for each in seen.run.summary["recoveries"]] == ["peers", "shadow"]
    kinds = [event["kind"] for event in seen.events]
    assert kinds.index("protected") < len(kinds) - 1 - kinds[::-1].index("lost")


def test_without_a_loss_nothing_is_at_risk() -> None:
    for strategy in SURVIVING:
        assert simulate(six(), pipelines=2, stages=3, strategy=strategy).summary["at_risk_s"] == 0.0
