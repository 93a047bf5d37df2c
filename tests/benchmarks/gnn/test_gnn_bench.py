"""`culm bench gnn`: what is measured, in which order, and how it is aggregated."""

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

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.gnn.training_case import GraphCase, TrainingCurve, TrainingRequest

from benchmarks.gnn import (
    accuracy_bench,
    culm_graph_system,
    gnn_bench,
    hardware_ceiling,
    isolated_training,
    many_core_bench,
    pyg_systems,
)
from culm.errors import RunError
from culm.gnn.graph.csr_graph import TRAIN
from culm.gnn.leader.gnn_ledger import Evaluation

pytestmark = pytest.mark.skipif(find_spec("torch_geometric") is None, reason="culm is compared with PyG")
TINY = GraphCase(graph="gen:sbm,vertices=200,classes=3,degree=8", hidden=8, epochs=3, fanout=4, batch=32)
SECONDS = {
    "culm-async": 1.0,
    "culm-async-1": 0.8,
    "culm-pipe": 1.2,
    "culm-sync": 2.0,
    "pyg-edges": 4.0,
    "pyg-sparse": 3.0,
}


class FakeTrainer:
    """Fake systems with fixed epoch times that learn within ten epochs."""

    def __init__(self) -> None:
        self.requests: list[TrainingRequest] = []

    def __call__(self, request: TrainingRequest) -> TrainingCurve:
        self.requests.append(request)
        seconds = SECONDS.get(request.system, 5.0) / request.cores + request.latency_s
        accuracy = [min(0.8, 0.08 * epoch) for epoch in range(request.case.epochs)]
        return TrainingCurve((seconds,) * request.case.epochs, tuple(accuracy), tuple(a - 0.01 for a in accuracy))

    def watched(self, request: TrainingRequest) -> tuple[TrainingCurve, float]:
        return self(request), 1.5


def effort(rounds: int = 2) -> gnn_bench.GraphBenchEffort:
    case = GraphCase(graph="gen:rmat,scale=8", epochs=20)
    missing = GraphCase(graph="/nowhere/cora.npz")
    return gnn_bench.GraphBenchEffort(
        cases=(case, missing), rounds=rounds, latency_case=case, latencies_ms=(0.0, 100.0),
        scaling_case=case, large_case=case,
    )  # fmt: skip


def test_every_system_trains_every_case_in_every_round_on_the_same_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gnn_bench, "usable_cores", lambda: 4)
    fake, messages = FakeTrainer(), list[str]()
    result = gnn_bench.run(
        effort=effort(rounds=3), train_function=fake, watched_train_function=fake.watched, progress=messages.append
    )
    rows = fake.requests[: 3 * len(isolated_training.SYSTEMS)]
    assert Counter(request.system for request in rows) == dict.fromkeys(isolated_training.SYSTEMS, 3)
    assert {request.cores for request in rows} == {4}
    assert [row["system"] for row in result["rows"]] == list(isolated_training.SYSTEMS)
    assert any("cora is not available" in line for line in messages)
    json.dumps(result)


def test_rows_hold_time_accuracy_and_value_to_the_same_target() -> None:
    fake = FakeTrainer()
    rows = gnn_bench.compare_systems(
        effort().cases[0], isolated_training.SYSTEMS, cores=1, rounds=2, train_function=fake
    )
    by_system = {row["system"]: row for row in rows}
    assert {row["target"] for row in rows} == {0.99 * 0.8}
    assert by_system["pyg-edges"]["ratio"] == 4.0
    assert by_system["culm-async"]["s_to_accuracy"] == 11.0
    assert by_system["culm-async"]["accuracy"] == pytest.approx(0.79)
    ours, theirs = by_system["culm-async"]["value"], by_system["pyg-edges"]["value"]
    assert ours is not None and theirs is not None
    assert ours / theirs == pytest.approx(16)


def test_modes_with_latency_are_compared_with_pipe() -> None:
    fake = FakeTrainer()
    rows = gnn_bench.measure_latency(effort(), 1, fake)
    assert len({(request.intervals, request.cores) for request in fake.requests}) == 1
    without_latency = {row["mode"]: row["against_pipe"] for row in rows if row["latency_ms"] == 0}
    assert without_latency == {
        "sync": pytest.approx(0.6),
        "pipe": 1.0,
        "async": pytest.approx(1.2),
        "async-1": pytest.approx(1.5),
    }
    assert len(rows) == 8


def test_scaling_stops_at_the_available_cores() -> None:
    rows = gnn_bench.measure_scaling(effort().scaling_case, 6, FakeTrainer())
    assert [(row["cores"], row["speedup"]) for row in rows] == [(1, 1.0), (2, 2.0), (4, 4.0)]


def test_the_table_shows_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTrainer()
    result = gnn_bench.run(effort=effort(), train_function=fake, watched_train_function=fake.watched)
    assert gnn_bench.render_table(result).row_count == len(isolated_training.SYSTEMS)


