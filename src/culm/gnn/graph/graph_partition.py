"""Partition of a graph: the owner of every vertex (METIS), the ghosts of every server, and its intervals.

A server numbers its own vertices first, in the order of their global numbers, then its ghosts by (owner, number at the
owner). So the rows that one interval of another server scatters are contiguous in memory. Edges are symmetric: the
neighbour lists serve the forward gather and, in the reverse direction, the backward gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from culm.errors import UsageError
from culm.gnn.graph.csr_graph import sorted_unique
from culm.gnn.graph.index_limits import check_metis_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from culm.gnn.graph.csr_graph import Graph

    Array = NDArray[Any]

_METIS_SEED = 1


@dataclass(frozen=True)
class GhostExchange:
    """Rows and edges that one server scatters to another, by interval; `*_bounds` have one entry more than
    intervals."""

    rows: Array
    """Local numbers of the vertices that are ghosts of the other server."""
    row_bounds: Array
    edges: Array
    """Positions of the edges whose source the other server owns. It needs their attention in the backward pass."""
    edge_bounds: Array


@dataclass(frozen=True)
class GraphPart:
    """The part of the graph that one server owns. `indices` and `reverse` use the server's own numbering."""

    server: int
    vertices: Array
    """Global numbers of the server's own vertices."""
    indptr: Array
    indices: Array
    """Neighbours, including the vertex itself: an own vertex below `len(vertices)`, a ghost from there on."""
    weights: Array
    """Edge weights of the symmetric normalisation with self loops."""
    reverse: Array
    """Position of the reverse of each edge: an own edge, or from `len(indices)` on an edge received from a peer."""
    numbers: Array
    """Global number of each edge, the same on all servers: target x vertices + source."""
    bounds: Array
    """Bounds of the intervals."""
    ghosts: int
    ghost_exchanges: dict[int, GhostExchange]
    ghost_bounds: dict[int, Array]
    """By peer: bounds of the rows of each of its intervals, as absolute positions in the table."""
    edge_bounds: dict[int, Array]
    """By peer: bounds of the edges of each of its intervals, as absolute positions."""

    @property
    def vertex_count(self) -> int:
        return len(self.vertices)

    @property
    def intervals(self) -> int:
        return len(self.bounds) - 1


Partitioner = Callable[["Array", "Array", int], "Sequence[int] | Array"]
"""Takes indptr, indices and the number of parts; returns the part of every vertex."""


def assign_owners(graph: Graph, servers: int, partitioner: Partitioner | None = None) -> Array:
    """Return the server of every vertex: few cut edges, parts of about equal size. Uses METIS with a fixed seed
    unless a `partitioner` is given.

    Raises UsageError for more servers than vertices.
    """
    if servers > graph.vertices:
        raise UsageError(f"--servers {servers} for {graph.vertices} vertices: a server needs at least one, use fewer")
    if servers == 1:
        return np.zeros(graph.vertices, np.int64)
    owner = np.asarray((partitioner or metis_partition)(graph.indptr, graph.indices, servers), np.int64)
    return _fill_empty_parts(owner, servers)


def check_metis(vertices: int, edges: int, servers: int) -> None:
    """Raise UsageError if METIS is not installed, or if the graph is too large for its integers."""
    check_metis_size(vertices, edges, servers, int(np.iinfo(_metis_dtype()).max))


def _metis_dtype() -> np.dtype[Any]:
    """Return the integer type of the installed METIS, a choice of its build. Raises UsageError if there is none."""
    try:
        import pymetis
    except ImportError:
        raise UsageError("several servers need METIS: pip install 'culm[gnn]', or use --servers 1") from None
    return np.dtype(pymetis.zero_copy_dtype())


