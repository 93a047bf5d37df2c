"""The cases that all systems of `culm bench gnn` train, and the curve that a training returns. Epochs are training
epochs."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec

GRAPH_FOLDER = Path(__file__).resolve().parents[2] / "../shared/graphs"
"""Folder of real graphs, if it exists."""


class GraphCase(msgspec.Struct, frozen=True, kw_only=True):
    """A graph and a model, with the same widths, optimizer and number of epochs for all systems."""

    graph: str
    """As `culm gnn run --graph` takes it."""
    model: str = "gcn"
    hidden: int = 16
    layers: int = 2
    heads: int = 1
    dropout: float = 0.5
    input_dropout: float = 0.0
    """Dropout of the features; PyG's GCN and GAT have none there."""
    lr: float = 0.01
    weight_decay: float = 5e-4
    epochs: int = 100
    fanout: int = 10
    """Neighbours per hop of the sampling system."""
    batch: int = 1024
    """Mini-batch of the sampling system, over all processes."""
    split_seed: int = 0
    """Seed of the split, for a graph without one."""

    @property
    def name(self) -> str:
        return Path(self.graph).stem if self.graph.endswith(".npz") else self.graph

    @property
    def is_available(self) -> bool:
        """Whether the graph is generated or its file exists."""
        return self.graph.startswith("gen:") or Path(self.graph).is_file()


class TrainingCurve(msgspec.Struct, frozen=True):
    """Seconds of each epoch without evaluation, and accuracy after each epoch, as of its last evaluation."""

    seconds: tuple[float, ...]
    val: tuple[float, ...]
    test: tuple[float, ...]

    @property
    def s_per_epoch(self) -> float:
        """Median seconds per epoch, without the first fifth, which fills caches and buffers."""
        return median(self.seconds[len(self.seconds) // 5 :])

    @property
    def accuracy(self) -> float:
        """Test accuracy of the epoch with the best validation accuracy."""
        best = max(range(len(self.val)), key=self.val.__getitem__)
        return self.test[best]

    def seconds_to(self, target: float) -> float | None:
        """Return the seconds of training until validation first reached the target; None if it never did."""
        elapsed = 0.0
        for seconds, reached in zip(self.seconds, self.val, strict=True):
            elapsed += seconds
            if reached >= target:
                return elapsed
        return None

    def epochs_to(self, target: float) -> int | None:
        """Return the epochs until validation first reached the target; None if it never did."""
        return next((epoch + 1 for epoch, reached in enumerate(self.val) if reached >= target), None)


class TrainingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One training of one system."""

    system: str
    case: GraphCase
    cores: int
    seed: int = 0
    latency_s: float = 0.0
    """Latency added to every task of culm's workers."""
    intervals: int | None = None
    """Intervals of each of culm's graph servers; default: chosen by culm."""
    servers: int | None = None
    """Number of culm's graph servers; default: one per four cores."""
    first_core: int = 0
    """Index of the first core to use, among those that this process may use."""
    evaluate_every: int | None = None
    """Epochs between evaluations; default: 1, for culm `culm_graph_system.EVALUATE_EVERY`."""
