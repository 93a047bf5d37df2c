"""A simulated run from its first node to its one result: whatever goes wrong, it ends and gives the reason."""

from __future__ import annotations

import asyncio
import errno
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.tiny_jobs import DATA, WIDTH, boom, job, layers, linear, nan
from torch import Tensor, nn

import culm
from culm.checkpoint import CheckpointCatalog, Storage
from culm.cluster.leader.event_handlers import EventHandlers
from culm.cluster.leader.events import Call, PlanRecovery, PlanReshape
from culm.cluster.leader.hang_detector import HangDetector
from culm.cluster.leader.leader import Leader
from culm.cluster.leader.output.hook_runner import InlineHookRunner
from culm.cluster.leader.output.run_files import RunFiles
from culm.cluster.leader.planning_calls import PlanningCalls
from culm.cluster.prepare_run import prepare_run
from culm.cluster.run_setup import RunResult, encode
from culm.cluster.store.store import MemoryStore, SessionLost
from culm.config import RunConfig
from culm.errors import (
    CheckpointError,
    CulmError,
    LayerFailed,
    NodeLost,
    NonFiniteLoss,
    PlanError,
    RunError,
    UsageError,
)
from culm.job import Job
from culm.observe.step_metrics import StepMetrics
from culm.observe.writers.run_folder import RunFolder
from culm.runtime import messages
from culm.runtime.compute.model_check import check_model
from culm.testing import Cluster, VirtualClock, reference, run_virtual
from culm.testing import simulate as simulate_any
from culm.transport.frames.simulated_network import SimulatedNetwork

simulate = functools.partial(simulate_any, strategy="none")
"""Under this strategy every loss ends the run: its message is tested here."""


def test_a_simulated_run_learns_what_one_process_would() -> None:
    alone = reference(job())
    together = simulate(job(), pipelines=1, stages=2)
    assert together.weights_sha256 == alone.weights_sha256
    assert together.losses == alone.losses


def test_a_job_of_no_steps_ends_with_its_initial_weights(tmp_path: Path) -> None:
    found = simulate(job(steps=0), stages=2, out=str(tmp_path))
    assert found.summary["steps"] == found.summary["samples"] == 0
    assert found.summary["final_loss"] is None
    assert found.weights_sha256 == reference(job(steps=0)).weights_sha256


