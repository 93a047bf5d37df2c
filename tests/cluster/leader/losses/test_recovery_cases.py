"""Special cases of losses, one by one: each is checked in detail, and the result is the same to the last bit.

Each test asserts the state of the survivors that makes the case; a fault that misses its case fails the test.
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
from tests.cached_runs import reference_result, run_with_faults
from tests.tiny_jobs import WIDTH, job, linear
from torch import Tensor, nn

from culm.errors import NodeLost
from culm.job import Job
from culm.plan.recover.lineage import WorkerInventory
from culm.runtime.compute import buffer_statistics
from culm.runtime.compute.model_check import check_model
from culm.runtime.worker_state import StageReplica, WorkerState
from culm.testing import Faults, SimulatedRun, simulate
from culm.testing.survival_check import ActionCost

STEP = 1
"""The step in which nodes are lost; two follow."""
SURVIVING = ("shadow", "shadow-lazy", "reroute")


def even(_node: int, _step: int, action: str) -> float:
    """F, I, W and B take time, other actions none."""
    return 0.01 if set(action) & set("FIWB") else 0.0


@dataclasses.dataclass
class Seen:
    """Observations of a run that lost nodes."""

    run: SimulatedRun
    events: list[dict[str, Any]]
    done: list[tuple[int, int, str]]
    """(node, step, action), in order."""
    inventories: list[WorkerInventory]
    """What survivors reported."""
    ghosts: list[tuple[int, int, int]]
    """(stage, step, version): layers restored to an earlier step although their weights were newer."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def recovered(self) -> dict[str, Any]:
        (only,) = self.run.summary["recoveries"]
        return dict(only)

    def reported(self, field: str, step: int, segment: int) -> list[int]:
        """For each survivor that has any: the number of such entries in its inventory."""
        return [
            sum(1 for each in getattr(inventory, field) if tuple(each[:2]) == (step, segment))
            for inventory in self.inventories
        ]


