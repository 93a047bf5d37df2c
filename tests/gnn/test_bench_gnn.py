"""`culm bench gnn`: what is measured, in which order, and what is made of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gnn_case import Case, Curve, Request

from benchmarks import gnn, gnn_accuracy, gnn_ceiling, gnn_machine, gnn_ours, gnn_peers, gnn_sides
from culm.errors import RunError
from culm.gnn.graph import TRAIN
from culm.gnn.ledger import Evaluation

pytestmark = pytest.mark.skipif(find_spec("torch_geometric") is None, reason="PyG is measured beside culm")
TINY = Case(graph="gen:sbm,vertices=200,classes=3,degree=8", hidden=8, epochs=3, fanout=4, batch=32)
SECONDS = {
    "culm-async": 1.0,
    "culm-async-1": 0.8,
    "culm-pipe": 1.2,
    "culm-sync": 2.0,
    "pyg-edges": 4.0,
    "pyg-sparse": 3.0,
}


class Fake:
    """Systems whose epochs take what the script says, and that learn in ten of them."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def __call__(self, request: Request) -> Curve:
        self.asked.append(request)
        seconds = SECONDS.get(request.system, 5.0) / request.cores + request.latency_s
        accuracy = [min(0.8, 0.08 * epoch) for epoch in range(request.case.epochs)]
        return Curve((seconds,) * request.case.epochs, tuple(accuracy), tuple(a - 0.01 for a in accuracy))

    def watched(self, request: Request) -> tuple[Curve, float]:
        return self(request), 1.5


def effort(rounds: int = 2) -> gnn.Effort:
    case = Case(graph="gen:rmat,scale=8", epochs=20)
    gone = Case(graph="/nowhere/cora.npz")
    return gnn.Effort(
        cases=(case, gone), rounds=rounds, far=case, latencies_ms=(0.0, 100.0), scaled=case, large=case
    )  # fmt: skip


def test_every_system_trains_every_case_in_every_round_on_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gnn, "available", lambda: 4)
    fake, said = Fake(), list[str]()
    made = gnn.run(effort=effort(rounds=3), side=fake, watched=fake.watched, progress=said.append)
    rows = fake.asked[: 3 * len(gnn_sides.SYSTEMS)]
    assert Counter(request.system for request in rows) == dict.fromkeys(gnn_sides.SYSTEMS, 3)
    assert {request.cores for request in rows} == {4}
    assert [row["system"] for row in made["rows"]] == list(gnn_sides.SYSTEMS)
    assert any("cora is not beside this checkout" in line for line in said)
    json.dumps(made)


def test_rows_hold_time_accuracy_and_value_to_the_same_target() -> None:
    fake = Fake()
    rows = gnn.compared(effort().cases[0], gnn_sides.SYSTEMS, cores=1, rounds=2, side=fake)
    found = {row["system"]: row for row in rows}
    assert {row["target"] for row in rows} == {0.99 * 0.8}
    assert found["pyg-edges"]["ratio"] == 4.0
    assert found["culm-async"]["s_to_accuracy"] == 11.0
    assert found["culm-async"]["accuracy"] == pytest.approx(0.79)
    ours, theirs = found["culm-async"]["value"], found["pyg-edges"]["value"]
    assert ours is not None and theirs is not None
    assert ours / theirs == pytest.approx(16)


def test_modes_are_compared_under_latency_with_pipe_as_the_measure() -> None:
    fake = Fake()
    found = gnn.far(effort(), 1, fake)
    assert len({(request.intervals, request.cores) for request in fake.asked}) == 1
    near = {one["mode"]: one["against_pipe"] for one in found if one["latency_ms"] == 0}
    assert near == {"sync": pytest.approx(0.6), "pipe": 1.0, "async": pytest.approx(1.2), "async-1": pytest.approx(1.5)}
    assert len(found) == 8


def test_scaling_stops_at_the_cores_there_are() -> None:
    found = gnn.scaling(effort().scaled, 6, Fake())
    assert [(one["cores"], one["speedup"]) for one in found] == [(1, 1.0), (2, 2.0), (4, 4.0)]


def test_the_table_shows_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    made = gnn.run(effort=effort(), side=fake, watched=fake.watched)
    assert gnn.table(made).row_count == len(gnn_sides.SYSTEMS)


@settings(max_examples=20)
@given(st.integers(2, 6))
def test_every_system_has_every_place_of_a_round_once_in_a_cycle(count: int) -> None:
    systems = [str(n) for n in range(count)]
    orders = [gnn.turn(systems, number) for number in range(count)]
    assert all(sorted(order) == systems for order in orders)
    assert all(set(place) == set(systems) for place in zip(*orders, strict=True))


