"""Models: options, PyG modules, initial weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.gnn.pyg_reference import import_pyg

from culm.errors import UsageError
from culm.gnn.model.gnn_model import (
    GnnModel,
    initial_weights,
    model_from_pyg,
    pyg_state_dict,
    resolve_model,
    round_up_to_heads,
)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"given": "sage"}, "--model 'sage': use gcn or gat"),
        ({"layers": 0}, "--layers 0"),
        ({"dropout": 1.0}, "--dropout is 1.0"),
        ({"given": "gat", "heads": 3}, "--hidden 8 is not a multiple of --heads 3"),
        ({"heads": 2}, "--heads 2: use 1 or more with gat"),
        ({"given": 5}, "model is a int: give 'gcn'"),
        ({"given": GnnModel(kind="gcn", widths=(4, 2))}, "made for 4 features and 2 classes, the graph has 5 and 3"),
    ],
)
def test_an_invalid_model_is_rejected(options: dict[str, object], sentence: str) -> None:
    defaults: dict[str, object] = {
        "given": "gcn",
        "layers": 2,
        "hidden": 8,
        "heads": 1,
        "dropout": 0.5,
        "input_dropout": None,
    }
    arguments = {**defaults, **options}
    with pytest.raises(UsageError) as refused:
        resolve_model(arguments.pop("given"), width=5, classes=3, **arguments)  # type: ignore[arg-type]
    assert sentence in str(refused.value)


def test_a_pyg_model_keeps_its_shape_and_names() -> None:
    nn = import_pyg("nn")
    for module in (nn.GCN(5, 8, 3, 3, dropout=0.1), nn.GAT(5, 8, 2, 3, heads=4)):
        options = {"layers": 0, "hidden": 0, "heads": 0, "dropout": 0.0, "input_dropout": None}
        model = resolve_model(module, width=5, classes=3, **options)  # type: ignore[arg-type]
        weights = initial_weights(model, 0, module.state_dict())
        module.load_state_dict(pyg_state_dict(weights))
        assert {n: tuple(t.shape) for n, t in pyg_state_dict(initial_weights(model, 0, None)).items()} == {
            n: tuple(t.shape) for n, t in module.state_dict().items()
        }


def test_initial_weights_are_glorot_uniform() -> None:
    weights = GnnModel(kind="gcn", widths=(300, 200)).initial_layer_weights(0, 1)
    bound = math.sqrt(6 / 500)
    assert weights["lin.weight"].abs().max().item() == pytest.approx(bound, rel=0.01)
    assert weights["lin.weight"].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not weights["bias"].any()


@pytest.mark.parametrize(("heads", "width"), [(1, 64), (3, 66), (8, 64), (0, 64)])
def test_the_default_width_is_rounded_up_to_a_multiple_of_the_heads(heads: int, width: int) -> None:
    assert round_up_to_heads(64, heads) == width


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"act": "elu"}, "model has act=ELU: only act=ReLU can be trained here"),
        ({"norm": "batch_norm"}, "model has norm=batch_norm"),
        ({"jk": "cat"}, "model has jk=cat"),
        ({"improved": True}, "model has improved=True"),
        ({"bias": False}, "model has bias=False"),
    ],
)
def test_unsupported_options_of_pyg_are_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        model_from_pyg(import_pyg("nn").GCN(5, 8, 2, 3, **options))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"out_channels": 3, "concat": False}, "model has concat=False: only concat=True"),
        ({"out_channels": None}, "model has concat=True: only concat=False"),
    ],
)
def test_unsupported_concatenation_of_heads_is_rejected(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        model_from_pyg(import_pyg("nn").GAT(5, 8, 2, heads=2, **options))