class Eye:
    """Runs a job that loses nodes, and records what happens."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.number = folder, 0
        self.inventories: list[WorkerInventory] = []
        self.ghosts: list[tuple[int, int, int]] = []
        inventory, ghost = WorkerState.inventory, StageReplica.replay_segments

        def reported(worker_state: WorkerState) -> WorkerInventory:
            self.inventories.append(inventory(worker_state))
            return self.inventories[-1]

        def called_up(replica: StageReplica, step: int) -> Any:
            if replica.version != step:
                self.ghosts.append((replica.stage, step, replica.version))
            return ghost(replica, step)

        patch.setattr(WorkerState, "inventory", reported)
        patch.setattr(StageReplica, "replay_segments", called_up)

    def __call__(self, described: Job, faults: Faults, cost: ActionCost = even, **request: Any) -> Seen:
        """Raises AssertionError unless every fault is injected and the final state equals that of one process."""
        self.number += 1
        self.inventories.clear()
        self.ghosts.clear()
        out = self.folder / str(self.number)
        done: list[tuple[int, int, str]] = []

        def recorded(node: int, step: int, action: str) -> float:
            done.append((node, step, action))
            return cost(node, step, action)

        run = run_with_faults(
            described, faults, cost=recorded, **{"pipelines": 2, "stages": 3, "out": str(out), **request}
        )
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        return Seen(run, events, done, list(self.inventories), list(self.ghosts))


@pytest.fixture
def survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Eye:
    return Eye(tmp_path, monkeypatch)


@functools.cache
def six(**fields: Any) -> Job:
    """Six layers, so that each of three stages has two; exact."""
    return job(**{"layers": [linear] * 6, "steps": STEP + 3, "exact": True, **fields})


# Reduce


def test_a_reduce_that_fails_half_way_continues_from_the_workers_with_the_sum(survive: Eye) -> None:
    """Three pipelines: of the peers of a lost node one has the sum, the other has not received it yet."""
    faults = Faults().slow_link(3, 5, latency=0.5).kill(1, at="1S", step=STEP)
    seen = survive(six(), faults, pipelines=3, stages=2, strategy="reroute")
    assert sorted(seen.reported("complete_sums", STEP, 1)) == [0, 0, 0, 0, 1]
    assert [node for node, step, action in seen.done if step == STEP and action == "1S"] == [1, 3, 5]
    assert (5, STEP, "1R") in seen.done
    assert seen.done.count((5, STEP, "1R")) == 1  # the sum is not computed again


def test_a_reduce_that_no_worker_completed_restarts_from_untouched_sums(survive: Eye) -> None:
    faults = Faults().slow_link(1, None, latency=0.05).kill(1, at="1R", step=STEP, silence=True)
    seen = survive(six(), faults, pipelines=3, stages=2, strategy="reroute")
    assert sum(seen.reported("complete_sums", STEP, 1)) == 0
    assert sum(seen.reported("accumulated_grads", STEP, 1)) > 0
    assert seen.done.count((3, STEP, "1R")) == 2


def test_a_w_that_is_interrupted_in_its_add_has_been_added_once_and_is_not_run_again(survive: Eye) -> None:
    """Node 1 is in a W that would take an hour when another node is lost: it leaves the epoch with that W in its
    sum."""

    def slow(node: int, step: int, action: str) -> float:
        return 3600.0 if (node, step, action) == (1, STEP, "1W0") else even(node, step, action)

    seen = survive(six(), Faults().kill(5, at="2F3", step=STEP), slow, strategy="reroute", schedule="zb")
    assert seen.run.virtual_s < 3600.0
    assert [STEP, 1, 0] in [[*each[:3]] for inventory in seen.inventories for each in inventory.accumulated_grads]
    assert seen.done.count((1, STEP, "1W0")) == 1


# Shadows


def test_a_shadow_that_is_a_step_behind_catches_up_before_it_takes_over(survive: Eye) -> None:
    """The sum of the last stage is in flight to its shadow when the last stage is lost, and is lost with it."""
    faults = Faults().delay_message(2, 1, nth=10, seconds=1.0).kill(2, at="0S+", step=STEP, silence=True)
    seen = survive(six(), faults, pipelines=1, strategy="shadow-lazy", schedule="1f1b")
    behind = [s for s in seen.inventories if max(s.weight_versions.values()) > min(s.weight_versions.values())]
    assert {1: STEP + 1, 2: STEP} in [inventory.weight_versions for inventory in behind]
    assert seen.recovered["source"] == "shadow"


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_forwards_that_a_shadow_ran_ahead_are_not_rerun(survive: Eye, schedule: str) -> None:
    """The shadow has run the forward of the lost worker in a bubble: only its backward is left."""
    eager, lazy = (
        survive(
            six(), Faults().kill(2, at="2F3", step=STEP), pipelines=1, strategy=strategy, schedule=schedule
        ).done.count((1, STEP, "2F0"))
        for strategy in ("shadow", "shadow-lazy")
    )
    assert (eager, lazy) == (1, 1)  # once each: before the loss, and after it
    before = survive(six(), Faults().kill(2, at="2F3", step=STEP), pipelines=1, strategy="shadow", schedule=schedule)
    assert any(cell.segment == 2 for inventory in before.inventories for cell in inventory.tapes_after_forward)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb"])
@pytest.mark.parametrize("again", [False, True])
def test_gradients_lost_in_flight_after_the_sum_are_recomputed_from_replica_tapes(
    survive: Eye, schedule: str, again: bool
) -> None:
    """A message of node 2 to node 1 is in flight on a slow link when node 2 dies; node 5 has already included it in the
    sum. Node 1 has run the forwards of its replica. A second loss, of the node with the sum, changes nothing."""
    faults = Faults().slow_link(2, 1, latency=0.5).kill(2, at="2S", step=STEP, silence=True)
    faults = faults.kill(5, at="adopt", nth=2) if again else faults
    seen = survive(six(), faults, pipelines=2, stages=3, strategy="shadow", schedule=schedule)
    assert [STEP, 2, 0] in [[*cell] for inventory in seen.inventories for cell in inventory.tapes_after_forward]
    assert (1, STEP, "2I0") in seen.done


def test_the_share_of_replica_forwards_that_found_a_bubble_is_reported() -> None:
    shape: dict[str, Any] = {"pipelines": 1, "stages": 3, "cost": even}
    share = simulate(six(), strategy="shadow", **shape).summary["bubble_share"]
    assert 0.0 < share <= 1.0
    assert simulate(six(), strategy="shadow-lazy", **shape).summary["bubble_share"] is None
    assert simulate(six(), strategy="none", **shape).summary["bubble_share"] is None


def test_eager_shadows_become_lazy_where_the_schedule_has_no_bubble(tmp_path: Path) -> None:
    """With equal stages and many micro-batches, zero-bubble leaves almost no time to run forwards."""
    many = six(global_batch=24, micro_batch=1, steps=2)
    seen = check_model(many).profile
    layers = [msgspec.structs.replace(layer, forward_s=1.0, input_s=1.0, weight_s=1.0) for layer in seen.layers]
    profile = msgspec.structs.replace(seen, layers=tuple(layers))
    profile.save(tmp_path / "profile.json")
    shape: dict[str, Any] = {"pipelines": 1, "stages": 2, "profile": str(tmp_path / "profile.json")}
    found = simulate(many, strategy="shadow", schedule="zb", cost=even, out=str(tmp_path), **shape)
    (started,) = [e for e in map(json.loads, (tmp_path / "events.jsonl").open()) if e["kind"] == "run_started"]
    assert "zb leaves" in started["why"]
    assert "so eager becomes lazy" in started["why"]
    assert found.summary["bubble_share"] is None


# Kinds of layers


class Normed(nn.Module):
    """Its running statistics are updated once a step, in the order of the micro-batches, whichever node ran them."""

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
"""Each with another node, including the first and the last of a tied group."""


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("described", [tied, normed, clipped])
def test_tied_layers_batch_norm_and_clipping_survive_a_loss_at_any_moment(
    survive: Eye, described: Callable[[], Job], at: str
) -> None:
    """Each strategy gets every kind of layer and every moment. With clipping all layers step together."""
    node = MOMENTS[at]
    strategy = SURVIVING[([*MOMENTS].index(at) + [tied, normed, clipped].index(described)) % 3]
    seen = survive(described(), Faults().kill(node, at=f"{node}{at}", step=STEP), strategy=strategy)
    assert seen.run.summary["preemptions"] == 1


@pytest.mark.parametrize("nth", [4, 7])
def test_a_replica_can_take_over_one_range_of_a_stage_without_having_run_the_others(survive: Eye, nth: int) -> None:
    """In the first step it has not received the batch norm statistics of the ranges that it never ran."""
    faults = Faults().kill(0, step=0, nth=nth)
    ways: dict[str, Any] = {"stages": 2, "schedule": "interleaved", "strategy": "shadow-lazy", "pipelines": 3}
    seen = survive(six(layers=(Normed,) * 8, global_batch=12), faults, **ways)
    assert seen.recovered["source"] == "shadow"


def test_clipping_takes_effect_and_tied_layers_stay_equal() -> None:
    def moved(described: Job) -> Tensor:
        return torch.cat([p.reshape(-1) for p in reference_result(described).snapshot.parameters.values()])

    assert not torch.equal(moved(clipped()), moved(six()))
    assert not torch.equal(moved(tied()), moved(six()))


# Two open steps


def slow(stage: int) -> ActionCost:
    """The weight gradients of a stage take long, so that other stages are a step ahead meanwhile."""
    return lambda node, step, action: 0.2 if action.startswith(f"{stage}W") else even(node, step, action)


def test_a_worker_ahead_reruns_with_the_weights_of_the_open_step(survive: Eye) -> None:
    """Stage 1 has stepped; then the first two workers of a pipeline are lost, and with them the gradients that stage 0
    had received. The other worker of stage 1 recomputes them with the weights of that step."""
    faults = Faults().kill((0, 1), at="1S+", step=STEP)
    seen = survive(six(), faults, slow(0), strategy="reroute", schedule="zb")
    assert (1, STEP, STEP + 1) in seen.ghosts
    again = [action for node, step, action in seen.done if node == 4 and step == STEP]
    for micro in (0, 1):  # of the lost pipeline
        assert [again.count(f"1{kind}{micro}") for kind in "FIW"] == [1, 1, 0]  # its W is already in the sum


class Centred(nn.Module):
    """Its forward uses a buffer that changes in every step."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        buffer_statistics.record(self, x.mean(0))
        return torch.tanh(self.linear(x - self.mean))

    def apply_statistics(self, mean: Tensor) -> None:
        self.mean.mul_(0.5).add_(mean, alpha=0.5)


