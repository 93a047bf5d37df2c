"""Inside one process of the peer: it waits for a command, obeys, answers, and ends when its parent does.

Run as `python -m benchmarks.rank FD`, where FD is its end of a two-way pipe (see `benchmarks.ranks`).
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore, init_process_group  # type: ignore[attr-defined]
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from benchmarks.job import Cut, Spec, build, inputs, targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {"zb": ScheduleInterleavedZeroBubble, "interleaved": ScheduleInterleaved1F1B}


class Refused(Exception):
    """torch does not build this schedule for these stages; nothing was sent yet, the group is still good."""


class Rank:
    """One worker of torch's pipeline. The methods are the commands of the parent."""

    def __init__(self, rank: int, workers: int, port: int) -> None:
        torch.set_num_threads(1)
        store = TCPStore("127.0.0.1", port, is_master=False)
        init_process_group("gloo", store=store, rank=rank, world_size=workers)
        self.rank, self.workers = rank, workers

    def build(self, spec: Spec, stages: Cut, schedule: str) -> None:
        """Fresh weights, optimizer and schedule; whatever was built before is forgotten."""
        mine = range(self.rank, len(stages), self.workers)
        self.spec, self.data = spec, spec.data()
        self.modules = [build(spec, stages[number]) for number in mine]
        parts = [
            PipelineStage(module, number, len(stages), torch.device("cpu"))
            for number, module in zip(mine, self.modules, strict=True)
        ]
        self.schedule = make_schedule(schedule, parts, spec)
        self.optimizer = spec.optimizer([p for module in self.modules for p in module.parameters()])
        self.first, self.last = parts[0].is_first, parts[-1].is_last
        self.done = 0
        self.history: list[float] = []

    def round(self, steps: int) -> float:
        """Train; returns the CPU seconds that this process spent, Gloo's threads included."""
        before = time.process_time()
        for _ in range(steps):
            self._step()
        return time.process_time() - before

    def losses(self) -> list[float]:
        """Mean loss of every step so far; only the rank with the last stage knows any."""
        return self.history

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Parameters of this rank, named by layer number and parameter."""
        return {name: p.detach().numpy() for module in self.modules for name, p in module.named_parameters()}

    def _step(self) -> None:
        losses: list[torch.Tensor] = []
        batch = (inputs(self.spec, self.data, self.done),) if self.first else ()
        target = targets(self.spec, self.data, self.done) if self.last else None
        self.optimizer.zero_grad()
        # With return_outputs torch would join the logits of the whole batch for nobody.
        self.schedule.step(*batch, target=target, losses=losses if self.last else None, return_outputs=False)
        self.optimizer.step()
        self.done += 1
        if losses:
            self.history.append(torch.stack(losses).mean().item())


def make_schedule(name: str, parts: Sequence[PipelineStage], spec: Spec) -> Any:
    """torch's schedule of that name with its default settings; Refused says why there is none."""
    try:
        if name in SINGLE:
            return SINGLE[name](parts[0], spec.micro_batches, loss_fn=spec.loss)
        return MULTI[name](list(parts), spec.micro_batches, loss_fn=spec.loss)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise Refused(str(error)) from error


def serve(wire: Connection) -> None:
    """Obey until the parent is gone. A blocking read between commands: an idle rank burns no CPU."""
    rank = Rank(*wire.recv())
    wire.send(("done", None))
    while True:
        command, *arguments = wire.recv()
        wire.send(_obey(rank, command, arguments))


def _obey(rank: Rank, command: str, arguments: list[Any]) -> tuple[str, Any]:
    try:
        return "done", getattr(rank, command)(*arguments)
    except Refused as error:
        return "refused", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def main() -> None:
    # The parent closed the pipe or died: there is nobody left to work for.
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