def test_the_leader_stays_responsive_while_the_files_of_a_large_run_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a hundred nodes that takes longer than a lease: on the event loop it would cost the leader its session."""
    deep, written = 0, []
    aside, write = VirtualClock.run_in_thread, RunFolder.write_json

    async def watched(clock: VirtualClock, slow: Any, *args: Any, **named: Any) -> Any:
        def noted() -> Any:
            nonlocal deep
            deep += 1
            try:
                return slow(*args, **named)
            finally:
                deep -= 1

        return await aside(clock, noted)

    def noted(folder: RunFolder, name: str, value: Any) -> None:
        written.append((name, deep > 0))
        write(folder, name, value)

    monkeypatch.setattr(VirtualClock, "run_in_thread", watched)
    monkeypatch.setattr(RunFolder, "write_json", noted)
    simulate(job(), stages=2, out=str(tmp_path))
    assert written == [("summary.json", True), ("trace.json", True)]


@pytest.mark.parametrize(
    ("field", "value", "found"), [("name", "Conv2d", "Conv2d with 80"), ("parameter_bytes", 4096, "Linear with 4,096")]
)
def test_a_profile_of_another_model_with_as_many_layers_is_refused(
    tmp_path: Path, field: str, value: object, found: str
) -> None:
    mine = check_model(job()).profile
    other = msgspec.structs.replace(mine.layers[2], **{field: value})
    file = tmp_path / "profile.json"
    msgspec.structs.replace(mine, layers=(*mine.layers[:2], other, *mine.layers[3:])).save(file)
    with pytest.raises(PlanError) as refused:
        prepare_run(job(), RunConfig(stages=2, profile=str(file)))
    ours = "Linear with 80 bytes of parameters in the job"
    assert str(refused.value) == (
        f"layer 2 is {found} bytes of parameters in the profile and {ours}: make a new one with culm profile"
    )
    mine.save(file)
    assert prepare_run(job(), RunConfig(stages=2, profile=str(file))).layers == mine.layers


# Errors in user code


def hurt(described: Job, **request: Any) -> CulmError:
    """The one error that ends a run; checks that no coroutine is left."""

    async def main() -> CulmError:
        before = asyncio.all_tasks()
        cluster = Cluster(
            described,
            prepare_run(described, RunConfig(strategy="none", **request)),
            VirtualClock(),
            SimulatedNetwork(),
        )
        with pytest.raises(CulmError) as caught:
            await cluster.run()
        assert asyncio.all_tasks() == before
        return caught.value

    return run_virtual(main())


@pytest.mark.parametrize(("layer", "node"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_an_error_in_a_layer_ends_the_run_with_its_node_and_its_layer(layer: int, node: int) -> None:
    error = hurt(job(layers=layers(layer, 6, boom)), stages=2)
    assert isinstance(error, LayerFailed)
    assert str(error).startswith(f"node {node}: layer {layer} (At) raised ValueError")
    assert "boom" in str(error)
    assert "jobs.py" in error.trace


def test_an_error_during_a_reduce_ends_the_other_workers_too() -> None:
    error = hurt(job(layers=layers(0, 3, boom)), pipelines=2, stages=2)
    assert "layer 0" in str(error)


@pytest.mark.parametrize("field", ["data", "loss", "collate", "optimizer", "lr_schedule"])
def test_an_error_in_any_function_of_the_job_ends_the_run_with_its_message(field: str) -> None:
    """Not in the model check, but in the middle of the run."""

    class Items(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            calls.append(1)
            if len(calls) > 30:
                raise ValueError("boom")
            return super().__getitem__(index)

    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 6:
            raise ValueError("boom")
        return torch.nn.functional.mse_loss(output, target)

    def collate(items: list[Any]) -> Any:
        calls.append(1)
        if len(calls) > 12:
            raise ValueError("boom")
        return torch.utils.data.default_collate(items)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("boom")

    def lr_schedule(step: int) -> float:
        return 1.0 if step == 0 else boom(torch.zeros(1)).item()

    changed = {
        "data": Items(DATA),
        "loss": loss,
        "collate": collate,
        "optimizer": lambda parameters: Optimizer(parameters, lr=0.1),
        "lr_schedule": lr_schedule,
    }[field]
    error = hurt(job(**{field: changed}), stages=2)
    assert isinstance(error, RunError)
    assert "boom" in str(error)
    assert str(error).startswith("node ")


def test_a_loss_that_is_not_a_number_ends_the_run_before_it_is_learned_from() -> None:
    error = hurt(job(layers=layers(1, 5, nan)), stages=2)
    assert isinstance(error, NonFiniteLoss)
    assert "the loss of step 1 is nan" in str(error)


def test_a_loss_that_is_not_a_number_can_be_skipped_and_is_counted() -> None:
    found = simulate(job(layers=layers(1, 5, nan), nonfinite="skip", steps=4), stages=2)
    assert found.summary["skipped_steps"] == 1
    assert found.summary["steps"] == 4


# Lost nodes


@pytest.mark.parametrize("node", range(4))
def test_a_node_that_vanishes_at_any_moment_ends_the_run_with_its_number(node: int) -> None:
    """From its join to after the result; the first node, which leads, is no exception."""
    described = job(layers=[linear] * 2, steps=2)
    setup = prepare_run(described, RunConfig(pipelines=2, stages=2, strategy="none"))

    def ending(after: float) -> str:
        async def script(cluster: Cluster) -> None:
            await asyncio.sleep(after)
            cluster.kill(node)

        cluster = Cluster(described, setup, VirtualClock(lambda *_: 0.01), SimulatedNetwork(latency=0.001))
        try:
            run_virtual(cluster.run(script))
        except CulmError as error:
            return f"{type(error).__name__}: {error}"
        return "finished"

    endings: list[str] = []
    while endings[-3:] != ["finished"] * 3:
        endings.append(ending((len(endings) + 1) * 0.007))
    first = endings.index("finished")
    assert first > 15
    assert set(endings[first:]) == {"finished"}
    assert all(text.startswith(f"NodeLost: node {node}") for text in endings[:first]), endings[:first]


def test_the_message_for_a_lost_node_names_the_step_and_how_to_resume(tmp_path: Path) -> None:
    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(2)
        cluster.kill(1)

    with pytest.raises(NodeLost) as caught:
        simulate(job(steps=10**6), stages=2, out=str(tmp_path), checkpoint_every=2, script=script)
    assert str(caught.value) == (
        "node 1 was lost in step 3 and strategy none survives no loss (on several nodes, auto chooses one that does): "
        f"resume it with --resume {tmp_path}"
    )
    with pytest.raises(NodeLost, match=f"in step 3 .*: resume it with --resume {tmp_path}"):
        simulate(job(steps=10**6), stages=2, out=str(tmp_path), resume=str(tmp_path), script=script)
    with pytest.raises(NodeLost, match="it had no checkpoint yet"):
        simulate(job(steps=10**6), stages=2, script=script)


def test_a_worker_that_dies_before_it_registers_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from culm.runtime.worker import Worker

    alive = Worker.run

    async def run(self: Worker) -> None:
        if self.node != 1:
            await alive(self)

    monkeypatch.setattr(Worker, "run", run)
    assert str(hurt(job(), stages=2)).startswith("node 1 was lost in step 0")


@pytest.mark.parametrize("node", [0, 1])
def test_a_worker_that_dies_ends_its_node(monkeypatch: pytest.MonkeyPatch, node: int) -> None:
    """Also on the leader's node, whose agent lives just long enough to report it."""
    from culm.runtime.train_loop import TrainLoop

    alive = TrainLoop._evaluate_and_save

    async def after(self: TrainLoop, *arguments: Any) -> None:
        transport = self._context.transport
        if self._context.node == node:
            transport.send_message(transport.address, messages.encode(messages.StopNow()))
        await alive(self, *arguments)

    monkeypatch.setattr(TrainLoop, "_evaluate_and_save", after)
    assert str(hurt(job(steps=50), stages=2)).startswith(f"node {node} was lost in step ")


