"""One process of torch's pipeline: waits for a command, runs it, answers, and ends when its parent does.

Run as `python -m benchmarks.pipeline.torch_rank FD`, where FD is its end of a two-way pipe (see
`benchmarks.pipeline.rank_processes`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.common.gpt_job import JobSpec, StageCut, build_stage, step_inputs, step_targets
from torch.distributed import (  # type: ignore[attr-defined]
    TCPStore,
    all_reduce,
    init_process_group,
    new_subgroups_by_enumeration,
)
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch.distributed import ProcessGroup

SINGLE_STAGE_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI_STAGE_SCHEDULES = {
    "zb": ScheduleInterleavedZeroBubble,
    "interleaved": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


class ScheduleRefused(Exception):
    """torch does not build this schedule for these stages. Nothing was sent yet, so the group is still usable."""


class TorchRank:
    """One worker of torch's pipeline. Its methods are the commands of the parent."""

    def __init__(self, rank: int, workers: int, port: int, device: str) -> None:
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", port, is_master=False)
        self.device = select_rank_device(device, rank, workers)
        backend = "gloo" if self.device.type == "cpu" else "nccl"
        init_process_group(backend, store=store, rank=rank, world_size=workers)
        self.rank, self.workers = rank, workers
        self._known_groups: dict[int, tuple[ProcessGroup, ProcessGroup]] = {}

    def build(self, spec: JobSpec, stages: StageCut, schedule: str, pipelines: int = 1) -> None:
        """Create new weights, optimizer and schedule; whatever was built before is dropped.

        With several pipelines the ranks of a stage are wrapped in DistributedDataParallel, and every pipeline runs an
        equal share of the micro-batches. `pipelines` must divide the number of workers and of micro-batches.
        """
        depth = self.workers // pipelines
        self.pipeline, position = divmod(self.rank, depth)
        own = stages_of_rank(position, depth, len(stages), schedule)
        self.spec, self.data = spec, spec.data()
        self.share = spec.micro_batches // pipelines
        pipeline_group, stage_group = self._groups(pipelines)
        self.modules = [build_stage(spec, stages[number]).to(self.device) for number in own]
        computed = [self._in_precision(module) for module in self.modules]
        pipeline_stages = [
            _Stage(
                module if pipelines == 1 else DistributedDataParallel(module, process_group=stage_group),
                number,
                len(stages),
                self.device,
                group=pipeline_group,
            )
            for number, module in zip(own, computed, strict=True)
        ]
        self.schedule = make_schedule(schedule, pipeline_stages, self._loss, self.share)
        self.optimizer = spec.optimizer([p for module in self.modules for p in module.parameters()])
        self.first, self.last = pipeline_stages[0].is_first, pipeline_stages[-1].is_last
        self.steps_done = 0
        self.loss_history: list[float] = []

    def _in_precision(self, module: torch.nn.Module) -> torch.nn.Module:
        return module if self.spec.precision == "fp32" else Autocast(module, self.device.type)

    def _loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec.precision == "bf16"):
            return self.spec.loss(output, target)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _groups(self, pipelines: int) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """(the ranks of this pipeline, the ranks of this stage); None with one pipeline: all ranks, and nobody. Groups
        are created once, by all ranks in the same order."""
        if pipelines == 1:
            return None, None
        if pipelines not in self._known_groups:
            ranks = torch.arange(self.workers).reshape(pipelines, -1)
            own_pipeline, _ = new_subgroups_by_enumeration(ranks.tolist())
            own_stage, _ = new_subgroups_by_enumeration(ranks.T.tolist())
            self._known_groups[pipelines] = own_pipeline, own_stage
        return self._known_groups[pipelines]

    def round(self, steps: int) -> float:
        """Train; returns the CPU seconds of this process, including Gloo's threads."""
        before = time.process_time()
        for _ in range(steps):
            self._step()
        self._synchronize()
        return time.process_time() - before

    def build_plain(self, spec: Any) -> None:
        """The whole model in this process, trained by the loop that a user would write."""
        self.spec, self.data = spec, spec.data()
        self.modules = [spec.plain_model().to(self.device)]
        self._plain_loss = spec.plain_loss
        self.optimizer = spec.optimizer(self.modules[0].parameters())
        self.steps_done = 0
        self.loss_history = []

    def plain_round(self, steps: int) -> float:
        """Train the model of `build_plain`; returns the CPU seconds of this process."""
        before = time.process_time()
        for _ in range(steps):
            ids = step_inputs(self.spec, self.data, self.steps_done).to(self.device).split(self.spec.micro_batch)
            labels = step_targets(self.spec, self.data, self.steps_done).to(self.device).split(self.spec.micro_batch)
            losses = []
            self.optimizer.zero_grad()
            for micro_ids, micro_labels in zip(ids, labels, strict=True):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.spec.precision == "bf16"):
                    loss = self._plain_loss(self.modules[0], micro_ids, micro_labels)
                (loss / self.spec.micro_batches).backward()
                losses.append(loss.detach())
            self.optimizer.step()
            self.steps_done += 1
            self.loss_history.append(torch.stack(losses).mean().item())
        self._synchronize()
        return time.process_time() - before

    def losses(self) -> list[float]:
        """Mean loss of every step so far; only the rank with the last stage has any."""
        return self.loss_history

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Parameters of this rank, named by layer number and parameter."""
        return {name: p.detach().cpu().numpy() for module in self.modules for name, p in module.named_parameters()}

    def _step(self) -> None:
        losses: list[torch.Tensor] = []
        batch = (self._own(step_inputs(self.spec, self.data, self.steps_done)),) if self.first else ()
        target = self._own(step_targets(self.spec, self.data, self.steps_done)) if self.last else None
        self.optimizer.zero_grad()
        # With return_outputs torch would concatenate the logits of the whole batch, which are not used.
        self.schedule.step(*batch, target=target, losses=losses if self.last else None, return_outputs=False)
        if self.spec.clip_norm is not None:
            self._clip_gradients(self.spec.clip_norm)
        self.optimizer.step()
        self.steps_done += 1
        if losses:
            self.loss_history.append(torch.stack(losses).mean().item())

    def _own(self, batch: torch.Tensor) -> torch.Tensor:
        """This pipeline's part of the batch of a step."""
        size = self.share * self.spec.micro_batch
        return batch[self.pipeline * size : (self.pipeline + 1) * size].to(self.device)

    def _clip_gradients(self, max_norm: float) -> None:
        """Clip by the norm over all ranks, as torch's users do: one all-reduce of a number."""
        gradients = [p.grad for module in self.modules for p in module.parameters() if p.grad is not None]
        square = torch.stack([gradient.norm() for gradient in gradients]).norm() ** 2
        all_reduce(square)
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0))


