"""Statistics of the graph in `--graph`: from a name, numbers, the headers of a file, or a generator."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

from culm.errors import UsageError
from culm.gnn.plan.work_counts import GraphWorkload

NAMED_GRAPHS: dict[str, GraphWorkload] = {
    workload.name: workload
    for workload in (
        GraphWorkload(name="reddit-small", vertices=233_000, edges=115_000_000, features=602, classes=41, hidden=128),
        GraphWorkload(
            name="reddit-large", vertices=1_100_000, edges=1_300_000_000, features=301, classes=50, hidden=128
        ),
        GraphWorkload(name="amazon", vertices=9_200_000, edges=314_000_000, features=300, classes=25, hidden=64),
        GraphWorkload(name="friendster", vertices=65_600_000, edges=3_600_000_000, features=32, classes=50, hidden=48),
    )
}
"""The graphs of the Dorylus paper."""
_MODEL_DEFAULTS: dict[str, dict[str, Any]] = {"gcn": {"hidden": 16}, "gat": {"hidden": 64, "heads": 8}}
_STATISTICS_FIELDS = ("vertices", "edges", "features", "classes", "hidden")


def workload_for_graph(source: str, **model: Any) -> GraphWorkload:
    """Return the statistics of a graph with a model. Fields in `model` that are not None replace the known ones.

    Missing hidden width and heads are the defaults of `culm gnn run`. Raises UsageError for a graph that cannot be
    found or read.
    """
    options = {name: value for name, value in model.items() if value is not None}
    if source in NAMED_GRAPHS:
        return replace(NAMED_GRAPHS[source], **options)
    return GraphWorkload(**(_MODEL_DEFAULTS.get(options.get("model", "gcn"), {}) | _graph_fields(source) | options))


def _graph_fields(source: str) -> dict[str, Any]:
    """Return the fields of a graph without a name."""
    if source.startswith("stats:"):
        return _from_numbers(source)
    if source.startswith("gen:"):
        return _from_generator(source)
    if Path(source).is_file():
        return _from_file(Path(source))
    close = difflib.get_close_matches(source, NAMED_GRAPHS, n=1)
    hint = (
        f"did you mean {close[0]}?"
        if close
        else f"give a file, stats:vertices=...,edges=..., or {', '.join(NAMED_GRAPHS)}"
    )
    raise UsageError(f"--graph {source!r} is neither a file nor known by name: {hint}")


def _from_numbers(source: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": "stats"}
    for part in filter(None, source.removeprefix("stats:").split(",")):
        name, _, text = part.partition("=")
        if name not in _STATISTICS_FIELDS:
            raise UsageError(f"--graph {source!r} has {name!r}: stats are {', '.join(_STATISTICS_FIELDS)}")
        fields[name] = _count(source, name, text)
    missing = [name for name in _STATISTICS_FIELDS[:4] if name not in fields]
    if missing:
        raise UsageError(f"--graph {source!r} does not say {missing[0]}: add {missing[0]}=NUMBER")
    return fields


def _count(source: str, name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (1 <= value < 1e15 and value == int(value)):
        raise UsageError(f"--graph {source!r} has {name}={text}: give a whole number of at least 1, as in 9.2e6")
    return int(value)


def _from_generator(source: str) -> dict[str, Any]:
    from culm.gnn.graph.graph_generators import parse_generator

    kind, options = parse_generator(source)
    vertices = 2 ** int(options["scale"]) if kind == "rmat" else int(options["vertices"])
    widths = {name: int(options[name]) for name in ("features", "classes")}
    return {"name": source, "vertices": vertices, "edges": int(vertices * options["degree"]), **widths}


def _from_file(path: Path) -> dict[str, Any]:
    """Read the small arrays of an npz; the edges themselves are not read."""
    from culm.gnn.graph.graph_readers import open_npz

    with open_npz(path) as stored:
        labels = stored["labels"]
        vertices, edges = labels.size, max(stored["edge_index"].shape) if "edge_index" in stored else 0
        if "indptr" in stored or not edges:
            indptr = stored["indptr"]
            vertices, edges = len(indptr) - 1, int(indptr[-1])
        width = stored["feat_shape"][1] if "feat_shape" in stored else stored["features"].shape[1]
    return {
        "name": path.stem,
        "vertices": vertices,
        "edges": edges,
        "features": int(width),
        "classes": int(labels.max()) + 1,
    }
