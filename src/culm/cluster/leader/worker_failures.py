"""Worker failures: what the leader does about an exception in the code that a worker runs.

The exception may be the fault of the machine (memory, GPU, disk) or of the job. To find out, another holder repeats the
action. Meanwhile the worker executes nothing, and its node hands over what it holds, like a node with notice. When the
step of the action is committed, the other holder has completed the action, and the node is declared lost. If the same
exception occurs at the same location on another node, the job is at fault and the run ends. The last holder of a layer
repeats the action itself, once, if there is no checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from culm.cluster.leader.checkpoints.checkpoint_epoch import returns_to_checkpoint
from culm.cluster.leader.events import FindSmallerStages, ReshapeVerdict
from culm.cluster.leader.leader_snapshot import FailureRecord, MemoryRecord
from culm.errors import LayerFailed
from culm.schedule import Plan
from culm.text_format import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from culm.cluster.leader.epoch_change import EpochChange
    from culm.cluster.leader.leader_snapshot import LeaderSnapshot
    from culm.cluster.leader.leader_state import Flow
    from culm.cluster.leader.membership import Membership
    from culm.plan.recover.lineage import WorkerInventory
    from culm.runtime import messages

COMPARED_FOR_S = 24 * 3600.0
"""How long a failure is compared with later ones: machines fail in the same library call now and then."""
_QUARANTINE_AFTER = 2
"""Failures of a machine or a GPU after which it is refused."""
_MEMORY_STEPS = _REPEAT_STEPS = 100
"""Steps after which a worker may run out of memory again, or the last holder of a layer raise again: what failed is
then repeated once more."""
_RELIEF_FACTORS = (2.0, 8.0)
"""A worker without memory for the work of lost workers gets as much as one that takes this many times as long: less of
it, then next to nothing."""
_MOST_RELIEFS = len(_RELIEF_FACTORS) + 2
"""After this many other layouts, the last of them other shapes, the run ends."""
_MEMORY_FIX = "use more stages (--stages), a smaller Job.micro_batch, or Job.recompute"


class WorkerFailures:
    """The exceptions of workers so far, and the nodes that are given up because of them."""

    def __init__(self, epoch_change: EpochChange) -> None:
        self._epoch_change, self._state = epoch_change, epoch_change.state
        self._membership: Membership | None = None
        self.failing_nodes: dict[int, int] = {}
        """Nodes that execute nothing and hand over their state; by node, the step whose commit ends that."""
        self._records: list[FailureRecord] = []
        self._repeated: dict[int, int] = {}
        """By node that was the last holder of a layer: the step in which it repeated a failed action."""
        self._returned: set[tuple[str, str]] = set()
        """Causes of failures after which the run has returned to a checkpoint."""
        self._out_of_memory: dict[tuple[int, tuple[int, ...]], int] = {}
        """By (worker, its stages): the step in which it ran out of memory and was repeated with an empty cache."""
        self.memory_relief: dict[int, int] = {}
        """By worker: how often another layout was tried because it ran out of memory with the work of lost workers."""
        self.impossible_stages: set[tuple[int, int]] = set()
        """(worker, stage): stages for which the memory of a worker does not suffice."""

    def connect(self, membership: Membership) -> None:
        """Set the object that handles lost nodes."""
        self._membership = membership

    # The snapshot.

    @property
    def records(self) -> tuple[FailureRecord, ...]:
        """All failures, in order."""
        return tuple(self._records)

    @property
    def returned_causes(self) -> tuple[tuple[str, str], ...]:
        """The causes of failures after which the run has returned to a checkpoint."""
        return tuple(sorted(self._returned))

    @property
    def out_of_memory(self) -> tuple[MemoryRecord, ...]:
        """The workers that ran out of memory."""
        return tuple(MemoryRecord(worker, stages, step) for (worker, stages), step in self._out_of_memory.items())

    def restore(self, snapshot: LeaderSnapshot) -> None:
        """Take over what the previous leader knew."""
        self._records, self.failing_nodes = list(snapshot.history.failures), dict(snapshot.failing_nodes)
        self._returned = set(snapshot.returned_causes)
        self._out_of_memory |= {(each.worker, each.stages): each.step for each in snapshot.out_of_memory}
        self.impossible_stages |= set(snapshot.impossible_stages)
        self.memory_relief |= snapshot.memory_relief

    # A failure.

    def handle_failure(self, report: messages.FailureReport) -> Flow[None]:
        """Act on an exception of a worker. Raises LayerFailed if it ends the run."""
        state, action = self._state, report.action
        assert action is not None
        if action.epoch < state.epoch_number:
            return  # the worker has left that epoch, and reported what it holds
        node = state.members.node_of(report.worker)
        if node in self.failing_nodes:  # it cannot hand over what it holds
            yield from self._declare_lost(node, "it cannot hand over its state")
            return
        if node in state.members.departed_nodes:
            return
        self._check_recoverable(report)
        if action.out_of_memory:
            yield from self._handle_out_of_memory(report)
            return
        record = self._new_record(report)
        self._check_cause(record, report)
        self._records.append(record)
        how = "another holder repeats the action, and the node hands over its state"
        state.log_event(
            "worker_failed",
            **state.members.event_fields(report.worker),
            step=self._step_of(report),
            action=action.action,
            error=f"{action.exception} at {action.location}",
            device=action.device or None,
            why=f"{report.message}; {how}",
        )
        state.show_incident(f"{record.where}: {report.message}; {how}")
        if returns_to_checkpoint(state.setup, {node}):
            self._returned.add(record.cause)
            yield from self._declare_lost(node, "the run returns to a checkpoint")
            return
        self.failing_nodes[node] = self._step_of(report)
        state.recovery_metrics.unrecovered_nodes.add(node)
        state.put_snapshot()
        if self._epoch_change.halt_in_progress is None:
            self._epoch_change.start_halt()

    def _check_recoverable(self, report: messages.FailureReport) -> None:
        """Raise the error if the run cannot continue without the worker, or nothing shows yet that the job works."""
        state = self._state
        if state.epoch is None or not state.setup.survives_losses or state.ledger.next_step <= state.setup.start:
            raise self._error(report, "")

    def _check_cause(self, record: FailureRecord, report: messages.FailureReport) -> None:
        """Raise the error if the failure shows that the job is at fault."""
        for other in self._records:
            if other.cause != record.cause or record.at - other.at > COMPARED_FOR_S:
                continue
            if not self._same_machine(other, record):
                raise self._error(report, f"the same happened on {other.where}: it is not the fault of one machine")
        if record.cause in self._returned:
            raise self._error(report, "the same happened before the run returned to a checkpoint")

    def _same_machine(self, one: FailureRecord, other: FailureRecord) -> bool:
        """Whether two failures are of one node, or of one machine that has joined again."""
        if one.node == other.node:
            return True
        if one.host != other.host:
            return False
        if one.action.device and other.action.device:
            return one.action.device == other.action.device
        nodes = self._state.members.nodes.values()
        return all(record.host != one.host or record.node in (one.node, other.node) for record in nodes)

    def _new_record(self, report: messages.FailureReport) -> FailureRecord:
        state, action = self._state, report.action
        assert action is not None
        node = state.members.node_of(report.worker)
        known = state.members.nodes.get(node)
        in_action = f" in {action.action} of step {action.step}" if action.action else ""
        where = f"{state.members.describe_worker(report.worker)}{in_action}"
        return FailureRecord(node, "" if known is None else known.host, state.now, where, report.message, action)

    def _step_of(self, report: messages.FailureReport) -> int:
        """The step of the action that raised."""
        assert report.action is not None
        return max(self._state.ledger.next_step, report.action.step)

    def _error(self, report: messages.FailureReport, why: str) -> LayerFailed:
        """The error that ends the run, which names the node and, in `why`, another one."""
        text = f"{self._state.members.describe_worker(report.worker)}: {report.message}"
        error = LayerFailed(f"{text}; {why}" if why else text)
        error.trace = report.traceback
        return error

    def repeat_in_place(self) -> None:
        """Only failing nodes hold some layer, and there is no checkpoint: they repeat the actions themselves, once.
        Raises LayerFailed if they have done so before."""
        state = self._state
        for node, step in self.failing_nodes.items():
            record = next(record for record in reversed(self._records) if record.node == node)
            why = "no other node holds its layers, and there is no checkpoint"
            before = self._repeated.get(node)
            if before is not None and step - before <= _REPEAT_STEPS:
                raise LayerFailed(f"{record.where}: {record.message}; it was repeated once; {why}")
            self._repeated[node] = step
            state.log_event("repeated", node=node, step=step, why=why)
            state.show_incident(f"node {node} repeats the action that raised an exception: {why}")
        state.recovery_metrics.unrecovered_nodes -= self.failing_nodes.keys()
        self.failing_nodes.clear()
        state.put_snapshot()

    # Out of memory.

    def _handle_out_of_memory(self, report: messages.FailureReport) -> Flow[None]:
        """The first time, everything is repeated with an empty cache. Then another layout is used: a worker that stands
        in for another is relieved of that, and one that does work of lost workers gets less of it or, if that does not
        suffice, the shape changes. The run ends if there is no other layout."""
        state, action, worker = self._state, report.action, report.worker
        assert action is not None
        assert state.epoch is not None
        stages, extra = self._stages_of(worker)
        where = state.members.event_fields(worker)
        step, before = self._step_of(report), self._out_of_memory.get((worker, stages))
        if before is None or step - before > _MEMORY_STEPS:
            self._out_of_memory[worker, stages] = step
            why = f"{report.message}; its cache is emptied and the action is repeated once"
        elif extra:
            self.impossible_stages |= {(worker, stage) for stage in extra}
            why = f"{report.message}; it cannot hold {_stages_text(extra)} as well: another layout is used"
        elif how := (yield from self._relieve(worker)):
            why = f"{report.message}; with the work of lost workers its memory does not suffice: {how}"
        else:
            raise self._error(report, f"{self._memory_need(worker, stages)}: {_MEMORY_FIX}")
        state.log_event("out_of_memory", **where, step=step, action=action.action, why=why)
        state.show_incident(f"{state.members.describe_worker(worker)}: {why}")
        if self._epoch_change.halt_in_progress is None:
            self._epoch_change.start_halt()

    def _relieve(self, worker: int) -> Flow[str]:
        """Choose another layout for a worker that does work of lost workers. Returns how it differs; empty: there is no
        such work, or no other layout."""
        state, level = self._state, self.memory_relief.get(worker, 0) + 1
        if state.epoch is None or not state.members.has_empty_slot(state.epoch) or level > _MOST_RELIEFS:
            return ""
        self.memory_relief[worker] = level
        if level <= len(_RELIEF_FACTORS):
            return "it gets fewer micro-batches, and keeps no more activations than in 1F1B"
        verdict: ReshapeVerdict | None = yield FindSmallerStages()
        if verdict is None or verdict.depths is None:
            return ""
        self._epoch_change.reshape_controller.request_smaller_stages(verdict)
        return verdict.why

    def relief_factors(self, slots: Mapping[int, int]) -> dict[int, float]:
        """By slot: how many times as long as its peers a worker is assumed to take, so that it gets less work."""
        last = len(_RELIEF_FACTORS)
        return {
            slots[worker]: _RELIEF_FACTORS[min(level, last) - 1]
            for worker, level in self.memory_relief.items()
            if worker in slots
        }

    def _stages_of(self, worker: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(stages that a worker runs or shadows, those of them that are not its own)."""
        epoch = self._state.epoch
        slot = None if epoch is None else epoch.slot_of(worker)
        if epoch is None or slot is None:
            return (), ()
        held = {*Plan.from_text(epoch.plan).stages_of(slot)}
        held |= {shadow.stage for shadow in epoch.shadows if shadow.slot == slot}
        own = Plan.from_text(self._state.setup.plan).stages_of(slot)
        return tuple(sorted(held)), tuple(sorted(held.difference(own)))

    def _memory_need(self, worker: int, stages: Sequence[int]) -> str:
        """What the stages of a worker need, as far as the layers were measured."""
        setup, epoch = self._state.setup, self._state.epoch
        spans = [span for g, span in enumerate(setup.segments) if g % setup.stages in stages]
        layers = [layer for first, end in spans for layer in setup.layers[first:end]]
        slot = None if epoch is None else epoch.slot_of(worker)
        live = 1 if epoch is None or slot is None else Plan.from_text(epoch.plan).most_activations(slot)
        needed = sum(layer.resident_bytes + live * layer.activation_bytes for layer in layers)
        available = f" of {format_bytes(setup.memory)}" if setup.memory else ""
        text = f", which needs about {format_bytes(needed)}" if needed else ""
        return f"the memory{available} does not suffice for {_stages_text(stages)}{text}"

    def remove_impossible(self, slots: Mapping[int, int], inventories: dict[int, WorkerInventory]) -> None:
        """Remove the stages that a worker has no memory for from the inventories, which are by slot."""
        for worker, stage in self.impossible_stages:
            slot = slots.get(worker)
            if slot in inventories and stage in inventories[slot].weight_versions:
                versions = {at: v for at, v in inventories[slot].weight_versions.items() if at != stage}
                inventories[slot] = msgspec.structs.replace(inventories[slot], weight_versions=versions)

    # The end of a failing node.

    def slots(self, slots: Mapping[int, int]) -> list[int]:
        """The slots of failing nodes. `slots`: by worker."""
        workers = self._state.members.workers_of(self.failing_nodes)
        return sorted(slot for worker, slot in slots.items() if worker in workers)

    def record_return(self) -> None:
        """The run returns to a checkpoint, because only failing nodes hold some layer."""
        self._returned |= {record.cause for record in self._records if record.node in self.failing_nodes}

    def handle_committed(self, step: int) -> None:
        """A step is committed: other holders have completed the actions that failed in it. Declare these nodes lost."""
        if self._epoch_change.halt_in_progress is None:
            done = [node for node, failed_in in self.failing_nodes.items() if failed_in <= step]
            self._let_go(done, "another holder has completed the action")

    def handle_new_epoch(self, nodes: Collection[int]) -> None:
        """A new epoch has these nodes: declare the failing nodes lost that are not among them."""
        epoch = self._state.epoch
        if epoch is None or epoch.changes_shape or not self._state.members.has_empty_slot(epoch):
            self.memory_relief.clear()
        self._let_go([node for node in self.failing_nodes if node not in nodes], "the run continues without it")

    def forget(self, nodes: Iterable[int]) -> None:
        """Nodes have disappeared."""
        for node in nodes:
            self.failing_nodes.pop(node, None)

    def _let_go(self, nodes: Sequence[int], why: str) -> None:
        """Declare nodes lost from which nothing is needed any more."""
        for node in nodes:
            self._dismiss(node, why)
            self._state.members.departed_nodes.add(node)
            self._state.log_event("lost", node=node, step=self._state.ledger.next_step)
        if nodes:
            self._state.put_snapshot()

    def _declare_lost(self, node: int, why: str) -> Flow[None]:
        """Continue without a node whose state is not used."""
        assert self._membership is not None
        self._dismiss(node, why)
        yield from self._membership.handle_lost_nodes([node])

    def _dismiss(self, node: int, why: str) -> None:
        """Make a node end, and count the failure against its machine."""
        state, members = self._state, self._state.members
        assert self._membership is not None
        self.failing_nodes.pop(node, None)
        state.evicted_nodes.add(node)
        state.log_event("given_up", node=node, why=f"a worker of the node raised an exception; {why}")
        state.show_incident(f"node {node} is declared lost after its exception: {why}")
        own = [record for record in self._records if record.node == node][-1:]
        alike = [record for record in self._records if own and self._same_machine(record, own[0])]
        if len(alike) >= _QUARANTINE_AFTER:
            why = f"{len(alike)} of its actions raised an exception"
            self._membership.refuse_machine(node, why)
            state.log_event("quarantined", node=node, why=why)
        if node in members.nodes:
            state.dismiss_node(members.nodes[node], why)


def _stages_text(stages: Sequence[int]) -> str:
    return f"stage{'' if len(stages) == 1 else 's'} {' and '.join(map(str, stages))}"