def metis_partition(indptr: Array, indices: Array, servers: int) -> Sequence[int]:
    """Partition with METIS. Vertices are weighted by their edges, since the cost of a gather grows with the edges."""
    dtype = _metis_dtype()
    import pymetis

    options = pymetis.Options(seed=_METIS_SEED)
    _, membership = pymetis.part_graph(
        servers,
        adjacency=pymetis.CSRAdjacency(indptr.astype(dtype), indices.astype(dtype)),
        vweights=(np.diff(indptr) + 1).astype(dtype),
        options=options,
    )
    return membership


def _fill_empty_parts(owner: Array, servers: int) -> Array:
    """Move a vertex of the largest part to each empty one. METIS may leave a part empty on tiny graphs."""
    for server in range(servers):
        if not (owner == server).any():
            largest = np.bincount(owner, minlength=servers).argmax()
            owner[np.flatnonzero(owner == largest)[0]] = server
    return owner


def balanced_bounds(weights: Array, count: int) -> Array:
    """Return the bounds of `count` runs of about equal weight; none is empty while there are enough items."""
    count = min(count, len(weights))
    ends = np.cumsum(weights)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count) + 1
    bounds = np.concatenate([[0], cuts, [len(weights)]])
    for i in range(1, count):
        bounds[i] = max(bounds[i], bounds[i - 1] + 1)
    for i in range(count - 1, 0, -1):
        bounds[i] = min(bounds[i], bounds[i + 1] - 1)
    return bounds


def build_parts(graph: Graph, owner: Array, intervals: int, *, attention: bool = True) -> list[GraphPart]:
    """Build the parts of all servers. All have the same number of intervals: `intervals`, or fewer if a server has
    fewer vertices.

    Without `attention`, `numbers` and `reverse` stay empty, since edges carry no data of their own.
    """
    servers = int(owner.max()) + 1
    members = [np.flatnonzero(owner == server) for server in range(servers)]
    count = min(intervals, *(len(m) for m in members))
    local = np.zeros(graph.vertices, np.int64)
    for own in members:
        local[own] = np.arange(len(own))
    bounds = [balanced_bounds(graph.degrees[own] + 1, count) for own in members]
    local_edges = [_local_edges(graph, own, owner, local) for own in members]
    return [_build_part(s, graph, members, bounds, local_edges, owner, local, attention) for s in range(servers)]


@dataclass(frozen=True)
class _LocalEdges:
    """Edges of one server with self loops, as global sources, sorted by (target, source)."""

    indptr: Array
    sources: Array
    ghosts: Array


def _local_edges(graph: Graph, own: Array, owner: Array, local: Array) -> _LocalEdges:
    degrees = graph.degrees[own]
    alone = len(own) == graph.vertices
    neighbours = (graph.indices if alone else graph.indices[_edge_positions(graph, own)]).astype(np.int64)
    keys = np.repeat(np.arange(len(own)) * graph.vertices, degrees) + neighbours  # sorted, because neighbours are
    loops = np.searchsorted(keys, np.arange(len(own)) * graph.vertices + own)
    sources = np.insert(neighbours, loops, own)
    indptr = np.zeros(len(own) + 1, np.int64)
    np.cumsum(degrees + 1, out=indptr[1:])
    seen = sources[:0] if alone else sorted_unique(sources[owner[sources] != owner[own[0]]])
    return _LocalEdges(indptr, sources, seen[np.lexsort((local[seen], owner[seen]))])


def _edge_positions(graph: Graph, own: Array) -> Array:
    """Return the positions of these vertices' neighbours in `graph.indices`."""
    degrees = graph.degrees[own]
    starts = np.repeat(graph.indptr[own] - np.concatenate([[0], np.cumsum(degrees)[:-1]]), degrees)
    positions: Array = starts + np.arange(int(degrees.sum()))
    return positions


