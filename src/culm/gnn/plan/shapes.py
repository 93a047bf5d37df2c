"""The graph behind `--graph`, as statistics: by name, by numbers, from a file's headers, or of a generator."""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import Any

from culm.errors import UsageError
from culm.gnn.plan.work import Shape

NAMED: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(name="reddit-small", vertices=233_000, edges=115_000_000, features=602, classes=41, hidden=128),
        Shape(name="reddit-large", vertices=1_100_000, edges=1_300_000_000, features=301, classes=50, hidden=128),
        Shape(name="amazon", vertices=9_200_000, edges=314_000_000, features=300, classes=25, hidden=64),
        Shape(name="friendster", vertices=65_600_000, edges=3_600_000_000, features=32, classes=50, hidden=48),
    )
}
"""The graphs of the Dorylus paper."""
_DEFAULTS: dict[str, dict[str, Any]] = {"gcn": {"hidden": 16}, "gat": {"hidden": 64, "heads": 8}}
_COUNTS = ("vertices", "edges", "features", "classes", "hidden")


def shape_of(source: str, **model: Any) -> Shape:
    """The statistics of a graph with a model on it: fields of Shape in `model` replace what is known, where not None.

    The hidden width and the heads that nobody gave are those of `culm gnn run`. Raises UsageError for a graph that can
    not be found or read.
    """
    given = {name: value for name, value in model.items() if value is not None}
    if source in NAMED:
        return replace(NAMED[source], **given)
    return Shape(**(_DEFAULTS.get(given.get("model", "gcn"), {}) | _found(source) | given))


def _found(source: str) -> dict[str, Any]:
    """What there is to know about a graph without a name."""
    if source.startswith("stats:"):
        return _from_numbers(source)
    if source.startswith("gen:"):
        return _of_generator(source)
    if Path(source).is_file():
        return _of_file(Path(source))
    close = difflib.get_close_matches(source, NAMED, n=1)
    hint = f"did you mean {close[0]}?" if close else f"give a file, stats:vertices=...,edges=..., or {', '.join(NAMED)}"
    raise UsageError(f"--graph {source!r} is neither a file nor known by name: {hint}")


def _from_numbers(source: str) -> dict[str, Any]:
    given: dict[str, Any] = {"name": "stats"}
    for part in filter(None, source.removeprefix("stats:").split(",")):
        name, _, text = part.partition("=")
        if name not in _COUNTS:
            raise UsageError(f"--graph {source!r} has {name!r}: stats are {', '.join(_COUNTS)}")
        given[name] = _count(source, name, text)
    missing = [name for name in _COUNTS[:4] if name not in given]
    if missing:
        raise UsageError(f"--graph {source!r} does not say {missing[0]}: write {missing[0]}=NUMBER")
    return given


def _count(source: str, name: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (1 <= value < 1e15 and value == int(value)):
        raise UsageError(f"--graph {source!r} has {name}={text}: give a whole number of at least 1, as in 9.2e6")
    return int(value)


def _of_generator(source: str) -> dict[str, Any]:
    from culm.gnn.generate import parse

    kind, options = parse(source)
    vertices = 2 ** int(options["scale"]) if kind == "rmat" else int(options["vertices"])
    widths = {name: int(options[name]) for name in ("features", "classes")}
    return {"name": source, "vertices": vertices, "edges": int(vertices * options["degree"]), **widths}


def _of_file(path: Path) -> dict[str, Any]:
    """From the small arrays of an npz: the edges themselves are not read."""
    from culm.gnn.readers import opened

    with opened(path) as stored:
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