def test_a_curve_gives_the_test_accuracy_of_the_epoch_that_validation_chose() -> None:
    curve = Curve((9.0, 1.0, 1.0, 1.0, 1.0), (0.1, 0.5, 0.7, 0.7, 0.6), (0.1, 0.4, 0.6, 0.9, 0.8))
    assert curve.accuracy == 0.6
    assert curve.s_per_epoch == 1.0
    assert curve.s_to(0.7) == 11.0
    assert curve.s_to(0.71) is None


def test_half_of_the_rounds_have_to_get_there() -> None:
    assert gnn.middle([1.0, None, 3.0]) == 3.0
    assert gnn.middle([1.0, None]) is None


def test_accuracy_between_evaluations_stands_still() -> None:
    val, test = gnn_ours.held([Evaluation(1, 0.9, 0.5, 0.4), Evaluation(3, 0.9, 0.7, 0.6)], 5)
    assert val == (0.0, 0.5, 0.5, 0.7, 0.7)
    assert test == (0.0, 0.4, 0.4, 0.6, 0.6)


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_a_sampled_neighbourhood_is_out_of_the_graph_and_within_its_fanout(
    seeds: int, fanout: int, hops: int, seed: int
) -> None:
    graph = gnn_peers.read(TINY)
    sampler = gnn_peers.Sampler(graph, fanout, hops, np.random.default_rng(seed))
    asked = np.random.default_rng(seed).choice(graph.vertices, seeds, replace=False)
    vertices, edges = sampler.around(asked)
    assert (vertices[:seeds] == asked).all()
    assert len(set(vertices)) == len(vertices)
    real = {(int(s), v) for v in range(graph.vertices) for s in graph.indices[graph.indptr[v] : graph.indptr[v + 1]]}
    assert {(int(vertices[s]), int(vertices[t])) for s, t in edges.T} <= real
    incoming = Counter(edges[1].tolist())
    assert all(incoming[n] == min(fanout, graph.degrees[vertices[n]]) for n in range(seeds))
    assert set(range(len(vertices))) == set(range(seeds)) | set(edges[0].tolist())


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 200), st.integers(0, 9))
def test_an_epoch_of_mini_batches_sees_every_training_vertex_once_in_as_many_steps_everywhere(
    cores: int, batch: int, epoch: int
) -> None:
    graph = gnn_peers.read(TINY)
    case = Case(graph=TINY.graph, batch=batch)
    request = Request(system="sampled-ddp", case=case, cores=cores)
    shares = [gnn_peers.batches(graph, request, epoch, rank) for rank in range(cores)]
    assert len({len(share) for share in shares}) == 1
    assert all(len(part) for share in shares for part in share)
    seen = np.concatenate([part for share in shares for part in share])
    assert sorted(seen) == np.flatnonzero(graph.roles == TRAIN).tolist()


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_pyg_gives_the_same_over_edges_and_over_a_sparse_matrix(model: str) -> None:
    case = Case(graph=TINY.graph, model=model, hidden=8, heads=2, epochs=3, dropout=0.0)  # edges in another order
    curves = [gnn_peers.whole_graph(Request(system=name, case=case, cores=1)) for name in ("pyg-edges", "pyg-sparse")]
    assert curves[0].val == pytest.approx(curves[1].val, abs=0.03)
    assert len(curves[0].seconds) == 3


@pytest.mark.usefixtures("forked")
@pytest.mark.real
@pytest.mark.parametrize("system", ["culm-async", "sampled-ddp"])
def test_systems_of_several_processes_train_and_their_memory_is_seen(system: str) -> None:
    curve, peak = gnn_sides.train_watched(Request(system=system, case=TINY, cores=2))
    assert len(curve.seconds) == len(curve.val) == 3
    assert min(curve.seconds) > 0
    assert 0 < peak < 8  # what is forked shares most of its pages, with however many others


def test_a_tree_holds_all_that_came_out_of_a_process() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        found = gnn_sides.tree(shell.pid)
        assert found[0] == shell.pid and len(found) == 2
        assert set(found) < set(gnn_sides.tree(os.getpid()))
        os.kill(found[1], signal.SIGKILL)


@pytest.mark.usefixtures("anew")
@pytest.mark.real
def test_a_system_that_fails_says_so_in_one_sentence() -> None:
    with pytest.raises(RunError, match=r"pyg-edges failed on gen:nothing: .*nothing"):
        gnn_sides.train(Request(system="pyg-edges", case=Case(graph="gen:nothing"), cores=1))