def test_a_report_of_an_unreachable_peer_counts_only_if_the_store_knows_no_loss() -> None:
    """The store reports a lost node a moment later; a broken connection between live nodes ends the run too."""

    def suspicion(*, gone: bool) -> CulmError:
        async def script(cluster: Cluster) -> None:
            await cluster.wait_until_committed(1)
            failed = messages.FailureReport(0, "NodeLost", "a sum over 2 workers broke off")
            cluster.network.endpoints["worker-0"].send_message("agent-0", messages.encode(failed))
            await asyncio.sleep(0.5)
            if gone:
                cluster.kill(1)

        with pytest.raises(CulmError) as caught:
            simulate(job(steps=10**6), stages=2, cost=lambda *_: 0.1, script=script)
        return caught.value

    assert str(suspicion(gone=True)).startswith("node 1 was lost")
    assert str(suspicion(gone=False)) == "node 0: a sum over 2 workers broke off"


def test_the_launcher_can_end_a_run() -> None:
    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(1)
        cluster.store.write("result", encode(RunResult(error="RunError", message="the launcher ended the run")))

    with pytest.raises(RunError, match="the launcher ended the run"):
        simulate(job(steps=10**6), stages=2, script=script)


def lone_leader(store: MemoryStore) -> Leader:
    """A leader without agents and workers. Call it on a virtual event loop."""
    described = job()
    setup = prepare_run(described, RunConfig(stages=2, strategy="none"))
    endpoint = SimulatedNetwork().endpoint("agent-0")
    seams = (endpoint, VirtualClock(), store.client("agent-0"))
    return Leader(described, setup, 0, *seams, HangDetector(5.0, 0.0), InlineHookRunner(described))