class _Stage(PipelineStage):
    """torch 2.11 greets neighbouring stages before the first step. Gloo cannot send to its own rank, which zbv has as a
    neighbour."""

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        operations: list[Any] = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]


def stages_of_rank(rank: int, workers: int, stages: int, schedule: str) -> list[int]:
    """The stages of a rank: every P-th, or for zbv one on the way down and one on the way back."""
    return [rank, stages - 1 - rank] if schedule == "zbv" else list(range(rank, stages, workers))


class Autocast(torch.nn.Module):
    """A module whose forward computes in bf16 where autocast allows it."""

    def __init__(self, module: torch.nn.Module, device: str) -> None:
        super().__init__()
        self.module, self._device = module, device

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device, torch.bfloat16):
            found: torch.Tensor = self.module(values)
        return found


def select_rank_device(device: str, rank: int, workers: int) -> torch.device:
    """The device of a rank. Ranks that share a GPU claim to be hosts of their own, and talk over loopback: NCCL refuses
    several ranks of a host on one GPU."""
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < workers:
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    torch.cuda.set_device(rank % count)
    return torch.device("cuda", rank % count)


def make_schedule(
    name: str,
    pipeline_stages: Sequence[PipelineStage],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    micro_batches: int,
) -> Any:
    """torch's schedule of that name with default settings. Raises ScheduleRefused with torch's reason."""
    try:
        if name in SINGLE_STAGE_SCHEDULES:
            return SINGLE_STAGE_SCHEDULES[name](pipeline_stages[0], micro_batches, loss_fn=loss)
        return MULTI_STAGE_SCHEDULES[name](list(pipeline_stages), micro_batches, loss_fn=loss)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ScheduleRefused(str(error)) from error


def serve_commands(pipe: Connection) -> None:
    """Run commands until the parent is gone. Blocks between commands, so that an idle rank uses no CPU."""
    rank = TorchRank(*pipe.recv())
    pipe.send(("done", None))
    while True:
        command, *arguments = pipe.recv()
        pipe.send(_execute_command(rank, command, arguments))


def _execute_command(rank: TorchRank, command: str, arguments: list[Any]) -> tuple[str, Any]:
    try:
        return "done", getattr(rank, command)(*arguments)
    except ScheduleRefused as error:
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def main() -> None:
    # The parent closed the pipe or died: there is nothing left to do.
    with contextlib.suppress(EOFError, ConnectionError):
        serve_commands(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
