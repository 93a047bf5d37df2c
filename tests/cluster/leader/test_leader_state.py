"""The leader's state machine without clock, network or processes, and the replay of its input log."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import msgspec
import pytest
from tests.cached_runs import run_with_faults
from tests.tiny_jobs import job
from typer.testing import CliRunner

from culm import Job
from culm.cli import app
from culm.cluster.leader import leader_state, policy_case, reshaped_epoch
from culm.cluster.leader.events import (
    BuildShape,
    Call,
    CommitCheckpoint,
    Completed,
    DecideReshape,
    EndedWorkers,
    EndLeading,
    HookTimer,
    Instruction,
    KeyChanged,
    NodeEvicted,
    PlannedEpoch,
    PlanRecovery,
    PlanReshape,
    ProbeWorkers,
    ReshapeDecided,
    ReshapeVerdict,
    ReturnTimer,
    SendMessage,
    SendToAll,
    ShapeBuilt,
    Started,
    StartHook,
    WriteEvent,
    WriteStep,
)
from culm.cluster.leader.leader_state import JobFacts, LeaderState, is_planning
from culm.cluster.leader.next_epoch import recovery_epoch
from culm.cluster.leader.output import input_log
from culm.cluster.leader.output.hook_runner import HookResult
from culm.cluster.leader.phases import InvalidTransition, Phase, PhaseHistory
from culm.cluster.leader.reshaped_epoch import layer_model_of
from culm.cluster.prepare_run import prepare_run
from culm.cluster.run_setup import NodeRecord, StepGate, encode
from culm.config import RunConfig
from culm.monitor import EvaluationInterval
from culm.plan.recover.lineage import WorkerInventory
from culm.plan.reshape.pipeline_shape import build_shape
from culm.runtime import messages
from culm.runtime.epoch import Epoch
from culm.testing import Faults
from culm.testing.chaos import make_job

NODES = 4
LAYERS = {0: (0, 1), 1: (2, 3)}
"""By stage."""
IMPURE = {"asyncio", "time", "os", "threading", "subprocess", "socket", "pathlib", "random"}
SHELL = {"culm.cluster.leader.output.hook_runner", "culm.cluster.leader.stored_snapshot"}
"""Modules of which the state machine takes the messages, and which contain the code that sends them as well."""


def hook_steps(instructions: list[Instruction]) -> list[int]:
    """The steps for which the instructions call the hook."""
    return [each.metrics.step for each in instructions if isinstance(each, StartHook)]


class Driver:
    """Feeds events to a LeaderState and answers its calls with True or nothing, except plans."""

    def __init__(self, gate: StepGate = "open", steps: int = 9) -> None:
        setup = prepare_run(job(steps=steps), RunConfig(pipelines=2, stages=2, strategy="reroute"))
        setup = msgspec.structs.replace(setup, gate=gate)
        self.state, self.now, self.plans = (
            LeaderState(JobFacts(False, 2, EvaluationInterval()), setup, 0, "agent-0", 0.0),
            0.0,
            list[Call](),
        )
        self.ended = tuple(f"worker-{node}" for node in range(NODES))
        """The workers whose process has ended, if the leader asks."""
        self.probed = list[tuple[str, ...]]()
        """The addresses it has asked."""
        self.feed(Started(None, None, {}, None, None))
        for node in range(NODES):
            record = NodeRecord(node, f"agent-{node}", (f"worker-{node}",), "kind")
            self.feed(KeyChanged(f"nodes/{node}", encode(record)))
        for node in range(NODES):
            self.feed(messages.LayersReady(node, 1, 0.1))

    def feed(self, event: object) -> list[Instruction]:
        self.now += 0.01
        found = self.state.handle(event, self.now)  # type: ignore[arg-type]
        self.state.validate(event)  # type: ignore[arg-type]
        while found and isinstance(found[-1], Call):
            call = found[-1]
            if is_planning(call):
                self.plans.append(call)
                break
            nothing = isinstance(call.body, CommitCheckpoint)
            if isinstance(call.body, ProbeWorkers):
                self.probed.append(call.body.addresses)
            result = EndedWorkers(self.ended) if isinstance(call.body, ProbeWorkers) else None if nothing else True
            found = found[:-1] + self.state.handle(Completed(call.number, result), self.now)
        return found

    def replace_leader(self, *, lost: int = 0, successor: int = 1) -> None:
        """Another node becomes the leader: it knows what is in the store."""
        old, number = self.state, successor
        assert old.epoch is not None
        epoch, record = messages.encode(old.epoch), old.encode_snapshot().join()
        nodes = {node: encode(known) for node, known in old.members.nodes.items() if node != lost}
        self.state = LeaderState(old.job, old.initial_setup, number, f"agent-{number}", self.now)
        self.feed(Started(epoch, record, nodes, None, lost))

    def lose(self, node: int) -> list[Instruction]:
        return self.feed(KeyChanged(f"nodes/{node}", None))

    def commit(self, step: int) -> list[Instruction]:
        """Every worker completes a step. Returns the instructions that follow the last report."""
        found: list[Instruction] = []
        for node in range(NODES):
            loss, weight = (1.0, 4.0) if node % 2 else (None, None)
            report = messages.StepReport(node, 1, step, self.now, messages.count_runs((1,) * 4, (1,) * 4), loss, weight)
            found = self.feed(report)
        return found

    def fail(self, node: int, error: str = "ECC") -> list[Instruction]:
        """A worker raises an exception in an action of step 1."""
        action = messages.FailedAction(1, 1, "1F0", "RuntimeError", error)
        return self.feed(messages.FailureReport(node, "LayerFailed", error, "", action=action))

    def report(self, *nodes: int, step: int = 1) -> None:
        """These workers leave the epoch; each holds the weights of its stage for a step."""
        halt = self.state.handlers.epoch_change.halt_in_progress
        assert halt is not None
        for node in nodes:
            held = WorkerInventory(
                rebuild_epoch=1, weight_versions={node % 2: step}, layers_by_step={step: LAYERS[node % 2]}
            )
            self.feed(messages.HaltReport(node, halt.next_number, held))


def test_a_node_lost_while_the_next_epoch_is_planned_restarts_the_halt_and_the_plan_is_ignored() -> None:
    leader = Driver()
    leader.lose(3)
    leader.report(0, 1, 2)
    assert (leader.state.phase, len(leader.plans)) == (Phase.DECIDING, 1)
    leader.lose(2)
    assert leader.state.phase == Phase.HALTING
    assert leader.feed(Completed(leader.plans[0].number, True)) == []


def test_a_node_lost_while_another_shape_is_planned_restarts_the_halt() -> None:
    leader = WaitingNode()
    leader.feed(ReshapeDecided(1, VERDICT))
    while leader.state.phase != Phase.HALTING:
        leader.commit_next()
    leader.report(0, 1, 2, 3, step=leader.next_step)
    assert (leader.state.phase, len(leader.plans)) == (Phase.DECIDING, 1)
    assert isinstance(leader.plans[0].body, PlanReshape)
    leader.lose(2)
    assert leader.state.phase == Phase.HALTING
    assert leader.feed(Completed(leader.plans[0].number, True)) == []


def test_the_history_is_encoded_when_something_happens_and_not_with_every_step() -> None:
    leader = Driver()
    snapshots = [leader.state.encode_snapshot()]
    for step in range(3):
        leader.commit(step)
        snapshots.append(leader.state.encode_snapshot())
    assert len({each.progress for each in snapshots}) == 4
    assert len({id(each.history) for each in snapshots}) == 1
    leader.lose(3)
    assert leader.state.encode_snapshot().history != snapshots[0].history


def test_events_wait_while_the_next_epoch_is_planned() -> None:
    leader = Driver()
    leader.lose(3)
    leader.report(0, 1, 2)
    beat = messages.Heartbeat(0, 1, 7, 2.5)
    assert leader.feed(beat) == []
    assert leader.state.slowest_action_s == 0.0


def decided_layouts(instructions: list[Instruction]) -> list[str]:
    """The layouts of drains that begin."""
    events = [each.event for each in instructions if isinstance(each, WriteEvent)]
    return [event["layout"] for event in events if event["kind"] == "drain"]


class WaitingNode(Driver):
    """A cluster with a node more than it has slots, in which the policy has been asked for another shape."""

    def __init__(self) -> None:
        super().__init__(steps=40)
        self.feed(KeyChanged("nodes/4", encode(NodeRecord(4, "agent-4", ("worker-4",), "kind"))))
        self.next_step, self.asked = 0, list[DecideReshape]()
        while not self.asked:
            self.asked = [each for each in self.commit_next() if isinstance(each, DecideReshape)]

    def commit_next(self) -> list[Instruction]:
        self.next_step += 1
        return self.commit(self.next_step - 1)


VERDICT = ReshapeVerdict("uneven", "3+2", (3, 2), "it is faster")


def test_commits_do_not_wait_for_the_policy_and_use_its_decision_when_it_is_there() -> None:
    leader = WaitingNode()
    assert any(isinstance(each, SendToAll) for each in leader.commit_next()), "the commit is announced"
    assert leader.feed(ReshapeDecided(1, VERDICT)) == []
    assert decided_layouts(leader.commit_next()) == ["3+2"]


class Requested(WaitingNode):
    """A cluster in which another layout has been requested from outside."""

    def request(self, layout: str) -> BuildShape:
        """The instruction to build the shape of a layout."""
        (asked,) = [each for each in self.feed(KeyChanged("wish/layout", layout.encode())) if type(each) is BuildShape]
        return asked

    def build(self, asked: BuildShape) -> list[Instruction]:
        """The shape is there."""
        model = layer_model_of(self.state.initial_setup)
        return self.feed(ShapeBuilt(asked.depths, build_shape(model, asked.depths)))


def test_commits_do_not_wait_for_a_requested_shape_and_its_epoch_is_planned_by_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader = Requested()
    with monkeypatch.context() as patch:
        for module in (policy_case, reshaped_epoch):  # wherever the state machine could reach it
            patch.setattr(module, "build_shape", None)
        asked = leader.request("3+2")
        found = leader.commit_next()
        assert any(isinstance(each, SendToAll) for each in found), "the commit is announced"
        assert decided_layouts(found) == []
    assert leader.build(asked) == []
    with monkeypatch.context() as patch:
        for module in (policy_case, reshaped_epoch):
            patch.setattr(module, "build_shape", None)
        assert decided_layouts(leader.commit_next()) == ["3+2"]
        while leader.state.phase != Phase.HALTING:
            leader.commit_next()
        leader.report(0, 1, 2, 3, step=leader.next_step)
    (plan,) = leader.plans
    assert isinstance(plan.body, PlanReshape)
    assert plan.body.shape is not None
    assert plan.body.depths == plan.body.shape.depths == asked.depths


def test_an_impossible_requested_layout_is_refused_before_anything_drains() -> None:
    leader = Requested()
    asked = leader.request("7+1")
    assert refusals(leader.feed(ShapeBuilt(asked.depths, None, "6 layers fill at most 6 stages"))) == [
        "cannot use the requested layout 7+1: 6 layers fill at most 6 stages"
    ]
    assert decided_layouts(leader.commit_next()) == []


def test_of_two_requested_layouts_the_newer_one_counts() -> None:
    leader = Requested()
    older, newer = leader.request("1x4"), leader.request("3+2")
    for asked in (newer, older):
        assert leader.build(asked) == []
    assert decided_layouts(leader.commit_next()) == ["3+2"]


def test_a_layout_that_is_requested_while_another_change_drains_is_not_forgotten() -> None:
    leader = Requested()
    leader.build(leader.request("3+2"))
    assert decided_layouts(leader.commit_next()) == ["3+2"]
    leader.build(leader.request("1x4"))
    leader.lose(3)
    assert leader.state.phase == Phase.HALTING
    leader.report(0, 1, 2, step=leader.next_step)
    controller = leader.state.handlers.epoch_change.reshape_controller
    assert controller._requested_shape is not None
    assert controller._requested_shape.depths == (4,)


def test_a_decision_for_an_earlier_epoch_is_not_used() -> None:
    leader = WaitingNode()
    leader.feed(ReshapeDecided(0, VERDICT))
    assert decided_layouts(leader.commit_next()) == []


def test_a_loss_is_handled_while_the_policy_decides() -> None:
    leader = WaitingNode()
    leader.lose(3)
    assert leader.state.phase == Phase.HALTING
    assert leader.feed(ReshapeDecided(1, VERDICT)) == []
    assert leader.state.phase == Phase.HALTING


def test_a_session_that_ends_while_the_next_epoch_is_planned_costs_a_new_plan_and_no_node() -> None:
    leader = Driver()
    leader.lose(3)
    leader.report(0, 1, 2)
    leader.ended = ()
    leader.lose(2)
    assert (leader.state.phase, len(leader.plans)) == (Phase.DECIDING, 2)
    assert leader.state.members.departed_nodes == {3}


def test_a_member_without_a_session_that_is_evicted_is_lost() -> None:
    leader = Driver()
    leader.ended = ()
    leader.feed(messages.Heartbeat(2, 1, 7, 0.1))
    leader.lose(2)
    assert leader.state.phase == Phase.TRAINING
    assert leader.probed == [("agent-2", "worker-2")]  # in an order that a replay repeats
    leader.feed(NodeEvicted(2))
    assert (leader.state.phase, leader.state.members.departed_nodes) == (Phase.HALTING, {2})


def refusals(instructions: list[Instruction]) -> list[str]:
    """Why nodes were refused."""
    events = [each.event for each in instructions if isinstance(each, WriteEvent)]
    return [event["why"] for event in events if event["kind"] in ("refused", "on_probation")]


def test_the_next_leader_refuses_a_quarantined_machine() -> None:
    leader = Driver()
    leader.state.members.nodes[3] = NodeRecord(3, "machine:1", ("worker-3",), "kind")
    leader.state.handlers.membership.refuse_wrong_machine(3)
    leader.lose(3)
    leader.replace_leader()
    again = NodeRecord(9, "machine:2", ("worker-9",), "kind")
    assert refusals(leader.feed(KeyChanged("nodes/9", encode(again)))) == [
        "its machine is quarantined: its results were wrong"
    ]


def test_the_next_leader_knows_that_the_cache_of_a_worker_was_emptied() -> None:
    leader = Driver()
    leader.commit(0)
    action = messages.FailedAction(1, 1, "1F0", "OutOfMemoryError", "", out_of_memory=True)
    leader.feed(messages.FailureReport(1, "LayerFailed", "out of memory", "", action=action))
    leader.replace_leader()
    again = messages.FailedAction(leader.state.epoch_number, 1, "1F0", "OutOfMemoryError", "", out_of_memory=True)
    found = leader.feed(messages.FailureReport(1, "LayerFailed", "out of memory", "", action=again))
    (event,) = [each.event for each in found if isinstance(each, WriteEvent)]
    assert event["kind"] == "out_of_memory"
    assert "it gets fewer micro-batches" in event["why"]


def test_the_next_leader_removes_a_member_that_was_to_be_quarantined() -> None:
    """The leader is lost between its decision and the end of the epoch."""
    leader = Driver()
    leader.state.handlers.membership.refuse_wrong_machine(3)
    leader.replace_leader()
    halt = leader.state.handlers.epoch_change.halt_in_progress
    assert halt is not None
    assert (halt.lost_nodes, halt.expected_workers) == ({0, 3}, {1, 2})


def test_the_next_leader_lets_machines_wait_whose_nodes_were_removed_before() -> None:
    leader = Driver()
    for node in (2, 3):
        leader.state.members.nodes[node] = NodeRecord(node, "machine:1", (f"worker-{node}",), "kind")
        leader.feed(NodeEvicted(node))
        leader.lose(node)
    leader.replace_leader()
    again = NodeRecord(9, "machine:2", ("worker-9",), "kind")
    assert "admitted after a backoff" in refusals(leader.feed(KeyChanged("nodes/9", encode(again))))[0]


def test_a_worker_that_raises_reports_its_inventory_like_all_others() -> None:
    leader = Driver()
    leader.commit(0)
    (halt,) = [each for each in leader.fail(3) if isinstance(each, SendToAll)]
    assert halt.addresses == ("worker-0", "worker-1", "worker-2", "worker-3")
    leader.report(0, 1, 2, 3)
    assert isinstance(leader.plans[0].body, PlanRecovery)
    assert leader.plans[0].body.failed_slots == leader.plans[0].body.leaving_slots == (3,)


def test_the_same_exception_of_another_worker_while_the_epoch_changes_ends_the_run() -> None:
    leader = Driver()
    leader.commit(0)
    leader.fail(3)
    ended = leader.fail(1)[-1]
    assert isinstance(ended, EndLeading)
    assert ended.error is not None
    assert "node 1: ECC; the same happened on node 3" in ended.error.message


def test_a_hook_that_returns_late_is_called_again_and_may_end_the_run() -> None:
    leader = Driver("hook")
    assert hook_steps(leader.commit(0)) == [0]
    leader.now += 60
    late = leader.feed(HookTimer(0, 0.0, 10.0))
    assert [each.metrics.step for each in late if isinstance(each, WriteStep)] == [0]
    assert hook_steps(leader.commit(1)) == []
    leader.feed(HookResult(0, {"own": 1.0}))
    assert hook_steps(leader.commit(2)) == [2]
    leader.now += 60
    leader.feed(HookTimer(2, 0.0, 10.0))
    leader.feed(HookResult(2, stopped=True))
    assert (leader.state.ledger.next_step, leader.state.end_step) == (3, 4), "step 3 may have begun"


def test_an_exception_before_the_first_commit_ends_the_run() -> None:
    assert isinstance(Driver().fail(3)[-1], EndLeading)


def expired_sessions() -> Driver:
    """The first node that has opened a new session becomes the leader, when the others have none yet."""
    before, leader = Driver(), Driver()
    assert before.state.epoch is not None
    leader.state = LeaderState(before.state.job, before.state.setup, 0, "agent-0", 1.0)
    own = {0: encode(NodeRecord(0, "agent-0", ("worker-0",), "kind"))}
    left = Started(messages.encode(before.state.epoch), None, own, None, None, sessions_expired=True)
    leader.feed(left)
    return leader


def rejoin(leader: Driver, node: int) -> list[Instruction]:
    record = NodeRecord(node, f"agent-{node}", (f"worker-{node}",), "kind")
    return leader.feed(KeyChanged(f"nodes/{node}", encode(record)))


def test_after_all_sessions_have_expired_no_epoch_begins_before_every_node_has_a_new_one() -> None:
    leader = expired_sessions()
    leader.report(0, 1, 2, 3)
    rejoin(leader, 1)
    rejoin(leader, 2)
    assert (leader.state.phase, leader.plans) == (Phase.DECIDING, [])
    rejoin(leader, 3)
    assert len(leader.plans) == 1


def test_a_node_without_a_new_session_in_time_is_lost_and_a_latecomer_is_dismissed() -> None:
    leader = expired_sessions()
    rejoin(leader, 1)
    rejoin(leader, 2)
    leader.feed(ReturnTimer())
    leader.report(0, 1, 2)
    planned = PlannedEpoch(epoch_without(leader, 3), "", "peers", False)
    leader.feed(Completed(leader.plans[0].number, planned))
    assert leader.state.phase == Phase.BUILDING
    (dismissed,) = [each for each in rejoin(leader, 3) if isinstance(each, SendMessage)]
    assert (dismissed.address, type(messages.decode(dismissed.body))) == ("agent-3", messages.Dismiss)


def epoch_without(leader: Driver, node: int) -> Epoch:
    """The epoch that a recovery plan would have, as far as the leader looks at it."""
    body = leader.plans[0].body
    assert isinstance(body, PlanRecovery)
    old = leader.state.epoch
    found = recovery_epoch(leader.state.setup, old, body.number, "agent-0", body.inventories, body.committed)  # type: ignore[arg-type]
    assert node not in {member.node for member in found.epoch.present_members}
    return found.epoch


def test_no_module_of_the_state_machine_awaits_or_reads_a_clock_or_does_io() -> None:
    """Its modules: all of the package that are imported from leader_state, except by modules that only run."""
    package = "culm.cluster.leader"
    folder, waiting, seen = Path(leader_state.__file__).parent, [f"{package}.leader_state"], set[str]()
    while waiting:
        name = waiting.pop()
        path = folder.joinpath(*name.removeprefix(package + ".").split(".")).with_suffix(".py")
        if name in seen or name in SHELL or not path.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not IMPURE.intersection(each.split(".")[0] for each in names), f"{name} imports one of {names}"
            assert not isinstance(node, ast.Await | ast.AsyncFunctionDef), f"{name} awaits in line {node.lineno}"
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            assert called not in ("open", "print", "input"), f"{name} calls {called}"
            waiting += [each for each in names if each.startswith(package + ".")]
    assert {"membership", "epoch_change", "worker_failures"} <= {name.rpartition(".")[2] for name in seen}


def test_after_the_end_there_are_no_instructions() -> None:
    leader = Driver()
    ended = leader.feed(messages.FailureReport(1, "JobError", "no", ""))
    assert isinstance(ended[-1], EndLeading)
    assert leader.lose(2) == []


def test_an_illegal_transition_names_both_phases_and_the_events() -> None:
    history = PhaseHistory()
    history.record("Started", Phase.WAITING)
    with pytest.raises(InvalidTransition, match=r"from waiting for nodes to recovering; the last events were Started"):
        history.record("KeyChanged", Phase.RECOVERING)


@functools.cache
def faulty_job() -> Job:
    return make_job((), True, 4)


def test_the_log_of_a_run_with_losses_is_replayed_with_the_same_instructions(tmp_path: Path) -> None:
    faults = Faults().kill(3, step=1, nth=2).kill(0, step=2, nth=1)
    run_with_faults(faulty_job(), faults, pipelines=2, stages=2, strategy="reroute", out=str(tmp_path))
    logs = sorted(tmp_path.glob(input_log.FILE_PATTERN))
    assert len(logs) == 2
    for path in logs:
        count, difference = input_log.replay(path)
        assert difference is None
        assert count > 10


def test_culm_replay_repeats_a_run_with_expired_sessions_an_exception_and_a_loss(tmp_path: Path) -> None:
    faults = Faults().pause_store(seconds=9.0, step=1, at="0F1").fail(3, step=2, at="1B2").kill(0, step=3, at="0F0")
    run_with_faults(faulty_job(), faults, pipelines=2, stages=2, strategy="reroute", out=str(tmp_path))
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert (replayed.exit_code, replayed.output.count("the same instructions")) == (0, 2), replayed.output


def test_a_log_with_other_times_shows_the_first_difference(tmp_path: Path) -> None:
    run_with_faults(faulty_job(), Faults(), pipelines=2, stages=2, strategy="reroute", out=str(tmp_path))
    (path,) = tmp_path.glob(input_log.FILE_PATTERN)
    header, entries = input_log.read_log(path)
    writer, state = input_log.InputLogWriter(tmp_path / "leader-9.log", header), header.new_state()
    for entry in entries:
        writer.add(entry.event, entry.now + 1.0, state.handle(entry.event, entry.now))
    writer.write()
    writer.close()
    _, difference = input_log.replay(tmp_path / "leader-9.log")
    assert difference is not None
    assert "WriteEvent" in difference.entry.names


def test_a_damaged_log_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run_with_faults(faulty_job(), Faults(), pipelines=2, stages=2, strategy="reroute", out=str(tmp_path))
    (path,) = tmp_path.glob(input_log.FILE_PATTERN)
    body = bytearray(path.read_bytes())
    at = body.index(b"\xa3now", len(body) // 2) + 1
    body[at] ^= 0x01  # in the name of a field
    path.write_bytes(body)
    replayed = CliRunner().invoke(app, ["replay", str(tmp_path)])
    assert replayed.exit_code == 2
    assert f"culm: {path} is damaged at event " in replayed.output


def test_a_full_log_keeps_its_beginning(tmp_path: Path) -> None:
    run_with_faults(faulty_job(), Faults(), pipelines=2, stages=2, strategy="reroute", out=str(tmp_path))
    (path,) = tmp_path.glob(input_log.FILE_PATTERN)
    header, entries = input_log.read_log(path)
    writer = input_log.InputLogWriter(tmp_path / "leader-9.log", header, max_bytes=path.stat().st_size // 2)
    state = header.new_state()
    for entry in entries:
        writer.add(entry.event, entry.now, state.handle(entry.event, entry.now))
    writer.write()
    writer.close()
    assert writer.is_full
    count, difference = input_log.replay(tmp_path / "leader-9.log")
    assert (count > 0, difference) == (True, None)


def test_that_gradients_are_not_summed_over_nccl_is_said_once() -> None:
    driver = Driver()
    why = "two workers use one GPU: give each its own NCCL_HOSTID"
    ready = messages.LayersReady(0, driver.state.epoch_number, 0.1, "gloo", reduce_fallback=why)
    written = [each.event for each in (*driver.feed(ready), *driver.feed(ready)) if isinstance(each, WriteEvent)]
    announced = [event for event in written if event["kind"] == "reduce_fallback"]
    assert [(event["reduce"], event["why"]) for event in announced] == [("gloo", why)]
    assert [event["reduce"] for event in written if event["kind"] == "ready"] == ["gloo"] * 2


def test_that_page_locked_memory_is_full_is_said_once() -> None:
    driver = Driver()
    full = messages.ShadowMemoryFull(0, driver.state.epoch_number, 3 << 20, 1 << 20, 2 << 20)
    done = [*driver.feed(full), *driver.feed(full)]
    written = [each.event for each in done if isinstance(each, WriteEvent)]
    assert [(e["needed"], e["lent"], e["cap"]) for e in written if e["kind"] == "shadow_memory_full"] == [
        (3 << 20, 1 << 20, 2 << 20)
    ] * 2
    shown = [each for each in done if b"page-locked memory is full" in getattr(each, "value", b"")]
    assert len(shown) == 1