def _build_part(
    server: int,
    graph: Graph,
    members: list[Array],
    bounds: list[Array],
    local_edges: list[_LocalEdges],
    owner: Array,
    local: Array,
    attention: bool,
) -> GraphPart:
    own, own_edges = members[server], local_edges[server]
    number = np.full(graph.vertices, -1, np.int64)
    number[own] = np.arange(len(own))
    number[own_edges.ghosts] = len(own) + np.arange(len(own_edges.ghosts))
    targets = np.repeat(own, np.diff(own_edges.indptr))
    root = 1.0 / np.sqrt(graph.degrees + 1.0)
    peers = [q for q in range(len(members)) if q != server]
    reverse, numbers = np.zeros(0, np.int64), np.zeros(0, np.int64)
    edge_bounds = dict.fromkeys(peers, np.zeros(len(bounds[server]), np.int64))
    if attention:
        numbers = targets * graph.vertices + own_edges.sources
        reverse, edge_bounds = _reverse_edges(server, peers, local_edges, members, bounds, owner, targets)
    return GraphPart(
        server=server,
        vertices=own,
        indptr=own_edges.indptr,
        indices=number[own_edges.sources].astype(np.int32),
        weights=(root[targets] * root[own_edges.sources]).astype(np.float32),
        reverse=reverse,
        numbers=numbers,
        bounds=bounds[server],
        ghosts=len(own_edges.ghosts),
        ghost_exchanges={
            q: _ghost_exchange(own_edges, local_edges[q], bounds[server], server, q, owner, local) for q in peers
        },
        ghost_bounds={q: len(own) + _ghost_bounds(own_edges.ghosts, q, bounds[q], owner, local) for q in peers},
        edge_bounds=edge_bounds,
    )


def _ghost_bounds(ghosts: Array, peer: int, bounds: Array, owner: Array, local: Array) -> Array:
    """Return the bounds of each of a peer's intervals among all ghosts."""
    first = int(np.searchsorted(owner[ghosts], peer))
    return first + np.searchsorted(local[ghosts[owner[ghosts] == peer]], bounds)


def _ghost_exchange(
    own_edges: _LocalEdges, peer_edges: _LocalEdges, bounds: Array, server: int, peer: int, owner: Array, local: Array
) -> GhostExchange:
    rows = local[peer_edges.ghosts[owner[peer_edges.ghosts] == server]]
    edges = np.flatnonzero(owner[own_edges.sources] == peer)
    return GhostExchange(
        rows=rows,
        row_bounds=np.searchsorted(rows, bounds),
        edges=edges,
        edge_bounds=np.searchsorted(edges, own_edges.indptr[bounds]),
    )


def _reverse_edges(
    server: int,
    peers: list[int],
    local_edges: list[_LocalEdges],
    members: list[Array],
    bounds: list[Array],
    owner: Array,
    targets: Array,
) -> tuple[Array, dict[int, Array]]:
    """Return the position of each own edge's reverse, and by peer the bounds of received edges.

    Own reverse edges are found by search; those of a peer follow in the order in which the peer sends them.
    """
    own_edges, vertices = local_edges[server], len(owner)
    reverse_keys = own_edges.sources * vertices + targets  # key (target, source) of the reverse edge
    keys = targets * vertices + own_edges.sources  # sorted, because edges are
    inside = owner[own_edges.sources] == server
    reverse = np.zeros(len(keys), np.int64)
    reverse[inside] = np.searchsorted(keys, reverse_keys[inside])
    first, received_bounds = len(keys), {}
    for peer in peers:
        peer_edges = local_edges[peer]
        sent = np.flatnonzero(owner[peer_edges.sources] == server)
        their_targets = np.repeat(members[peer], np.diff(peer_edges.indptr))
        place = their_targets[sent] * vertices + peer_edges.sources[sent]
        mine = owner[own_edges.sources] == peer
        reverse[mine] = first + np.searchsorted(place, reverse_keys[mine])
        received_bounds[peer] = first + np.searchsorted(sent, peer_edges.indptr[bounds[peer]])
        first += len(sent)
    return reverse, received_bounds