def test_of_two_results_the_first_one_stays() -> None:
    async def main() -> None:
        store = MemoryStore()
        store.write("result", b"the first")
        leader = lone_leader(store)
        leader.inbox.put_nowait(leader.state.node_lost_error(1))
        await leader.run()
        assert store.read("result") == b"the first"

    run_virtual(main())


@pytest.mark.parametrize("kind", ["recovery", "reshape"])
def test_a_session_lost_while_an_epoch_is_planned_ends_this_leader_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async def lose_session(planning: PlanningCalls, order: object) -> None:
        raise SessionLost("the lease of agent-0 has expired")

    orders: dict[str, PlanRecovery | PlanReshape] = {
        "recovery": PlanRecovery(2, {}, 0, (), {}, (), {}, 0.0),
        "reshape": PlanReshape(2, {}, {}, 0, {}, (2, 1)),
    }
    monkeypatch.setattr(PlanningCalls, f"plan_{kind}", lose_session)

    async def main() -> None:
        store = MemoryStore()
        leader = lone_leader(store)
        await leader._plan_in_background(Call(1, orders[kind]))
        with pytest.raises(SessionLost):
            await leader.run()
        assert store.read("result") is None, "the next leader continues the run"

    run_virtual(main())


# The hook


def test_the_hook_is_called_after_every_step_in_order_with_what_the_folder_has(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    simulate(job(steps=4, on_step=lambda metrics: seen.append(dict(metrics))), stages=2, out=str(tmp_path))
    assert [metrics["step"] for metrics in seen] == [0, 1, 2, 3]
    assert {"step", "loss", "samples", "t"} <= seen[0].keys()


@pytest.mark.parametrize("last", [0, 2])
def test_the_hook_can_end_the_run_after_a_step(tmp_path: Path, last: int) -> None:
    def stop(metrics: StepMetrics) -> object:
        return culm.STOP if metrics["step"] == last else None

    found = simulate(job(steps=50, on_step=stop), pipelines=2, stages=2, out=str(tmp_path))
    assert found.summary["steps"] == last + 1
    assert found.summary["checkpoints"] == [last + 1]
    assert found.weights_sha256 == simulate(job(steps=last + 1), pipelines=2, stages=2).weights_sha256


def test_an_error_in_the_hook_ends_the_run_with_its_message() -> None:
    error = hurt(job(on_step=lambda metrics: boom(torch.zeros(1))), stages=2)
    assert str(error) == "Job.on_step raised ValueError: boom"


# Evaluation and checkpoints


def test_evaluations_are_those_of_one_process(tmp_path: Path) -> None:
    described = job(steps=5, evaluate=DATA[:7], evaluate_every=2)
    found = simulate(described, pipelines=2, stages=2, out=str(tmp_path))
    alone = reference(described).evaluations
    assert found.summary["evaluations"] == pytest.approx(alone)
    assert list(found.summary["evaluations"]) == [1, 3]


def test_an_evaluation_with_zero_weight_is_none() -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        counts = target.abs().sum(1) > 0
        return ((output - target) ** 2).sum(1)[counts].sum(), counts.sum()

    learned = [(x, torch.ones_like(y)) for x, y in DATA]
    described = job(data=learned, loss=loss, evaluate=DATA[:7], evaluate_every=2)
    assert simulate(described, pipelines=2, stages=2).evaluations == reference(described).evaluations == {}


def committed(out: Path | str) -> list[int]:
    return CheckpointCatalog(Storage(f"{out}/checkpoints")).steps()


def test_the_last_step_is_always_saved_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    found = simulate(job(steps=7), stages=2, out=str(tmp_path), checkpoint_every=2, keep_last=2)
    assert found.summary["checkpoints"] == [2, 4, 6, 7]
    assert committed(tmp_path) == [6, 7]
    CheckpointCatalog(Storage(f"{tmp_path}/checkpoints")).check(7)


def test_a_step_is_saved_once_where_the_interval_and_the_end_meet(tmp_path: Path) -> None:
    assert simulate(job(steps=4), stages=2, out=str(tmp_path), checkpoint_every=2).summary["checkpoints"] == [2, 4]


def test_without_a_folder_nothing_is_saved() -> None:
    assert simulate(job(), stages=2).summary["checkpoints"] == []


def test_a_resumed_run_ends_with_the_weights_of_a_failure_free_one(tmp_path: Path) -> None:
    out = str(tmp_path / "run")

    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(4)
        cluster.kill(1)

    with pytest.raises(NodeLost):
        simulate(job(steps=8), pipelines=2, stages=2, out=out, checkpoint_every=3, script=script)
    assert committed(out) == [3]
    found = simulate(job(steps=8), pipelines=2, stages=2, out=out, resume=out)
    assert found.summary["steps"] == 8
    assert found.state_sha256 == simulate(job(steps=8), pipelines=2, stages=2).state_sha256


def test_a_checkpoint_that_a_resume_has_passed_over_takes_no_place(tmp_path: Path) -> None:
    """Its size is right, so that only the resume has noticed the damage."""
    out = str(tmp_path)
    simulate(job(steps=8), stages=2, out=out, checkpoint_every=2, keep_last=2)
    assert committed(out) == [6, 8]
    file = next(tmp_path.glob("checkpoints/step-00000008/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    simulate(job(steps=10), stages=2, out=out, checkpoint_every=10, keep_last=2, resume=out)
    assert committed(out) == [6, 10]


def unbiased() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def deeper() -> nn.Module:
    return nn.Sequential(linear())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": torch.optim.SGD}, "made with optimizer='AdamW', the job has 'SGD': resume with the same"),
        ({"tied": [("0.weight", "1.weight")]}, "made with tied=.*, the job has .*: resume with the same"),
        ({"layers": [linear, unbiased]}, "has a tensor '1.bias', which no layer has: it is from another model"),
        ({"layers": [linear, deeper]}, "has no tensor '1.0.bias': it is from another model"),
    ],
    ids=["optimizer", "tied", "surplus", "missing"],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    out = str(tmp_path / "run")
    made = job(layers=[linear, linear], optimizer=torch.optim.AdamW, steps=1)
    simulate(made, out=out)
    with pytest.raises(UsageError, match=sentence):
        prepare_run(replace(made, **changes), RunConfig(resume=out, out=out))


def test_a_disk_that_stays_full_is_one_sentence_at_the_end_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = os.write, [False]

    def write(descriptor: int, data: Any) -> int:
        full[0] = full[0] or (tmp_path / "checkpoints" / "step-00000004").exists()
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    error = hurt(job(steps=8), stages=2, out=str(tmp_path), checkpoint_every=2)
    monkeypatch.undo()
    assert str(error).startswith("all steps are done, but the checkpoint of step 8 could not be written to ")
    assert f": could not write {tmp_path}/checkpoints/step-00000008/shard-00000008-" in str(error)
    assert "the disk is full" in str(error)
    assert committed(tmp_path) == [2]
    CheckpointCatalog(Storage(f"{tmp_path}/checkpoints")).check(2)


def test_a_commit_that_fails_is_retried_with_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CheckpointCatalog.commit

    def commit(self: CheckpointCatalog, step: int, *arguments: Any, **named: Any) -> Any:
        if step == 4:
            raise CheckpointError("the disk is full")
        return real(self, step, *arguments, **named)

    monkeypatch.setattr(CheckpointCatalog, "commit", commit)
    found = simulate(job(steps=8), stages=2, out=str(tmp_path), checkpoint_every=2)
    assert found.summary["checkpoints"][-1] == 8
    assert 4 not in found.summary["checkpoints"]


# The leader itself


@pytest.mark.parametrize("method", ["open", "append", "write_json"])
def test_a_folder_that_can_never_be_written_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RunError("x cannot be written: No space left on device")

    monkeypatch.setattr(RunFolder, method, full)
    error = hurt(job(), stages=2, out=str(tmp_path))
    assert "could not be written to" in str(error)
    assert "(x cannot be written: No space left on device)" in str(error)


def test_an_exception_in_the_leader_ends_the_run_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: Any) -> None:
        raise ZeroDivisionError("our fault")

    monkeypatch.setattr(EventHandlers, "_handle_ready", fault)
    error = hurt(job(), stages=2)
    assert str(error).startswith("the leader failed: ZeroDivisionError: our fault (in fault, ")
    assert "test_run_lifecycle.py:" in str(error)
    assert "in fault" in error.trace


def test_a_leader_that_cannot_write_its_result_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fault(_: Leader) -> None:
        raise ZeroDivisionError("our fault")

    monkeypatch.setattr(Leader, "run", fault)
    described = job()
    cluster: list[Cluster] = []

    async def main() -> None:
        cluster.append(
            Cluster(
                described,
                prepare_run(described, RunConfig(stages=2, strategy="none")),
                VirtualClock(),
                SimulatedNetwork(),
            )
        )
        await cluster[0].run()

    with pytest.raises(ZeroDivisionError):
        run_virtual(main())
    assert b"node 0, the leader, was lost" in (cluster[0].store.read("result") or b"")


def test_nodes_that_would_not_be_exact_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from culm.cluster.agent.agent import Agent

    init = Agent.__init__

    def differing(self: Agent, described: Job, node: int, fingerprint: str, *rest: Any, **more: Any) -> None:
        init(self, described, node, f"machine {node}", *rest, **more)

    monkeypatch.setattr(Agent, "__init__", differing)
    error = hurt(job(exact=True), stages=2)
    assert str(error).startswith("nodes differ in what exact results depend on (machine 0; machine 1): use machines")
    simulate(job(), stages=2)  # without exact they may differ


def test_the_memory_of_a_leader_does_not_grow() -> None:
    """Its memory after sixty steps equals that after ten: a run may have a million."""
    sizes: dict[int, int] = {}

    async def script(cluster: Cluster) -> None:
        for step in (10, 60):
            await cluster.wait_until_committed(step)
            sizes[step] = sum(len(encode(value)) for value in held)

    held: list[Any] = []
    init = Leader.__init__

    def keep(self: Leader, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        held.extend([self.state.ledger, self.state.final_reports, self.state.checkpoints.completed_steps])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Leader, "__init__", keep)
        found = simulate(job(steps=64), stages=2, script=script)
    assert sizes[60] <= sizes[10] + 32
    assert found.summary["samples"] == 64 * 8


def test_a_leader_keeps_no_task_that_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It starts several per second, and may lead for weeks."""
    build_summary, counts = RunFiles.build_summary, []

    def count_tasks(files: RunFiles) -> dict[str, Any]:
        counts.append(len(files._tasks))
        return build_summary(files)

    monkeypatch.setattr(RunFiles, "build_summary", count_tasks)
    simulate(job(steps=40), stages=2, out=str(tmp_path), cost=lambda *_: 0.1)
    assert len(counts) == 1
    assert counts[0] < 20


def test_an_unexpected_error_beside_the_run_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(planning: PlanningCalls, order: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(PlanningCalls, "precompute_plans", fail)
    with pytest.raises(RunError, match="the leader failed: ValueError: a defect"):
        simulate_any(job(steps=10**6), pipelines=2, stages=2, strategy="reroute")
