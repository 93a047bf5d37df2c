"""METIS in a process of its own.

While it works it takes SIGTERM for an error of its own, wherever in its process that arrives: a run that is told to end
would crash instead. Besides, a process can be ended, and a call can not.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

with contextlib.suppress(ImportError):  # here, since processes are forked out of one that has imported this file
    import pymetis  # noqa: F401 - one server needs none
from culm.errors import RunError
from culm.gnn.launch.base import Ticket
from culm.gnn.meeting import ended
from culm.gnn.partition import metis, owners

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from culm.gnn.graph import Graph
    from culm.gnn.launch.local import LocalLauncher

    Array = NDArray[Any]

CUTTER = "culm.gnn.cutter:serve"
_MOST_S = 7 * 24 * 3600.0
_GRAPH, _FOUND = "whole.npz", "owners.npy"


async def owners_aside(graph: Graph, servers: int, launcher: LocalLauncher, folder: Path) -> Array:
    """As `partition.owners`, with METIS in a process of that launcher. RunError: it could not do it."""
    if servers == 1:
        return owners(graph, servers)
    folder.mkdir()
    np.savez(folder / _GRAPH, indptr=graph.indptr, indices=graph.indices, servers=servers)
    await launcher.launch(Ticket("cut", "", "", 0, _MOST_S, str(folder)), 1)
    for pid in await launcher.pids():
        await ended(pid)
    if not (folder / _FOUND).exists():
        raise RunError(f"METIS could not cut {graph.name} into {servers} parts: is there enough memory?")
    found = np.load(folder / _FOUND)
    return owners(graph, servers, lambda *_: found)


def serve(ticket: Ticket) -> None:
    """The process: from the folder that its ticket names, to that folder."""
    folder = Path(ticket.store)
    with np.load(folder / _GRAPH) as whole:
        found = metis(whole["indptr"], whole["indices"], int(whole["servers"]))
    np.save(folder / f".{_FOUND}", np.asarray(found, np.int64))
    (folder / f".{_FOUND}").rename(folder / _FOUND)
