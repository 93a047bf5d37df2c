"""What all systems of `culm bench gnn` train, and the curve that each of them gives back."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec

GRAPHS = Path(__file__).resolve().parents[1] / "../shared/graphs"
"""Real graphs, where they lie beside the checkout."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A graph and a model; the same initial widths, optimizer and stop for everyone."""

    graph: str
    """As `culm gnn run --graph` takes it."""
    model: str = "gcn"
    hidden: int = 16
    layers: int = 2
    heads: int = 1
    dropout: float = 0.5
    input_dropout: float = 0.0
    """On the features; PyG's GCN and GAT have none there."""
    lr: float = 0.01
    weight_decay: float = 5e-4
    epochs: int = 100
    fanout: int = 10
    """Neighbours per hop of the sampling system."""
    batch: int = 1024
    """Its mini-batch, over all processes."""
    split_seed: int = 0
    """Of the split, where a graph comes without one."""

    @property
    def name(self) -> str:
        return Path(self.graph).stem if self.graph.endswith(".npz") else self.graph

    @property
    def there(self) -> bool:
        """Whether it can be run here: a file may not lie beside this checkout."""
        return self.graph.startswith("gen:") or Path(self.graph).is_file()


class Curve(msgspec.Struct, frozen=True):
    """A training: seconds of each epoch (evaluation left out), and accuracy after each, or after the last that was
    evaluated."""

    seconds: tuple[float, ...]
    val: tuple[float, ...]
    test: tuple[float, ...]

    @property
    def s_per_epoch(self) -> float:
        """The median, the first epochs left out: they fill caches and buffers."""
        return median(self.seconds[len(self.seconds) // 5 :])

    @property
    def accuracy(self) -> float:
        """On the test vertices, of the epoch that validation would choose."""
        best = max(range(len(self.val)), key=self.val.__getitem__)
        return self.test[best]

    def s_to(self, target: float) -> float | None:
        """Seconds of training until validation first reached the target; None if it never did."""
        passed = 0.0
        for seconds, reached in zip(self.seconds, self.val, strict=True):
            passed += seconds
            if reached >= target:
                return passed
        return None

    def epochs_to(self, target: float) -> int | None:
        """Epochs until validation first reached the target; None if it never did."""
        return next((epoch + 1 for epoch, reached in enumerate(self.val) if reached >= target), None)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One training of one system."""

    system: str
    case: Case
    cores: int
    seed: int = 0
    latency_s: float = 0.0
    """Injected into every task of culm's workers."""
    intervals: int | None = None
    """Of each of culm's graph servers; by default its own choice."""
    servers: int | None = None
    """Culm's graph servers; by default one for every four cores."""
    first: int = 0
    """Of the cores that this process may use, where it begins to take its own."""
    every: int | None = None
    """Epochs between evaluations; by default one, for culm `gnn_ours.EVERY`."""