def test_a_worker_ahead_reruns_with_the_buffers_of_the_open_step(survive: Eye) -> None:
    described = six(layers=(linear, linear, Centred, Centred, linear, linear))
    faults = Faults().kill((0, 1), at="1S+", step=STEP)
    seen = survive(described, faults, slow(0), strategy="reroute", schedule="zb")
    assert (1, STEP, STEP + 1) in seen.ghosts


def test_work_of_both_open_steps_is_completed(survive: Eye) -> None:
    """The last stage still computes weight gradients of a step when a worker in the middle is lost in the next one."""
    faults = Faults().kill(1, at="1F1", step=STEP + 1)
    seen = survive(six(), faults, slow(2), strategy="reroute", schedule="zb")
    (epoch,) = [event for event in seen.of("epoch") if event["number"] > 1]
    assert epoch["open_steps"] == [STEP, STEP + 1]


# Which nodes are lost


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
@pytest.mark.parametrize("moment", ["inventory", "adopt"])
def test_a_second_loss_during_recovery_starts_again_from_fresh_reports(
    survive: Eye, strategy: str, moment: str
) -> None:
    second = Faults().kill(3, at=moment, nth=2 if moment == "adopt" else 1)
    seen = survive(six(), Faults().kill(1, at="1B0", step=STEP) + second, strategy=strategy)
    assert [event["node"] for event in seen.of("lost")] == [1, 3]
    assert len(seen.inventories) > 4  # workers that had reported report again
    assert seen.events[-1]["kind"] == "finished"


