"""METIS in a process of its own.

While METIS runs, it handles SIGTERM as an internal error of its own, in any thread of its process: a run that is asked
to stop would crash. Also, a process can be killed, a function call cannot.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

# Imported here, because the process is forked from one that has imported this module.
with contextlib.suppress(ImportError):
    import pymetis  # noqa: F401 - not needed for one server
from culm.errors import RunError
from culm.gnn.graph.graph_partition import assign_owners, metis_partition
from culm.gnn.launch.launcher import Ticket
from culm.gnn.server.gnn_run_store import wait_until_process_ends

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from culm.gnn.graph.csr_graph import Graph
    from culm.gnn.launch.local_launcher import LocalLauncher

    Array = NDArray[Any]

METIS_ENTRY = "culm.gnn.leader.metis_process:serve"
_TIME_LIMIT_S = 7 * 24 * 3600.0
_GRAPH_FILE, _OWNERS_FILE = "whole.npz", "owners.npy"


async def assign_owners_in_process(graph: Graph, servers: int, launcher: LocalLauncher, folder: Path) -> Array:
    """Same as `graph_partition.assign_owners`, with METIS in a process of that launcher. Raises RunError if it
    fails."""
    if servers == 1:
        return assign_owners(graph, servers)
    folder.mkdir()
    np.savez(folder / _GRAPH_FILE, indptr=graph.indptr, indices=graph.indices, servers=servers)
    await launcher.launch(Ticket("cut", "", "", 0, _TIME_LIMIT_S, str(folder)), 1)
    for pid in await launcher.worker_pids():
        await wait_until_process_ends(pid)
    if not (folder / _OWNERS_FILE).exists():
        raise RunError(f"METIS could not partition {graph.name} into {servers} parts: is there enough memory?")
    owners = np.load(folder / _OWNERS_FILE)
    return assign_owners(graph, servers, lambda *_: owners)


def serve(ticket: Ticket) -> None:
    """Entry of the process: read the graph from the folder in the ticket, write the owners there."""
    folder = Path(ticket.store)
    with np.load(folder / _GRAPH_FILE) as arrays:
        owners = metis_partition(arrays["indptr"], arrays["indices"], int(arrays["servers"]))
    np.save(folder / f".{_OWNERS_FILE}", np.asarray(owners, np.int64))
    (folder / f".{_OWNERS_FILE}").rename(folder / _OWNERS_FILE)
