"""Sizes that 32-bit indices cannot count, and the errors for them.

Offsets of edges are 64-bit. Three things stay 32-bit: vertex numbers in neighbour lists, the sparse products of MKL
(the edges of one product and the values of each dense operand), and some builds of METIS. Products are split where that
is possible. Everything else raises UsageError: MKL would crash or return wrong sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.gnn.graph.graph_partition import GraphPart

MAX_INDEX = 2**31 - 1


def check_vertex_count(vertices: float, name: str) -> None:
    """Raise UsageError if the vertices of a graph cannot be numbered."""
    if vertices > MAX_INDEX:
        raise UsageError(
            f"{name} has {vertices:.0f} vertices and at most {MAX_INDEX} can be numbered: use a smaller graph"
        )


def check_metis_size(vertices: int, edges: int, servers: int, metis_limit: int) -> None:
    """Raise UsageError if the vertex weights of a graph, whose sum is its edges and vertices, overflow METIS."""
    if edges + vertices > metis_limit:
        raise UsageError(
            f"--servers {servers} for {edges} edges and {vertices} vertices: the installed METIS counts at most "
            f"{metis_limit} of both together, use --servers 1 or a pymetis with 64-bit indices"
        )


def check_interval_sizes(parts: Sequence[GraphPart], width: int) -> None:
    """Raise UsageError if an interval has too many edges for a product, or too many rows of `width` values."""
    for part in parts:
        edges = int(np.diff(part.indptr[part.bounds].astype(np.int64)).max())
        values = int(np.diff(part.bounds).max()) * width
        for count, unit in ((edges, "edges"), (values, "values in its rows")):
            if count > MAX_INDEX:
                raise UsageError(
                    f"an interval of server {part.server} has {count} {unit} and at most {MAX_INDEX} are possible: "
                    f"give --intervals {2 * part.intervals * -(-count // MAX_INDEX)}"
                )