@pytest.mark.parametrize("strategy", SURVIVING)
@pytest.mark.parametrize(
    "moment", [("inventory", None, 1), ("adopt", None, 2), ("commit", STEP, 1)], ids=lambda m: m[0]
)
def test_every_loss_is_in_the_summary_once_even_if_the_leader_is_lost_during_a_recovery(
    survive: Eye, strategy: str, moment: tuple[str, int | None, int]
) -> None:
    """Before its decision, after the decision is stored, and just after the recovery is complete."""
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


def test_a_leader_declared_lost_does_not_overwrite_output_of_its_successor(memory_url: str) -> None:
    """On a URL, all lines are written at once: when the old leader wakes up, its lines are outdated."""
    faults = Faults().pause(0, step=STEP, nth=3, seconds=9.0)
    run_with_faults(six(), faults, pipelines=2, stages=3, strategy="reroute", out=memory_url)
    with fsspec.open(f"{memory_url}/steps.jsonl", "r") as lines:
        assert [json.loads(line)["step"] for line in lines][-1] == six().steps - 1


def test_a_loss_after_every_node_has_stepped_redoes_nothing(survive: Eye) -> None:
    seen = survive(six(), Faults().kill(4, at="1S+", step=STEP), strategy="reroute")
    assert seen.recovered["redone_actions"] == 0


# No holder left


def test_without_a_holder_the_run_returns_to_the_newest_valid_checkpoint(survive: Eye) -> None:
    faults = Faults().kill((1, 4), at="1B0", step=3)
    seen = survive(six(), faults, strategy="reroute", checkpoint_every=2)
    assert seen.recovered["source"] == "checkpoint"
    assert seen.of("epoch")[-1]["why"] == (
        "some layers have no holder left: all nodes restart from the checkpoint after step 2"
    )
    assert (3, 2, "0F2") in seen.done
    assert seen.done.count((3, 2, "0F2")) == 2  # step 2 was committed and is run again


def test_a_damaged_checkpoint_is_skipped(survive: Eye, tmp_path: Path) -> None:
    """The newest checkpoint has lost its files when it is needed."""

    def spoiling(node: int, step: int, action: str) -> float:
        if (node, step, action) == (0, 5, "0F0"):
            for shard in (tmp_path / "1" / "checkpoints" / "step-00000004").glob("*.safetensors"):
                shard.write_bytes(b"")
        return even(node, step, action)

    faults = Faults().kill((1, 4), at="1B0", step=5)
    seen = survive(six(steps=7), faults, spoiling, strategy="reroute", checkpoint_every=2)
    assert seen.of("epoch")[-1]["why"].endswith("from the checkpoint after step 2")


def test_before_the_first_update_the_run_restarts_from_scratch(survive: Eye) -> None:
    seen = survive(six(), Faults().kill((1, 4), at="1B0", step=0), strategy="reroute")
    assert seen.of("epoch")[-1]["why"] == "some layers have no holder left: all nodes restart from the start of the run"


def test_without_a_holder_and_without_a_checkpoint_the_run_ends_in_one_sentence() -> None:
    with pytest.raises(NodeLost, match=r"no other node holds its layers \(strategy reroute\): it had no"):
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
    """Stage 1 has one holder left: another worker gets a new copy."""
    seen = survive(six(steps=8), Faults().kill(lost, at="1B2", step=STEP), strategy=strategy, pipelines=pipelines)
    assert 1 in [event["stage"] for event in seen.of("protected")]
    assert seen.run.summary["at_risk_s"] > 0.0
    assert "a new copy of stage 1 to slot" in seen.of("epoch")[-1]["why"]


def test_a_new_copy_can_replace_the_lost_one(survive: Eye) -> None:
    """Stage 1 loses one of its two holders and, when protection is restored, the other one too."""
    faults = Faults().kill(4, at="1B2", step=STEP).kill(1, at="1B1", step=6)
    seen = survive(six(steps=9), faults, strategy="reroute")
    assert [each["source"] for each in seen.run.summary["recoveries"]] == ["peers", "shadow"]
    kinds = [event["kind"] for event in seen.events]
    assert kinds.index("protected") < len(kinds) - 1 - kinds[::-1].index("lost")


def test_without_a_loss_nothing_is_at_risk() -> None:
    for strategy in SURVIVING:
        assert simulate(six(), pipelines=2, stages=3, strategy=strategy).summary["at_risk_s"] == 0.0