@settings(max_examples=20)
@given(st.integers(2, 6))
def test_every_system_has_every_position_once_in_a_cycle_of_rounds(count: int) -> None:
    systems = [str(n) for n in range(count)]
    orders = [gnn_bench.system_order(systems, number) for number in range(count)]
    assert all(sorted(order) == systems for order in orders)
    assert all(set(place) == set(systems) for place in zip(*orders, strict=True))


def test_the_accuracy_of_a_curve_is_that_of_the_best_validation_epoch() -> None:
    curve = TrainingCurve((9.0, 1.0, 1.0, 1.0, 1.0), (0.1, 0.5, 0.7, 0.7, 0.6), (0.1, 0.4, 0.6, 0.9, 0.8))
    assert curve.accuracy == 0.6
    assert curve.s_per_epoch == 1.0
    assert curve.seconds_to(0.7) == 11.0
    assert curve.seconds_to(0.71) is None


def test_the_median_is_none_unless_most_rounds_reach_the_target() -> None:
    assert gnn_bench.median_or_none([1.0, None, 3.0]) == 3.0
    assert gnn_bench.median_or_none([1.0, None]) is None


def test_accuracy_is_constant_between_evaluations() -> None:
    val, test = culm_graph_system.accuracy_per_epoch([Evaluation(1, 0.9, 0.5, 0.4), Evaluation(3, 0.9, 0.7, 0.6)], 5)
    assert val == (0.0, 0.5, 0.5, 0.7, 0.7)
    assert test == (0.0, 0.4, 0.4, 0.6, 0.6)


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_a_sampled_neighbourhood_is_a_subgraph_within_its_fanout(seeds: int, fanout: int, hops: int, seed: int) -> None:
    graph = pyg_systems.load_graph(TINY)
    sampler = pyg_systems.NeighbourSampler(graph, fanout, hops, np.random.default_rng(seed))
    batch = np.random.default_rng(seed).choice(graph.vertices, seeds, replace=False)
    vertices, edges = sampler.sample_subgraph(batch)
    assert (vertices[:seeds] == batch).all()
    assert len(set(vertices)) == len(vertices)
    real = {(int(s), v) for v in range(graph.vertices) for s in graph.indices[graph.indptr[v] : graph.indptr[v + 1]]}
    assert {(int(vertices[s]), int(vertices[t])) for s, t in edges.T} <= real
    incoming = Counter(edges[1].tolist())
    assert all(incoming[n] == min(fanout, graph.degrees[vertices[n]]) for n in range(seeds))
    assert set(range(len(vertices))) == set(range(seeds)) | set(edges[0].tolist())


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 200), st.integers(0, 9))
def test_mini_batches_cover_every_training_vertex_once_with_equal_steps_per_rank(
    cores: int, batch: int, epoch: int
) -> None:
    graph = pyg_systems.load_graph(TINY)
    case = GraphCase(graph=TINY.graph, batch=batch)
    request = TrainingRequest(system="sampled-ddp", case=case, cores=cores)
    shares = [pyg_systems.rank_batches(graph, request, epoch, rank) for rank in range(cores)]
    assert len({len(share) for share in shares}) == 1
    assert all(len(part) for share in shares for part in share)
    seen = np.concatenate([part for share in shares for part in share])
    assert sorted(seen) == np.flatnonzero(graph.roles == TRAIN).tolist()


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_pyg_gives_the_same_with_edges_and_with_a_sparse_matrix(model: str) -> None:
    case = GraphCase(
        graph=TINY.graph, model=model, hidden=8, heads=2, epochs=3, dropout=0.0
    )  # the order of edges differs
    curves = [
        pyg_systems.train_whole_graph(TrainingRequest(system=name, case=case, cores=1))
        for name in ("pyg-edges", "pyg-sparse")
    ]
    assert curves[0].val == pytest.approx(curves[1].val, abs=0.03)
    assert len(curves[0].seconds) == 3


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.parametrize("system", ["culm-async", "sampled-ddp"])
def test_systems_of_several_processes_train_and_their_memory_is_measured(system: str) -> None:
    curve, peak = isolated_training.train_with_peak_memory(TrainingRequest(system=system, case=TINY, cores=2))
    assert len(curve.seconds) == len(curve.val) == 3
    assert min(curve.seconds) > 0
    assert 0 < peak < 8  # forked processes share most of their pages, with any number of other processes


def test_a_process_tree_has_all_descendants() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        pids = isolated_training.process_tree(shell.pid)
        assert pids[0] == shell.pid and len(pids) == 2
        assert set(pids) < set(isolated_training.process_tree(os.getpid()))
        os.kill(pids[1], signal.SIGKILL)


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.real
def test_a_failing_system_raises_one_sentence() -> None:
    with pytest.raises(RunError, match=r"pyg-edges failed on gen:nothing: .*nothing"):
        isolated_training.train_isolated(
            TrainingRequest(system="pyg-edges", case=GraphCase(graph="gen:nothing"), cores=1)
        )


