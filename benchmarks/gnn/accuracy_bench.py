"""`python -m benchmarks.gnn.accuracy_bench`: accuracy of culm.gnn on real graphs, compared with PyG on the whole
graph.

All systems train the same model for the same training epochs from the same seeds on the same splits, and are evaluated
after the same epochs. The test accuracy is that of the epoch with the best validation accuracy. `epochs` is the number
of epochs until validation reached `TARGET_SHARE` of the best that PyG reached with that seed; asynchrony may need more.
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
from benchmarks.gnn.isolated_training import train_side_by_side, usable_cores
from benchmarks.gnn.training_case import GRAPH_FOLDER, GraphCase, TrainingCurve, TrainingRequest

PEER_SYSTEM = "pyg-sparse"
SYSTEMS = (PEER_SYSTEM, "culm-sync", "culm-async", "culm-async-1")
TARGET_SHARE = 0.99
EVALUATE_EVERY = 5
SEEDS = 5

TrainAllFunction: TypeAlias = Callable[[Sequence[TrainingRequest]], list[TrainingCurve]]


class AccuracyRow(TypedDict):
    """A system on a graph, over all seeds. `behind` is PyG's accuracy minus this one's, in percentage points."""

    graph: str
    system: str
    accuracy: float
    spread: float
    behind: float
    epochs: float | None
    reached: int
    """Seeds whose validation accuracy reached the target."""
    seeds: int


def _graph_file_case(name: str, **options: float) -> GraphCase:
    return msgspec.convert({"graph": str(GRAPH_FOLDER / f"{name}.npz"), **options}, GraphCase)


def _no_decay_case(name: str, **options: float) -> GraphCase:
    """A case with wide, sparse features: weight decay would keep a GCN from fitting them in any system."""
    return _graph_file_case(name, weight_decay=0.0, **options)


CASES = (
    _graph_file_case("cora", input_dropout=0.5, epochs=200),
    _graph_file_case("citeseer", input_dropout=0.5, epochs=200),
    _no_decay_case("amazon-photo", hidden=64, epochs=600),
    _no_decay_case("amazon-computers", hidden=64, epochs=600),
    _no_decay_case("facebook-pages", epochs=200),
    _no_decay_case("blogcatalog-attr", epochs=300),
    _no_decay_case("flickr-attr", epochs=300),
    _no_decay_case("coauthor-physics", epochs=60),
)
"""Every case trains until the validation accuracy of all systems has converged."""


def compare_accuracy(
    case: GraphCase, systems: Sequence[str], seeds: int, cores: int, train_all: TrainAllFunction = train_side_by_side
) -> list[AccuracyRow]:
    """Train all systems on one graph; PyG is always included."""
    all_systems = list(dict.fromkeys((PEER_SYSTEM, *systems)))
    all_curves = train_all([make_request(case, system, seed, cores) for system in all_systems for seed in range(seeds)])
    curves = {system: all_curves[i * seeds : (i + 1) * seeds] for i, system in enumerate(all_systems)}
    return [accuracy_row(case, system, system_curves, curves[PEER_SYSTEM]) for system, system_curves in curves.items()]


def make_request(case: GraphCase, system: str, seed: int, cores: int) -> TrainingRequest:
    """Return one training. The seed determines weights and dropout, and the split of a graph without one."""
    split = msgspec.structs.replace(case, split_seed=seed)
    return TrainingRequest(system=system, case=split, cores=cores, seed=seed, evaluate_every=EVALUATE_EVERY)


def accuracy_row(
    case: GraphCase, system: str, curves: Sequence[TrainingCurve], peer_curves: Sequence[TrainingCurve]
) -> AccuracyRow:
    """Aggregate the seeds of a system and compare them with PyG's."""
    accuracies = [curve.accuracy for curve in curves]
    needed = [c.epochs_to(TARGET_SHARE * max(p.val)) for c, p in zip(curves, peer_curves, strict=True)]
    reached = [epochs for epochs in needed if epochs is not None]
    return AccuracyRow(
        graph=case.name,
        system=system,
        accuracy=mean(accuracies),
        spread=stdev(accuracies) if len(accuracies) > 1 else 0.0,
        behind=100 * (mean(curve.accuracy for curve in peer_curves) - mean(accuracies)),
        epochs=mean(reached) if reached else None,
        reached=len(reached),
        seeds=len(curves),
    )


def markdown(rows: Sequence[AccuracyRow]) -> str:
    """Return the rows as a table of docs/numbers.md."""
    lines = ["| graph | system | test accuracy | points behind PyG | epochs to target |", "|---|---|---|---|---|"]
    for row in rows:
        epochs = "never" if row["epochs"] is None else f"{row['epochs']:.0f} ({row['reached']} of {row['seeds']})"
        lines.append(
            f"| {row['graph']} | {row['system']} | {row['accuracy']:.4f} ± {row['spread']:.4f} "
            f"| {row['behind']:+.2f} | {epochs} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gnn.accuracy_bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--graphs", default=",".join(case.name for case in CASES), help="comma-separated names")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated names")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--cores", type=int, default=usable_cores(), help="cores of one training; several run at the same time"
    )
    parser.add_argument("--json", type=Path, help="file for the rows, written after every graph")
    arguments = parser.parse_args()
    rows: list[AccuracyRow] = []
    for case in (c for c in CASES if c.name in arguments.graphs.split(",")):
        if not case.is_available:
            print(f"{case.name} is not available: skipped", file=sys.stderr)
            continue
        rows += compare_accuracy(case, arguments.systems.split(","), arguments.seeds, arguments.cores)
        print(markdown(rows), file=sys.stderr, flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(rows))
    print(markdown(rows))


if __name__ == "__main__":
    main()
