"""Cutting a graph: which server owns which vertices (METIS), what it sees of the others' (ghosts), and its intervals.

A server numbers its own vertices first, in the order of their global numbers, then its ghosts by (owner, number there).
So what one interval of another server sends lands in one contiguous piece of memory. Edges are symmetric: the list of
a vertex's neighbours serves the forward gather and, read against the direction, the backward one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from culm.errors import UsageError
from culm.gnn.graph import once

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from culm.gnn.graph import Graph

    Array = NDArray[Any]

_METIS_SEED = 1


@dataclass(frozen=True)
class Exchange:
    """What one server sends to another, interval by interval; `*_bounds` have one entry more than intervals."""

    rows: Array
    """Local numbers of the vertices that the other sees as ghosts."""
    row_bounds: Array
    edges: Array
    """Positions of edges whose source belongs to the other: it needs their attention on the way back."""
    edge_bounds: Array


@dataclass(frozen=True)
class Part:
    """What one server owns. `indices` and `reverse` are in its own numbering."""

    server: int
    vertices: Array
    """Global numbers of its own vertices."""
    indptr: Array
    indices: Array
    """Neighbours, self included: below `len(vertices)` an own one, from there on a ghost."""
    weights: Array
    """Of the symmetric normalisation with self loops."""
    reverse: Array
    """Where the opposite direction of each edge is: an own edge, or from `len(indices)` on one received from a peer."""
    numbers: Array
    """Of each edge in the whole graph, whoever has it: target x vertices + source."""
    bounds: Array
    """Of the intervals."""
    ghosts: int
    sends: dict[int, Exchange]
    ghost_bounds: dict[int, Array]
    """By peer: where in the table the rows of each of its intervals are, absolutely."""
    edge_bounds: dict[int, Array]
    """By peer: where the edges of each of its intervals are, absolutely."""

    @property
    def size(self) -> int:
        return len(self.vertices)

    @property
    def intervals(self) -> int:
        return len(self.bounds) - 1


Cut = Callable[["Array", "Array", int], "Sequence[int] | Array"]
"""Pointers and indices of a graph, and a number of parts, to the part of every vertex."""


def owners(graph: Graph, servers: int, cut: Cut | None = None) -> Array:
    """The server of every vertex: few edges cut, parts about equal. METIS, seeded, unless `cut` does it.

    Raises UsageError for more servers than vertices.
    """
    if servers > graph.vertices:
        raise UsageError(f"--servers {servers} for {graph.vertices} vertices: a server needs at least one, use fewer")
    if servers == 1:
        return np.zeros(graph.vertices, np.int64)
    found = np.asarray((cut or metis)(graph.indptr, graph.indices, servers), np.int64)
    return _nobody_empty(found, servers)


def check_metis() -> None:
    """Raises UsageError where it is not installed."""
    try:
        import pymetis  # noqa: F401
    except ImportError:
        raise UsageError("several servers need METIS: pip install 'culm[gnn]', or use --servers 1") from None


def metis(indptr: Array, indices: Array, servers: int) -> Sequence[int]:
    """Of equal parts one is as large as another in edges: gathering costs by the edge."""
    check_metis()
    import pymetis

    options = pymetis.Options(seed=_METIS_SEED)
    _, membership = pymetis.part_graph(
        servers,
        adjacency=pymetis.CSRAdjacency(indptr.astype(np.int32), indices),
        vweights=(np.diff(indptr) + 1).astype(np.int32),
        options=options,
    )
    return membership


def _nobody_empty(found: Array, servers: int) -> Array:
    """METIS may leave a part empty on tiny graphs: give it a vertex of the largest."""
    for server in range(servers):
        if not (found == server).any():
            largest = np.bincount(found, minlength=servers).argmax()
            found[np.flatnonzero(found == largest)[0]] = server
    return found


def balanced(weights: Array, count: int) -> Array:
    """Bounds of `count` runs of about equal weight, none empty while there are enough items."""
    count = min(count, len(weights))
    ends = np.cumsum(weights)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, count) / count) + 1
    bounds = np.concatenate([[0], cuts, [len(weights)]])
    for i in range(1, count):
        bounds[i] = max(bounds[i], bounds[i - 1] + 1)
    for i in range(count - 1, 0, -1):
        bounds[i] = min(bounds[i], bounds[i + 1] - 1)
    return bounds


def cut(graph: Graph, owner: Array, intervals: int, *, attention: bool = True) -> list[Part]:
    """The parts of all servers. Every server has the same number of intervals, fewer where one has too few vertices.

    Without `attention` edges carry nothing of their own: they get no numbers, opposite ones are not looked for.
    """
    servers = int(owner.max()) + 1
    members = [np.flatnonzero(owner == server) for server in range(servers)]
    count = min(intervals, *(len(m) for m in members))
    local = np.zeros(graph.vertices, np.int64)
    for own in members:
        local[own] = np.arange(len(own))
    bounds = [balanced(graph.degrees[own] + 1, count) for own in members]
    sketches = [_sketch(graph, own, owner, local) for own in members]
    return [_part(s, graph, members, bounds, sketches, owner, local, attention) for s in range(servers)]


@dataclass(frozen=True)
class _Sketch:
    """Edges of one server, self loops included, by global source, sorted by (target, source)."""

    indptr: Array
    sources: Array
    ghosts: Array


def _sketch(graph: Graph, own: Array, owner: Array, local: Array) -> _Sketch:
    degrees = graph.degrees[own]
    alone = len(own) == graph.vertices
    neighbours = (graph.indices if alone else graph.indices[_edges_of(graph, own)]).astype(np.int64)
    keys = np.repeat(np.arange(len(own)) * graph.vertices, degrees) + neighbours  # sorted, as neighbours are
    loops = np.searchsorted(keys, np.arange(len(own)) * graph.vertices + own)
    sources = np.insert(neighbours, loops, own)
    indptr = np.zeros(len(own) + 1, np.int64)
    np.cumsum(degrees + 1, out=indptr[1:])
    seen = sources[:0] if alone else once(sources[owner[sources] != owner[own[0]]])
    return _Sketch(indptr, sources, seen[np.lexsort((local[seen], owner[seen]))])


def _edges_of(graph: Graph, own: Array) -> Array:
    """Where the neighbours of these vertices are listed."""
    degrees = graph.degrees[own]
    starts = np.repeat(graph.indptr[own] - np.concatenate([[0], np.cumsum(degrees)[:-1]]), degrees)
    places: Array = starts + np.arange(int(degrees.sum()))
    return places


def _part(
    server: int,
    graph: Graph,
    members: list[Array],
    bounds: list[Array],
    sketches: list[_Sketch],
    owner: Array,
    local: Array,
    attention: bool,
) -> Part:
    own, sketch = members[server], sketches[server]
    number = np.full(graph.vertices, -1, np.int64)
    number[own] = np.arange(len(own))
    number[sketch.ghosts] = len(own) + np.arange(len(sketch.ghosts))
    targets = np.repeat(own, np.diff(sketch.indptr))
    root = 1.0 / np.sqrt(graph.degrees + 1.0)
    peers = [q for q in range(len(members)) if q != server]
    reverse, numbers = np.zeros(0, np.int64), np.zeros(0, np.int64)
    edge_bounds = dict.fromkeys(peers, np.zeros(len(bounds[server]), np.int64))
    if attention:
        numbers = targets * graph.vertices + sketch.sources
        reverse, edge_bounds = _reversed(server, peers, sketches, members, bounds, owner, targets)
    return Part(
        server=server,
        vertices=own,
        indptr=sketch.indptr.astype(np.int32),
        indices=number[sketch.sources].astype(np.int32),
        weights=(root[targets] * root[sketch.sources]).astype(np.float32),
        reverse=reverse,
        numbers=numbers,
        bounds=bounds[server],
        ghosts=len(sketch.ghosts),
        sends={q: _exchange(sketch, sketches[q], bounds[server], server, q, owner, local) for q in peers},
        ghost_bounds={q: len(own) + _pieces(sketch.ghosts, q, bounds[q], owner, local) for q in peers},
        edge_bounds=edge_bounds,
    )


def _pieces(ghosts: Array, peer: int, bounds: Array, owner: Array, local: Array) -> Array:
    """Where the ghosts of each interval of a peer begin and end, among all ghosts."""
    first = int(np.searchsorted(owner[ghosts], peer))
    return first + np.searchsorted(local[ghosts[owner[ghosts] == peer]], bounds)


def _exchange(
    sketch: _Sketch, theirs: _Sketch, bounds: Array, server: int, peer: int, owner: Array, local: Array
) -> Exchange:
    rows = local[theirs.ghosts[owner[theirs.ghosts] == server]]
    edges = np.flatnonzero(owner[sketch.sources] == peer)
    return Exchange(
        rows=rows,
        row_bounds=np.searchsorted(rows, bounds),
        edges=edges,
        edge_bounds=np.searchsorted(edges, sketch.indptr[bounds]),
    )


def _reversed(
    server: int,
    peers: list[int],
    sketches: list[_Sketch],
    members: list[Array],
    bounds: list[Array],
    owner: Array,
    targets: Array,
) -> tuple[Array, dict[int, Array]]:
    """For each own edge the place of its opposite: own ones by search, a peer's in the order in which it sends them."""
    sketch, vertices = sketches[server], len(owner)
    wanted = sketch.sources * vertices + targets  # (target, source) of the opposite
    keys = targets * vertices + sketch.sources  # sorted, since edges are
    inside = owner[sketch.sources] == server
    reverse = np.zeros(len(keys), np.int64)
    reverse[inside] = np.searchsorted(keys, wanted[inside])
    first, found = len(keys), {}
    for peer in peers:
        theirs = sketches[peer]
        sent = np.flatnonzero(owner[theirs.sources] == server)
        their_targets = np.repeat(members[peer], np.diff(theirs.indptr))
        place = their_targets[sent] * vertices + theirs.sources[sent]
        mine = owner[sketch.sources] == peer
        reverse[mine] = first + np.searchsorted(place, wanted[mine])
        found[peer] = first + np.searchsorted(sent, theirs.indptr[bounds[peer]])
        first += len(sent)
    return reverse, found
