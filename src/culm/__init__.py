"""culm: train large models on machines that vanish.

The package, from the ground up; a room imports only from rooms above it in this list:

    errors       the tree of errors
    job          what a user describes: layers, loss, optimizer, data, batch
    schedule/    pure: actions, plans, generators, checking, timing, pictures          (no torch)
    plan/        pure: cutting the model, choosing the shape, planning around losses   (no torch)
    market/      pure: dated prices, traces of machines that come and go               (no torch)
    sim/         pure: what a run would cost under a market                            (no torch)
    models/      GPT and ResNet as lists of layers
    transport/   frames of tensors between workers: sockets, memory
    checkpoint/  safetensors shards and a manifest, to a path or URL
    runtime/     one worker: state, numerics, stage, executor
    observe/     the run folder, events, traces, the ledger; facts, charts and pages
    cluster/     many: the store, epochs, agent, leader
    providers/   where nodes come from: local processes out of one nursery
    gnn/         graph networks on servers and elastic workers
    testing/     public: the reference loop, the simulated cluster, faults
    cli/         one file a verb
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from culm.errors import CulmError
from culm.job import STOP, Job

if TYPE_CHECKING:
    from culm.api import Summary, train

__version__ = "0.1.0"
__all__ = ["STOP", "CulmError", "Job", "Summary", "__version__", "train"]


def __getattr__(name: str) -> Any:
    """`train` and `Summary` bring torch and sockets along; `culm plan` should start in a blink without them."""
    if name in ("train", "Summary"):
        from culm import api

        return getattr(api, name)
    raise AttributeError(f"module 'culm' has no attribute {name!r}")
