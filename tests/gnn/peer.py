"""The same model as a single process of PyG trains it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from culm.gnn.graph import TRAIN, Graph
from culm.gnn.model import Model


def pyg(name: str) -> Any:
    """A module of PyG, or a skipped test where it is not installed."""
    pytest.importorskip("torch_geometric")
    return importlib.import_module(f"torch_geometric.{name}")


def edge_index(graph: Graph) -> Tensor:
    targets = np.repeat(np.arange(graph.vertices), graph.degrees)
    return torch.from_numpy(np.stack([graph.indices.astype(np.int64), targets]))


class Stack(torch.nn.Module):
    """Convolutions of PyG, ReLU in between: torch_geometric.nn.GCN and .GAT, but with any widths."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        nn, last = pyg("nn"), model.layers - 1
        attention = {"heads": model.heads, "dropout": model.attention_dropout}
        self.convs = torch.nn.ModuleList(
            nn.GCNConv(model.widths[i], model.widths[i + 1])
            if model.kind == "gcn"
            else nn.GATConv(model.widths[i], model.channels(i), concat=i < last, **attention)
            for i in range(model.layers)
        )

    def forward(self, rows: Tensor, edges: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            rows = conv(rows, edges).relu()
        found: Tensor = self.convs[-1](rows, edges)
        return found


def losses(graph: Graph, model: Model, weights: Mapping[str, Tensor], epochs: int) -> list[float]:
    """Loss of every epoch, from these weights on."""
    net = Stack(model)
    net.load_state_dict(dict(weights))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    features, labels, edges = torch.from_numpy(graph.features), torch.from_numpy(graph.labels), edge_index(graph)
    train = torch.from_numpy(graph.roles == TRAIN)
    found = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(features, edges)[train], labels[train])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