class InstantTrainer:
    """Fake systems with fixed accuracy and number of epochs; asynchrony is a little worse."""

    def __call__(self, requests: Sequence[TrainingRequest]) -> list[TrainingCurve]:
        return [self.curve(request) for request in requests]

    def curve(self, request: TrainingRequest) -> TrainingCurve:
        best = 0.8 if request.system != "culm-async-1" else 0.793
        slow = {"pyg-sparse": 10, "culm-sync": 10, "culm-async": 12}.get(request.system, 15)
        val = [min(best, best * (epoch + 1) / slow) for epoch in range(request.case.epochs)]
        return TrainingCurve((1.0,) * request.case.epochs, tuple(val), tuple(v - 0.01 * request.seed for v in val))


def test_accuracy_and_epochs_are_compared_with_pyg() -> None:
    case = GraphCase(graph="gen:sbm,vertices=200", epochs=20)
    rows = {
        r["system"]: r for r in accuracy_bench.compare_accuracy(case, accuracy_bench.SYSTEMS, 3, 1, InstantTrainer())
    }
    assert rows["pyg-sparse"]["behind"] == 0
    assert rows["culm-async-1"]["behind"] == pytest.approx(0.7)
    assert [rows[s]["epochs"] for s in ("pyg-sparse", "culm-async", "culm-async-1")] == [10, 12, 15]
    assert rows["culm-sync"]["accuracy"] == pytest.approx(0.79)
    assert "| gen:sbm,vertices=200 | culm-async | 0.7900 ± 0.0100 | +0.00 | 12 (3 of 3) |" in accuracy_bench.markdown(
        list(rows.values())
    )


def test_the_seed_determines_weights_and_split_and_all_systems_are_evaluated_at_the_same_epochs() -> None:
    request = accuracy_bench.make_request(GraphCase(graph="gen:rmat,scale=8"), "culm-sync", 3, 2)
    assert (request.seed, request.case.split_seed, request.evaluate_every) == (3, 3, accuracy_bench.EVALUATE_EVERY)


def test_a_system_that_never_reaches_the_target_is_marked() -> None:
    curve = TrainingCurve((1.0,) * 3, (0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
    row = accuracy_bench.accuracy_row(
        GraphCase(graph="gen:rmat,scale=8"), "culm-async", [curve], [TrainingCurve((1.0,), (0.9,), (0.9,))]
    )
    assert row["epochs"] is None
    assert "never" in accuracy_bench.markdown([row])


@given(st.floats(16, 1e4), st.floats(1e8, 1e12), st.sampled_from([16, 128]))
def test_the_largest_graph_fits_time_and_memory(seconds: float, space: float, features: int) -> None:
    scale = many_core_bench.largest_scale(features, seconds, space)
    more_time = many_core_bench.largest_scale(features, seconds * 2, space)
    more_space = many_core_bench.largest_scale(features, seconds, space * 2)
    assert scale <= more_time <= many_core_bench.largest_scale(features, seconds * 2, space * 2)
    assert scale <= more_space
    assert scale == 10 or 2**scale * 16 * many_core_bench.SECONDS_PER_EDGE <= seconds
    assert scale == 10 or 2**scale * features * many_core_bench.BYTES_PER_FEATURE <= space


def test_concurrent_trainings_return_in_order_and_share_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    running: set[int] = set()
    lock = threading.Lock()

    def record_cores(request: TrainingRequest) -> TrainingCurve:
        own_cores = set(range(request.first_core, request.first_core + request.cores))
        with lock:
            assert not running & own_cores
            running.update(own_cores)
        curve = TrainingCurve((float(request.seed),), (0.5,), (0.5,))
        with lock:
            running.difference_update(own_cores)
        return curve

    monkeypatch.setattr(isolated_training, "usable_cores", lambda: 7)
    monkeypatch.setattr(isolated_training, "train_isolated", record_cores)
    requests = [TrainingRequest(system="culm-sync", case=TINY, cores=2, seed=n) for n in range(20)]
    assert [curve.seconds[0] for curve in isolated_training.train_side_by_side(requests)] == list(range(20))


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_the_ceiling_sums_the_rates_of_all_processes() -> None:
    rows = hardware_ceiling.measure_ceiling((50, 4, 8, 4, 3), cores=2, seconds=0.01)
    assert [(row["kernel"], row["processes"]) for row in rows] == [
        (kernel, count) for kernel in ("gather", "dense") for count in (1, 2)[: isolated_training.usable_cores()]
    ]
    assert all(row["per_s"] > 0 for row in rows)


def test_speedups_are_relative_to_one_process() -> None:
    rows = hardware_ceiling.add_speedups({"dense": [(1, 50.0), (2, 90.0), (4, 100.0)]})
    assert [row["speedup"] for row in rows] == [1.0, 1.8, 2.0]
