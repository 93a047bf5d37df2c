"""`python -m benchmarks.gnn_accuracy`: what culm.gnn learns on real graphs, beside PyG on the whole graph.

Everyone trains the same model for the same epochs from the same seeds on the same splits, and is judged after the same
epochs; the test accuracy is that of the epoch that validation chooses. `epochs` is how long it took until validation
reached `TARGET` of the best that PyG reached with that seed; asynchrony may need more of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TypeAlias, TypedDict

import msgspec

from benchmarks.gnn_case import GRAPHS, Case, Curve, Request
from benchmarks.gnn_sides import available, side_by_side

PEER = "pyg-sparse"
SYSTEMS = (PEER, "culm-sync", "culm-async", "culm-async-1")
TARGET = 0.99
EVERY = 5
SEEDS = 5

Trained: TypeAlias = Callable[[Sequence[Request]], list[Curve]]


class Accuracy(TypedDict):
    """A system on a graph, over all seeds. `behind` is PyG's accuracy less this one's, in points."""

    graph: str
    system: str
    accuracy: float
    spread: float
    behind: float
    epochs: float | None
    reached: int
    """Seeds with which validation got to the target at all."""
    seeds: int


def _file(name: str, **options: float) -> Case:
    return msgspec.convert({"graph": str(GRAPHS / f"{name}.npz"), **options}, Case)


def _plain(name: str, **options: float) -> Case:
    """A graph whose features are wide and thin: decay of the weights keeps a GCN from fitting them, whoever trains."""
    return _file(name, weight_decay=0.0, **options)


CASES = (
    _file("cora", input_dropout=0.5, epochs=200),
    _file("citeseer", input_dropout=0.5, epochs=200),
    _plain("amazon-photo", hidden=64, epochs=600),
    _plain("amazon-computers", hidden=64, epochs=600),
    _plain("facebook-pages", epochs=200),
    _plain("blogcatalog-attr", epochs=300),
    _plain("flickr-attr", epochs=300),
    _plain("coauthor-physics", epochs=60),
)
"""Each trains until the validation accuracy of everyone stands still."""


def compared(
    case: Case, systems: Sequence[str], seeds: int, cores: int, trained: Trained = side_by_side
) -> list[Accuracy]:
    """All systems on one graph; PyG is always among them."""
    everyone = list(dict.fromkeys((PEER, *systems)))
    found = trained([request(case, system, seed, cores) for system in everyone for seed in range(seeds)])
    curves = {system: found[i * seeds : (i + 1) * seeds] for i, system in enumerate(everyone)}
    return [row(case, system, own, curves[PEER]) for system, own in curves.items()]


def request(case: Case, system: str, seed: int, cores: int) -> Request:
    """One training: the seed is that of weights and dropout, and of the split where there is none."""
    split = msgspec.structs.replace(case, split_seed=seed)
    return Request(system=system, case=split, cores=cores, seed=seed, every=EVERY)


def row(case: Case, system: str, own: Sequence[Curve], peer: Sequence[Curve]) -> Accuracy:
    """What the seeds of a system came to, beside those of PyG."""
    found = [curve.accuracy for curve in own]
    needed = [c.epochs_to(TARGET * max(p.val)) for c, p in zip(own, peer, strict=True)]
    there = [epochs for epochs in needed if epochs is not None]
    return Accuracy(
        graph=case.name,
        system=system,
        accuracy=mean(found),
        spread=stdev(found) if len(found) > 1 else 0.0,
        behind=100 * (mean(curve.accuracy for curve in peer) - mean(found)),
        epochs=mean(there) if there else None,
        reached=len(there),
        seeds=len(own),
    )


def markdown(rows: Sequence[Accuracy]) -> str:
    """The rows as a table of docs/numbers.md."""
    lines = ["| graph | system | test accuracy | points behind PyG | epochs to target |", "|---|---|---|---|---|"]
    for one in rows:
        epochs = "never" if one["epochs"] is None else f"{one['epochs']:.0f} ({one['reached']} of {one['seeds']})"
        lines.append(
            f"| {one['graph']} | {one['system']} | {one['accuracy']:.4f} ± {one['spread']:.4f} "
            f"| {one['behind']:+.2f} | {epochs} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gnn_accuracy", description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", default=",".join(case.name for case in CASES), help="names, with commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names, with commas")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--cores", type=int, default=available(), help="of one training; others run beside it")
    parser.add_argument("--json", type=Path, help="a file for the rows; written after every graph")
    given = parser.parse_args()
    rows: list[Accuracy] = []
    for case in (c for c in CASES if c.name in given.graphs.split(",")):
        if not case.there:
            print(f"{case.name} is not beside this checkout: left out", file=sys.stderr)
            continue
        rows += compared(case, given.systems.split(","), given.seeds, given.cores)
        print(markdown(rows), file=sys.stderr, flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
