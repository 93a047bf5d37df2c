"""Checks of a request, and defaults that depend on the graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.gnn.simulated_run import small_graph

from culm.errors import UsageError
from culm.gnn import train
from culm.gnn.graph.csr_graph import TRAIN
from culm.gnn.run_preparation import default_threads


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"patience": 2}, "--patience 2 without validation vertices"),
        ({"latency_s": float("nan")}, "--latency is nan: give at least 0"),
        ({"worker_seconds": float("inf")}, "--worker-seconds is inf: give at least 5"),
        ({"host": "no such name"}, "--host 'no such name' cannot be resolved"),
        ({"epochs": 2.5}, "--epochs is 2.5: give a whole number"),
        ({"epochs": "5"}, "--epochs is '5': give a whole number"),
        ({"seed": "a"}, "--seed is 'a': give a whole number"),
        ({"hidden": "x"}, "--hidden is 'x': give a whole number"),
        ({"workers": True}, "--workers True: give a number"),
        ({"kills": "worker epoch=200"}, "--kill 'worker epoch=200'"),
        ({"parameter_servers": 9, "kills": ["parameter=2 epoch=0"]}, "--kill 'parameter=2 epoch=0': there are 2"),
    ],
)
def test_an_invalid_option_is_rejected_before_the_run(options: dict[str, Any], sentence: str) -> None:
    graph = small_graph()
    train_only = replace(graph, roles=np.where(graph.roles == TRAIN, TRAIN, 0).astype(np.uint8))
    with pytest.raises(UsageError) as refused:
        train(train_only, "gcn", **options)
    assert sentence in str(refused.value)


def test_default_threads_are_one_for_a_small_graph_and_a_share_of_the_cores_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("culm.gnn.run_preparation.available_cores", lambda: 16)
    assert default_threads(10_556, 1) == 1
    assert default_threads(1 << 20, 2) == 8
    assert default_threads(1 << 20, 32) == 1
