"""Reference training of the same model in a single process of PyG."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from culm.gnn.graph.csr_graph import TRAIN, Graph
from culm.gnn.model.gnn_model import GnnModel


def import_pyg(name: str) -> Any:
    """Import a module of PyG, or skip the test if it is not installed."""
    pytest.importorskip("torch_geometric")
    return importlib.import_module(f"torch_geometric.{name}")


def edge_index(graph: Graph) -> Tensor:
    targets = np.repeat(np.arange(graph.vertices), graph.degrees)
    return torch.from_numpy(np.stack([graph.indices.astype(np.int64), targets]))


class PygStack(torch.nn.Module):
    """Convolutions of PyG with ReLU in between, as torch_geometric.nn.GCN and .GAT, but with any widths."""

    def __init__(self, model: GnnModel) -> None:
        super().__init__()
        nn, last = import_pyg("nn"), model.layers - 1
        attention = {"heads": model.heads, "dropout": model.attention_dropout}
        self.convs = torch.nn.ModuleList(
            nn.GCNConv(model.widths[i], model.widths[i + 1])
            if model.kind == "gcn"
            else nn.GATConv(model.widths[i], model.head_width(i), concat=i < last, **attention)
            for i in range(model.layers)
        )

    def forward(self, rows: Tensor, edges: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            rows = conv(rows, edges).relu()
        logits: Tensor = self.convs[-1](rows, edges)
        return logits


def pyg_losses(graph: Graph, model: GnnModel, weights: Mapping[str, Tensor], epochs: int) -> list[float]:
    """Return the loss of every training epoch, starting from these weights."""
    net = PygStack(model)
    net.load_state_dict(dict(weights))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    features, labels, edges = torch.from_numpy(graph.features), torch.from_numpy(graph.labels), edge_index(graph)
    train = torch.from_numpy(graph.roles == TRAIN)
    losses = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(features, edges)[train], labels[train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