class Quick:
    """Learns as fast as the system's name is long, and asynchrony a little less."""

    def __call__(self, requests: Sequence[Request]) -> list[Curve]:
        return [self.curve(request) for request in requests]

    def curve(self, request: Request) -> Curve:
        best = 0.8 if request.system != "culm-async-1" else 0.793
        slow = {"pyg-sparse": 10, "culm-sync": 10, "culm-async": 12}.get(request.system, 15)
        val = [min(best, best * (epoch + 1) / slow) for epoch in range(request.case.epochs)]
        return Curve((1.0,) * request.case.epochs, tuple(val), tuple(v - 0.01 * request.seed for v in val))


def test_what_is_learned_stands_beside_pyg_with_the_epochs_that_it_took() -> None:
    case = Case(graph="gen:sbm,vertices=200", epochs=20)
    rows = {r["system"]: r for r in gnn_accuracy.compared(case, gnn_accuracy.SYSTEMS, 3, 1, Quick())}
    assert rows["pyg-sparse"]["behind"] == 0
    assert rows["culm-async-1"]["behind"] == pytest.approx(0.7)
    assert [rows[s]["epochs"] for s in ("pyg-sparse", "culm-async", "culm-async-1")] == [10, 12, 15]
    assert rows["culm-sync"]["accuracy"] == pytest.approx(0.79)
    assert "| gen:sbm,vertices=200 | culm-async | 0.7900 ± 0.0100 | +0.00 | 12 (3 of 3) |" in gnn_accuracy.markdown(
        list(rows.values())
    )


def test_seeds_are_those_of_weights_and_splits_and_everyone_is_judged_after_the_same_epochs() -> None:
    asked = gnn_accuracy.request(Case(graph="gen:rmat,scale=8"), "culm-sync", 3, 2)
    assert (asked.seed, asked.case.split_seed, asked.every) == (3, 3, gnn_accuracy.EVERY)


def test_a_system_that_never_gets_there_says_so() -> None:
    low = Curve((1.0,) * 3, (0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
    found = gnn_accuracy.row(Case(graph="gen:rmat,scale=8"), "culm-async", [low], [Curve((1.0,), (0.9,), (0.9,))])
    assert found["epochs"] is None
    assert "never" in gnn_accuracy.markdown([found])


@given(st.floats(16, 1e4), st.floats(1e8, 1e12), st.sampled_from([16, 128]))
def test_the_largest_graph_is_the_last_that_fits_time_and_memory(seconds: float, space: float, features: int) -> None:
    scale = gnn_machine.largest(features, seconds, space)
    more_time = gnn_machine.largest(features, seconds * 2, space)
    more_space = gnn_machine.largest(features, seconds, space * 2)
    assert scale <= more_time <= gnn_machine.largest(features, seconds * 2, space * 2)
    assert scale <= more_space
    assert scale == 10 or 2**scale * 16 * gnn_machine.SECONDS_PER_EDGE <= seconds
    assert scale == 10 or 2**scale * features * gnn_machine.BYTES_PER_FEATURE <= space


def test_trainings_side_by_side_come_back_in_order_and_share_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    running: set[int] = set()
    lock = threading.Lock()

    def side(request: Request) -> Curve:
        mine = set(range(request.first, request.first + request.cores))
        with lock:
            assert not running & mine
            running.update(mine)
        curve = Curve((float(request.seed),), (0.5,), (0.5,))
        with lock:
            running.difference_update(mine)
        return curve

    monkeypatch.setattr(gnn_sides, "available", lambda: 7)
    monkeypatch.setattr(gnn_sides, "train", side)
    asked = [Request(system="culm-sync", case=TINY, cores=2, seed=n) for n in range(20)]
    assert [curve.seconds[0] for curve in gnn_sides.side_by_side(asked)] == list(range(20))


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_the_ceiling_counts_what_all_processes_do_together() -> None:
    found = gnn_ceiling.ceiling((50, 4, 8, 4, 3), cores=2, seconds=0.01)
    assert [(one["kernel"], one["processes"]) for one in found] == [
        (kernel, count) for kernel in ("gather", "dense") for count in (1, 2)[: gnn_sides.available()]
    ]
    assert all(one["per_s"] > 0 for one in found)


def test_a_ceiling_is_judged_by_what_one_process_does() -> None:
    found = gnn_ceiling.compared({"dense": [(1, 50.0), (2, 90.0), (4, 100.0)]})
    assert [one["speedup"] for one in found] == [1.0, 1.8, 2.0]
