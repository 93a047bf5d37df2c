"""The small pure parts: shelf, tally, tuner, ledger, kills, plans of passes, models."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from tests.gnn.house import small_graph
from tests.gnn.peer import pyg

if TYPE_CHECKING:
    from culm.gnn.link import Link

from culm.errors import UsageError
from culm.gnn import faults, train
from culm.gnn.arena import Arena, mapped
from culm.gnn.graph import TRAIN
from culm.gnn.lead import newest_common
from culm.gnn.ledger import Evaluation, Ledger, exhausted
from culm.gnn.model import Model, initial_weights, model_of, multiple, shape_of, state_dict
from culm.gnn.passes import Pass, Task, passes
from culm.gnn.prepare import default_threads
from culm.gnn.program import gradients_of, walk
from culm.gnn.recoveries import Recoveries
from culm.gnn.seats import Seats
from culm.gnn.server import tallies
from culm.gnn.shelf import Adam, Shelf
from culm.gnn.tally import Tally
from culm.gnn.tune import Tuner


def test_the_update_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(5, 3), torch.nn.Parameter(torch.empty(5, 3))
    theirs.data.copy_(ours)
    mean, square = torch.zeros(5, 3), torch.zeros(5, 3)
    optimizer = torch.optim.Adam([theirs], lr=0.02, weight_decay=1e-3)
    for count in range(1, 6):
        theirs.grad = torch.randn(5, 3)
        Adam(lr=0.02, weight_decay=1e-3).step(ours, theirs.grad.clone(), mean, square, count)
        optimizer.step()
    assert torch.allclose(ours, theirs.data, atol=1e-7)


def shelf(servers: int = 2) -> Shelf:
    made = Shelf([0], servers, Adam(lr=0.1, weight_decay=0.0))
    made.fill({"0.bias": torch.zeros(2)}, 0)
    return made


def test_an_update_waits_for_every_server_and_counts_each_once() -> None:
    made = shelf()
    one = {"bias": torch.ones(2)}
    assert made.add(0, 0, 1, one) == []
    assert made.add(0, 0, 1, one) == []
    assert made.add(0, 0, 0, one) == [1]
    assert made.add(0, 0, 0, one) == [], "an epoch that is over takes no gradient"


def test_updates_happen_in_the_order_of_epochs() -> None:
    made = shelf()
    one = {"bias": torch.ones(2)}
    for server in (0, 1):
        assert made.add(1, 0, server, one) == []
    assert made.add(0, 0, 0, one) == []
    assert made.add(0, 0, 1, one) == [1, 2]


def test_a_shelf_goes_on_from_what_it_saved_bit_for_bit() -> None:
    made, again = shelf(1), shelf(1)
    for epoch in range(3):
        made.add(epoch, 0, 0, {"bias": torch.tensor([0.5, -0.1 * epoch])})
    again.fill(made.snapshot(0), 3)
    for one in (made, again):
        one.add(3, 0, 0, {"bias": torch.tensor([0.3, 0.7])})
    assert torch.equal(made.snapshot(0)["0.bias"], again.snapshot(0)["0.bias"])


def test_a_sum_has_the_same_bits_in_any_order_of_arrival() -> None:
    values = {i: {"w": torch.tensor([10.0**i, -(3.0**i)])} for i in range(6)}
    sums = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        tally: Tally[int] = Tally(range(6))
        found = [tally.add("k", i, values[i]) for i in order]
        assert found[:-1] == [None] * 5
        assert found[-1] is not None
        sums.append(found[-1]["w"])
    assert torch.equal(*sums)


def test_the_tuner_adds_workers_while_tasks_wait_and_lets_go_of_idle_ones() -> None:
    tuner = Tuner(low=1, high=6, workers=4)
    said = [tuner.look(queue=3, running=4) for _ in range(8)]
    assert said[:-1] == [None] * 7
    assert said[-1] == "3.0 tasks waited for a worker: 5 workers from now on"
    for _ in range(8):
        last = tuner.look(queue=0, running=2)
    assert last == "3 workers had nothing to do at any time: 4 workers from now on"
    for _ in range(8):
        assert tuner.look(queue=0, running=4) is None


def test_the_tuner_keeps_its_bounds() -> None:
    tuner = Tuner(low=1, high=2, workers=2)
    for _ in range(16):
        assert tuner.look(queue=9, running=2) is None
    for _ in range(24):
        tuner.look(queue=0, running=0)
    assert tuner.workers == 1


def test_a_far_worker_gets_more_tasks_at_a_time_and_a_near_one_two() -> None:
    for way, many in ((0.0005, 2), (0.02, 6)):
        seats = Seats(2)
        seat = seats.join("w", cast("Link", None))
        for number in range(200):
            seat.tasks[Task(number, 0, 0)] = 0.0
            seats.returned(seat, Task(number, 0, 0), way + 0.005 + 0.3, waited=0.3, seconds=0.005)
        assert seats.in_flight in (many - 1, many)


def test_a_task_goes_to_whoever_had_its_interval_last_unless_that_one_is_busier() -> None:
    seats = Seats(2)
    for name in ("a", "b"):
        seats.join(name, cast("Link", None)).ready = True
    one, other = Task(0, 0, 0), Task(0, 0, 1)
    first = seats.choose(one)
    assert first is not None
    first.tasks[one] = 0.0
    second = seats.choose(other)
    assert second is not None
    assert second is not first
    first.tasks.clear()
    assert seats.choose(Task(0, 3, 0)) is first
    assert seats.choose(Task(0, 3, 1)) is second
    assert seats.choose(one, avoid=("a", "b")) is None


def evaluations(*values: float) -> list[Evaluation]:
    return [Evaluation(i, 1.0, v, 0.5) for i, v in enumerate(values)]


def test_a_run_stops_when_validation_has_not_improved_for_so_many_evaluations() -> None:
    assert (
        exhausted(evaluations(0.5, 0.6, 0.6, 0.59), 2) == "validation accuracy has not passed 0.6000 in 2 evaluations"
    )
    assert exhausted(evaluations(0.5, 0.6, 0.59, 0.61), 2) is None
    assert exhausted(evaluations(0.5, 0.4, 0.3), 0) is None


def test_everyone_goes_back_to_the_newest_version_that_all_have() -> None:
    assert newest_common([[10, 20], [20, 30]]) == 20
    assert newest_common([[30], [20]]) == 0
    assert newest_common([[], []]) == 0


def test_an_evaluation_follows_every_so_many_epochs_and_the_last() -> None:
    assert passes(3, 2) == (Pass(0, 0, True), Pass(1, 1, True), Pass(2, 1, False), Pass(3, 2, True), Pass(4, 2, False))
    assert [p.version for p in passes(3, 2)] == [0, 1, 2, 2, 3]


def test_kills_are_read_and_chaos_is_a_function_of_its_seed() -> None:
    assert faults.parse("server=1 epoch=5", 2, 1, 10) == [faults.Kill(5, "graph-1")]
    assert faults.parse("worker epoch=0", 2, 1, 10) == [faults.Kill(0, "worker")]
    chaos = faults.parse("chaos workers=9 servers=2", 2, 1, 10, seed=3)
    assert sorted(k.who for k in chaos) == ["server"] * 2 + ["worker"] * 9
    assert chaos == faults.parse("chaos workers=9 servers=2", 2, 1, 10, seed=3)


@pytest.mark.parametrize(
    "text",
    [
        *("server=2 epoch=1", "server=0 epoch=10", "server epoch=1", "cat epoch=1", "worker at=1", "worker=2 epoch=1"),
        *("chaos", "chaos workers=0", "chaos epoch=3", "worker workers=2", "parameter=1 epoch=1", ""),
    ],
)
def test_a_kill_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--kill"):
        faults.parse(text, 2, 1, 10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"given": "sage"}, "--model 'sage': there are gcn and gat"),
        ({"layers": 0}, "--layers 0"),
        ({"dropout": 1.0}, "--dropout is 1.0"),
        ({"given": "gat", "heads": 3}, "--hidden 8 is no multiple of --heads 3"),
        ({"heads": 2}, "--heads 2: a gat has 1 or more"),
        ({"given": 5}, "model is a int: give 'gcn'"),
        ({"given": Model(kind="gcn", widths=(4, 2))}, "made for 4 features and 2 classes, the graph has 5 and 3"),
    ],
)
def test_a_model_that_can_not_be_is_refused(options: dict[str, object], sentence: str) -> None:
    plain: dict[str, object] = {
        "given": "gcn",
        "layers": 2,
        "hidden": 8,
        "heads": 1,
        "dropout": 0.5,
        "input_dropout": None,
    }
    asked = {**plain, **options}
    with pytest.raises(UsageError) as refused:
        model_of(asked.pop("given"), width=5, classes=3, **asked)  # type: ignore[arg-type]
    assert sentence in str(refused.value)


def test_the_shape_and_names_of_a_pyg_model_are_taken_over() -> None:
    nn = pyg("nn")
    for made in (nn.GCN(5, 8, 3, 3, dropout=0.1), nn.GAT(5, 8, 2, 3, heads=4)):
        options = {"layers": 0, "hidden": 0, "heads": 0, "dropout": 0.0, "input_dropout": None}
        model = model_of(made, width=5, classes=3, **options)  # type: ignore[arg-type]
        weights = initial_weights(model, 0, made.state_dict())
        made.load_state_dict(state_dict(weights))
        assert {n: tuple(t.shape) for n, t in state_dict(initial_weights(model, 0, None)).items()} == {
            n: tuple(t.shape) for n, t in made.state_dict().items()
        }


def test_initial_weights_are_glorots() -> None:
    weights = Model(kind="gcn", widths=(300, 200)).initial(0, 1)
    bound = math.sqrt(6 / 500)
    assert weights["lin.weight"].abs().max().item() == pytest.approx(bound, rel=0.01)
    assert weights["lin.weight"].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert not weights["bias"].any()


def test_tables_are_mapped_in_place_and_only_with_the_right_secret() -> None:
    arena = Arena({"a": ("float32", (3, 2)), "none": ("float32", (0, 2))})
    seen = mapped(arena.layout)
    assert seen is not None
    arena.tables["a"][1, 1] = 7.0
    assert seen["a"][1, 1] == 7.0
    strange = type(arena.layout)(arena.layout.path, b"x" * 32, arena.layout.size, arena.layout.tables)
    assert mapped(strange) is None
    assert mapped(type(arena.layout)("/proc/1/fd/9999", b"", 1, {})) is None


def test_a_recovery_is_timed_from_the_first_sign_to_the_epoch_that_was_reached() -> None:
    made = Recoveries()
    made.sign(10.0)
    made.lost("graph-1", 10.5)
    made.decided(10.6, version=8, reached=11)
    made.moved(12.0)
    made.done(10, 12.5)
    assert made.rows(12.5)[0]["redo_ms"] == 500.0
    made.done(11, 13.0)
    made.done(12, 14.0)
    assert made.rows(99.0) == [
        {"step": 8, "lost": ["graph-1"], "detect_ms": 500.0, "decide_ms": 100.0, "move_ms": 1400.0, "redo_ms": 1000.0,
         "redone_actions": 3, "source": "checkpoint"}
    ]  # fmt: skip


def test_servers_lost_before_everyone_is_back_are_one_recovery_and_later_ones_another() -> None:
    made = Recoveries()
    made.lost("graph-0", 1.0)
    made.decided(1.1, version=0, reached=4)
    made.lost("parameter-0", 1.2)
    made.decided(1.3, version=0, reached=4)
    made.moved(2.0)
    made.lost("graph-1", 3.0)
    made.decided(3.1, version=0, reached=4)
    made.moved(4.0)
    made.done(4, 5.0)
    assert [row["lost"] for row in made.rows(9.0)] == [["graph-0", "parameter-0"], ["graph-1"]]
    assert [row["redo_ms"] for row in made.rows(9.0)] == [1000.0, 1000.0]


def test_a_sign_without_a_loss_is_no_recovery() -> None:
    made = Recoveries()
    made.sign(1.0)
    made.decided(2.0, version=0, reached=0)
    made.moved(3.0)
    assert made.rows(4.0) == []


@pytest.mark.parametrize(("heads", "width"), [(1, 64), (3, 66), (8, 64), (0, 64)])
def test_a_width_that_nobody_gave_suits_any_number_of_heads(heads: int, width: int) -> None:
    assert multiple(64, heads) == width


def test_where_nobody_validates_the_last_weights_are_the_best() -> None:
    nothing = float("nan")
    ledger = Ledger(1, 1, passes(3, 1), evaluations={e: Evaluation(e, 0.5, nothing, nothing) for e in range(3)})
    assert ledger.best is not None
    assert ledger.best.epoch == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"patience": 2}, "--patience 2 without a vertex to validate on"),
        ({"latency_s": float("nan")}, "--latency is nan: give at least 0"),
        ({"worker_seconds": float("inf")}, "--worker-seconds is inf: give at least 5"),
        ({"host": "no such name"}, "--host 'no such name' is not known"),
        ({"epochs": 2.5}, "--epochs is 2.5: give a whole number"),
        ({"epochs": "5"}, "--epochs is '5': give a whole number"),
        ({"seed": "a"}, "--seed is 'a': give a whole number"),
        ({"hidden": "x"}, "--hidden is 'x': give a whole number"),
        ({"workers": True}, "--workers True: give a number"),
        ({"kills": "worker epoch=200"}, "--kill 'worker epoch=200'"),
        ({"parameter_servers": 9, "kills": ["parameter=2 epoch=0"]}, "--kill 'parameter=2 epoch=0': there are 2"),
    ],
)
def test_a_request_that_would_run_into_nothing_is_refused_before_it_starts(
    options: dict[str, Any], sentence: str
) -> None:
    graph = small_graph()
    learned = replace(graph, roles=np.where(graph.roles == TRAIN, TRAIN, 0).astype(np.uint8))
    with pytest.raises(UsageError) as refused:
        train(learned, "gcn", **options)
    assert sentence in str(refused.value)


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
def test_what_pyg_can_do_and_this_can_not_is_refused_and_not_left_out(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        shape_of(pyg("nn").GCN(5, 8, 2, 3, **options))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"out_channels": 3, "concat": False}, "model has concat=False: only concat=True"),
        ({"out_channels": None}, "model has concat=True: only concat=False"),
    ],
)
def test_heads_are_concatenated_and_averaged_where_pyg_does_it_or_refused(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        shape_of(pyg("nn").GAT(5, 8, 2, heads=2, **options))


def test_a_small_graph_is_served_by_one_thread_and_a_large_one_by_its_servers_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("culm.gnn.prepare.cores", lambda: 16)
    assert default_threads(10_556, 1) == 1
    assert default_threads(1 << 20, 2) == 8
    assert default_threads(1 << 20, 32) == 1


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_a_deep_model_has_every_gradient_tallied_once(kind: str) -> None:
    model = model_of(kind, width=4, classes=2, layers=400, hidden=4, heads=1, dropout=0.0, input_dropout=None)
    tally = tallies(model, 3)
    sums: dict[int, int] = {}
    for step in walk(model, train=True):
        for layer in gradients_of(model, step):
            for interval in range(3):
                total = tally[layer].add(0, (interval, str(step)), {"bias": torch.ones(1)})
                sums[layer] = sums.get(layer, 0) + (total is not None)
    assert sums == dict.fromkeys(range(400), 1)
    assert all(own.duplicates == 0 for own in tally.values())
