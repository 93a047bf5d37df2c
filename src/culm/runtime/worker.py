"""The worker: a coroutine that computes. It handles control messages of its agent and of the leader: it adopts epochs,
trains in them (`train_loop`), and leaves them when it is halted, with a report of what it holds."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from culm.device.device_copies import DeviceCopies, open_device
from culm.errors import DeviceFailed, EpochClosed, NodeLost
from culm.plan.recover.lineage import WorkerInventory
from culm.runtime import messages
from culm.runtime.checkpoint_io import CheckpointWriter
from culm.runtime.compute.deterministic import use_exact_algorithms
from culm.runtime.compute.device import activate_device, select_device
from culm.runtime.epoch import Epoch
from culm.runtime.epoch_context import EpochContext
from culm.runtime.heartbeat import HeartbeatSender
from culm.runtime.layer_transfer import receive_layers, send_layers
from culm.runtime.replica_builder import build_missing_replicas
from culm.runtime.step_limits import StepLimits
from culm.runtime.train_loop import TrainLoop
from culm.runtime.worker_reports import build_failure_report
from culm.runtime.worker_state import WorkerState

if TYPE_CHECKING:
    import torch

    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.worker_state import StageReplica
    from culm.transport.interface import Address, FrameKey, Transport


OpenDevice: TypeAlias = "Callable[[torch.device, int], DeviceCopies]"
"""Opens a device, given the number of workers on the machine."""


class Worker:
    """One worker of a node. `run` returns when the run has ended, or the connection to the agent is lost."""

    def __init__(
        self,
        job: Job,
        worker: int,
        agent: Address,
        transport: Transport,
        clock: Clock,
        *,
        workers_per_node: int = 1,
        workers_on_host: int | None = None,
        open_device: OpenDevice = open_device,
        free_memory: Callable[[], object] | None = None,
    ) -> None:
        """`worker`: its number in the run (`Member.worker`). `workers_on_host`: workers on its machine, which may have
        several nodes; None: one node. `free_memory` is called in every epoch when the objects of the one before are not
        needed any more; they refer to each other."""
        self._free_memory = free_memory
        self._workers_on_host, self._open_device = workers_on_host or workers_per_node, open_device
        self._copies: DeviceCopies | None = None
        self._device_failure: DeviceFailed | None = None
        self._running: asyncio.Task[None] | None = None
        """The task of `run`."""
        self.job, self.worker, self.agent = job, worker, agent
        self.node, self._index = divmod(worker, workers_per_node)
        self.transport, self.clock = transport, clock
        self.state: WorkerState | None = None
        self.limits = StepLimits()
        self._heartbeat = HeartbeatSender(worker, transport, clock)
        self._checkpoint_writer = CheckpointWriter(worker, transport, clock, self._heartbeat)
        self._training: asyncio.Task[None] | None = None
        self._train_loop: TrainLoop | None = None
        """The train loop of the current epoch; while its layers are being built, that of the previous epoch."""
        self._adopted_epoch = 0
        """The last epoch: it may arrive twice, from the leader and from the agent."""
        self._min_epoch = 0
        """Epochs below this number are ignored."""
        transport.set_damage_handler(self._report_damage)
        self._leader_snapshot = b""
        """What the last leader would have written to the store, which could not be reached."""

    async def run(self) -> None:
        """Report to the agent, then handle messages until the end. Raises DeviceFailed if the device cannot be used
        any more: the node is lost then."""
        self._running = asyncio.current_task()
        self._send(self.agent, messages.WorkerStarted(self.worker, self.transport.address))
        try:
            while await self._handle_message(await self.transport.receive_message()):
                pass
        except asyncio.CancelledError:
            if self._device_failure is not None:
                raise self._device_failure from None
            raise
        finally:
            if self._device_failure is None:
                await self._stop_training()
            await self._checkpoint_writer.close()
            if self._copies is not None:
                self._copies.close()

    def _send(self, to: Address, message: messages.Message) -> None:
        self.transport.send_message(to, messages.encode(message))

    async def _handle_message(self, message: tuple[Address, bytes | None]) -> bool:
        """Act on a control message; False ends the worker."""
        sender, body = message
        if body is None:
            self._report_lost_connection(sender)
            return sender != self.agent  # a worker without an agent ends
        match messages.decode(body):
            case Epoch() as epoch:
                await self._adopt_epoch(epoch)
            case messages.Halt(number, leader):
                await self._halt_epoch(number, leader)
            case messages.StepPermit(end_step):
                self.limits.permit(end_step)
            case messages.Drain(number, stop_before):
                self.limits.drain(number, stop_before)
            case messages.EndRun(end_step):
                self.limits.end_run(end_step)
            case messages.EvaluateAfter() | messages.SaveAfter() as chosen:
                self._add_timed_step(chosen)
            case messages.Commit(step, number, leader_snapshot):
                if number >= self._min_epoch:
                    self._leader_snapshot = leader_snapshot or self._leader_snapshot
                    self.limits.commit(step + 1, self.state)
            case messages.StopNow():
                return False
        self.limits.notify()
        return True

    def _report_lost_connection(self, sender: Address) -> None:
        """Report a lost connection to a member of the epoch. It is a suspicion; the leader decides."""
        epoch = self._train_loop.epoch if self._train_loop is not None else None
        if epoch is not None and any(epoch.address(slot) == sender for slot in epoch.staying_slots):
            reason = f"the connection to {sender} broke"
            self._send(epoch.leader, messages.FailureReport(self.worker, NodeLost.__name__, reason, peer=sender))

    def _report_damage(self, sender: Address, key: FrameKey | None) -> None:
        """Report to the leader that a frame arrived damaged. The transport has requested it again."""
        epoch = self._train_loop.epoch if self._train_loop is not None else None
        if epoch is not None:
            frame = "" if key is None else f"{key.name} of step {key.step}"
            self._send(epoch.leader, messages.DamageReport(self.worker, sender, frame))

    async def _halt_epoch(self, number: int, leader: Address) -> None:
        """Leave every epoch below `number` between two actions, and report what this worker holds. No action of these
        epochs can finish afterwards."""
        training = self._training is not None and not self._training.done()
        if number < self._min_epoch or (number == self._min_epoch and training):
            # Another leader used a higher number already: report that number, so that this leader begins above it.
            self._send_halt_report(leader, self._min_epoch, WorkerInventory())
            return
        self._min_epoch = number
        unused_frames = self.transport.close_epochs(number)
        await self._stop_training()
        if self._train_loop is not None:
            self._train_loop.keep_unused_frames(unused_frames)
        await self.clock.after_action(self.node, self.limits.committed_steps, "inventory")
        inventory = self.state.inventory() if self.state is not None else WorkerInventory()
        self._send_halt_report(leader, number, inventory)

    def _send_halt_report(self, leader: Address, epoch: int, inventory: WorkerInventory) -> None:
        self._send(leader, messages.HaltReport(self.worker, epoch, inventory, self._leader_snapshot))

    async def _stop_training(self) -> None:
        if self._training is not None:
            self._training.cancel()
            await asyncio.wait([self._training])  # unlike awaiting it, raises if this worker itself is cancelled
            if not self._training.cancelled():
                with contextlib.suppress(EpochClosed):
                    self._training.result()
            self._training = None
            await self._drain_device()

    async def _drain_device(self) -> None:
        """Wait until the device has done everything that was launched on it. Raises DeviceFailed."""
        if self._train_loop is not None:
            try:
                await self._train_loop.drain()
            except DeviceFailed as error:
                self._device_failure = error
                raise

    def _add_timed_step(self, chosen: messages.EvaluateAfter | messages.SaveAfter) -> None:
        """The leader has chosen a step by time. Later epochs name it themselves."""
        if chosen.epoch == self._min_epoch:
            add = self.limits.save_after if isinstance(chosen, messages.SaveAfter) else self.limits.evaluate_after
            add(chosen.completed_steps)

    async def _adopt_epoch(self, epoch: Epoch) -> None:
        """Start to train in an epoch, unless this worker has adopted it, has seen a higher number, or is no member."""
        if epoch.number < max(self._min_epoch, self._adopted_epoch + 1) or epoch.slot_of(self.worker) is None:
            return
        self._adopted_epoch = epoch.number
        await self._stop_training()
        self._min_epoch, self._leader_snapshot = epoch.number, b""
        self.limits.set_timed_steps(epoch.evaluations, epoch.checkpoints)
        self.transport.close_epochs(epoch.number)
        self._training = asyncio.create_task(self._train_epoch(epoch))

    async def _train_epoch(self, epoch: Epoch) -> None:
        """Prepare and run the training loop of an epoch. An error is reported to the leader."""
        train_loop = None
        heartbeat = None
        if epoch.heartbeat_s:
            heartbeat = asyncio.create_task(self._heartbeat.run(epoch, lambda: self._progress_in(epoch)))
        try:
            await self.clock.after_action(self.node, epoch.start, "adopt")
            context = await self._prepare_context(epoch)
            train_loop = self._train_loop = TrainLoop(context, self.limits, self._checkpoint_writer)
            if self._free_memory is not None:
                asyncio.get_running_loop().call_soon(self._free_memory)  # while groups wait for the other members
            await train_loop.run()
        except (asyncio.CancelledError, EpochClosed):
            raise
        except DeviceFailed as error:
            self._end_for(error)
        except BaseException as error:
            if not isinstance(error, Exception) and not _raised_by_user_code(error):
                raise
            failure = self._copies.find_failure() if self._copies is not None else None
            if failure is not None and not _may_be_the_jobs_fault(failure):
                self._end_for(failure)
                return
            failed = None
            if train_loop is not None:
                failed = train_loop.discard_failed_action() if failure is None else train_loop.failed_action
            device = self.state.device if self.state is not None else None
            self._send(epoch.leader, build_failure_report(self.worker, error, epoch.number, failed, device))
            if failure is not None:
                self._end_for(failure)
        finally:
            if heartbeat is not None:
                heartbeat.cancel()
            if train_loop is not None:
                train_loop.close()

    def _end_for(self, failure: DeviceFailed) -> None:
        """End this worker: nothing that the device holds can be used any more."""
        self._device_failure = failure
        if self._running is not None:
            self._running.cancel()

    def _progress_in(self, epoch: Epoch) -> tuple[int, float]:
        """(number of actions run, seconds of the slowest one) in an epoch."""
        train_loop = self._train_loop
        return train_loop.progress if train_loop is not None and train_loop.epoch is epoch else (0, 0.0)

    async def _prepare_context(self, epoch: Epoch) -> EpochContext:
        """Build, load or receive the layers that this worker needs in an epoch and does not hold. What it holds
        stays."""
        slot = epoch.slot_of(self.worker)
        assert slot is not None
        if self.state is None or epoch.rebuild:
            device = select_device(self.job, self._index)
            activate_device(device)
            use_exact_algorithms(self.job, device)
            if self._copies is None:
                self._copies = self._open_device(device, self._workers_on_host)
                if not self._copies.is_synchronous:
                    self.transport.set_frame_memory(self._copies.frame_memory, self._copies.shared_memory)
            self.state = WorkerState(self.job, device, self._copies, rebuild_epoch=epoch.rebuild_epoch)
            self.limits.restart(epoch.committed_steps)
        if self.state.shape_epoch != epoch.shape_epoch:
            replicas = await self._exchange_layers(epoch, slot) if epoch.changes_shape and not epoch.rebuild else {}
            self.state.reshape(epoch.shape_epoch, replicas, epoch.committed_steps)
        self.limits.commit(epoch.committed_steps, self.state)
        recovery = epoch.recovery
        for step, g, discarding_slot in recovery.discarded:
            if discarding_slot == slot:
                self.state.discard(step, g)
        with self._heartbeat.keep_alive():
            await build_missing_replicas(self.state, epoch, slot, self.clock)
        return EpochContext.create(epoch, slot, self.state, self.transport, self.clock)

    async def _exchange_layers(self, epoch: Epoch, slot: int) -> dict[int, StageReplica]:
        """Send layers that other workers need in the new shape, and receive those that this worker needs. Returns its
        replicas in the new shape, by stage."""
        assert self.state is not None
        began = self.clock.now()

        def report_progress(layers: int) -> None:
            self._heartbeat.send(epoch, layers, self.clock.now() - began)

        send_layers(epoch, slot, self.state, self.transport)
        await self.clock.after_action(self.node, epoch.start, "layers_sent")
        replicas = await receive_layers(
            epoch, slot, self.state, self.transport, self.clock, report_progress, self._heartbeat.keep_alive
        )
        await self.clock.after_action(self.node, epoch.start, "layers_received")
        return replicas


def _may_be_the_jobs_fault(failure: DeviceFailed) -> bool:
    """Whether a device failed because of an assertion in a kernel, such as for an index out of range. It will fail on
    other nodes, too: the leader has to know."""
    return "assert" in str(failure)


def _raised_by_user_code(error: BaseException) -> bool:
    """Whether a KeyboardInterrupt comes from user code. All processes of a node ignore SIGINT, so that Ctrl-C does not
    raise one there."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
