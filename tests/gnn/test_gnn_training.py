"""Training with real processes: equality with PyG, and recovery from losses."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gnn import pyg_reference
from tests.gnn.run_folder import all_processes_ended, read_events
from tests.gnn.simulated_run import small_graph, small_model

from culm.errors import UsageError
from culm.gnn import GnnCallbacks, GnnModel, GnnResult, train
from culm.gnn.launch.launcher import Ticket
from culm.gnn.leader.gnn_ledger import EpochLoss
from culm.gnn.model.gnn_model import initial_weights, pyg_state_dict
from culm.gnn.worker.elastic_worker import serve

EPOCHS = 20
GRAPH = small_graph()
OPTIONS: dict[str, Any] = {"epochs": EPOCHS, "evaluate_every": 8, "workers": 2, "threads": 1, "checkpoint_every": 4}


def run(model: GnnModel, **options: Any) -> GnnResult:
    return train(GRAPH, model, **{**OPTIONS, **options})


def reference(model: GnnModel) -> list[float]:
    return pyg_reference.pyg_losses(GRAPH, model, pyg_state_dict(initial_weights(model, 0, None)), EPOCHS)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.parametrize(("kind", "servers", "mode"), [("gcn", 1, "sync"), ("gat", 2, "sync"), ("gcn", 4, "pipe")])
def test_a_run_equals_pyg_and_its_model_loads_there(kind: str, servers: int, mode: str, tmp_path: Path) -> None:
    model = small_model(GRAPH, kind)
    result = run(model, servers=servers, mode=mode, out=str(tmp_path / "run"))
    assert result.losses == pytest.approx(reference(model), abs=1e-5)
    net = result.to_pyg().eval()
    with torch.no_grad():
        correct = (
            net(torch.from_numpy(GRAPH.features), pyg_reference.edge_index(GRAPH)).argmax(1).numpy() == GRAPH.labels
        )
    assert float(correct[GRAPH.roles == 4].mean()) == pytest.approx(result.test_accuracy)
    assert all_processes_ended(tmp_path / "run")


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_hundred_worker_kills_and_five_server_kills_change_no_bit(tmp_path: Path) -> None:
    model = small_model(GRAPH, dropout=0.4)
    options = {"servers": 2, "parameter_servers": 2, "workers": 3}
    failure_free = run(model, **options)
    disturbed = run(model, **options, kills=["chaos workers=100 servers=5"], out=str(tmp_path / "run"))
    assert disturbed.losses == failure_free.losses
    for what in ("weights_sha256", "state_sha256"):
        assert disturbed.summary[what] == failure_free.summary[what]
    assert disturbed.summary["state_sha256"] != disturbed.summary["weights_sha256"]
    victims = [e["node"] for e in read_events(tmp_path / "run") if e["kind"] == "kill"]
    assert sum(v == "worker" for v in victims) == 100
    assert disturbed.summary["workers_lost"] >= 100 - options["workers"]  # workers that end with the run do not count
    assert len(victims) - 100 == 5 <= sum(len(recovery["lost"]) for recovery in disturbed.summary["recoveries"])
    assert disturbed.summary["generations"] > 1
    assert disturbed.summary["samples_lost"] == disturbed.summary["samples_duplicated"] == 0
    lines = [json.loads(line) for line in (tmp_path / "run/steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(EPOCHS))
    assert all_processes_ended(tmp_path / "run")


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.parametrize("lookahead", [True, False])
def test_async_survives_kills_and_learns_and_the_weights_returned_are_those_evaluated(lookahead: bool) -> None:
    kills = ["chaos workers=5", "parameter=0 epoch=9", "server=1 epoch=13"]
    result = run(
        small_model(GRAPH), mode="async", staleness=1, lookahead=lookahead, servers=2, parameter_servers=2, kills=kills
    )
    assert result.summary["lookahead"] is lookahead
    assert result.summary["generations"] > 1
    assert (result.summary["epochs"], result.summary["samples_lost"]) == (EPOCHS, 0)
    assert result.losses[-1] < result.losses[0]
    net = result.to_pyg().eval()
    with torch.no_grad():
        correct = (
            net(torch.from_numpy(GRAPH.features), pyg_reference.edge_index(GRAPH)).argmax(1).numpy() == GRAPH.labels
        )
    assert float(correct[GRAPH.roles == 4].mean()) == pytest.approx(result.test_accuracy)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_layers_may_be_spread_over_parameter_servers() -> None:
    model = small_model(GRAPH, layers=3)
    result = run(model, parameter_servers=2, kills=["parameter=1 epoch=6"])
    assert result.losses == pytest.approx(reference(model), abs=1e-5)
    assert len(result.summary["recoveries"]) == 1


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_pyg_model_and_data_are_accepted_and_training_stops_early() -> None:
    data = pyg_reference.import_pyg("data").Data(
        x=torch.from_numpy(GRAPH.features), edge_index=pyg_reference.edge_index(GRAPH), y=torch.from_numpy(GRAPH.labels)
    )
    net = pyg_reference.import_pyg("nn").GCN(GRAPH.width, 6, 2, GRAPH.classes)
    result = train(data, net, **{**OPTIONS, "lr": 0.0, "weight_decay": 0.0, "patience": 2, "evaluate_every": 2})
    assert result.summary["epochs"] == 6
    assert result.summary["stopped_early"].startswith("validation accuracy has not passed")
    assert all(torch.equal(tensor, result.weights[name]) for name, tensor in net.state_dict().items())


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_rows_are_sent_to_a_worker_that_cannot_map_tables() -> None:
    model = small_model(GRAPH, "gat")
    assert run(model, servers=2, share=False, edges="worker").losses == pytest.approx(reference(model), abs=1e-5)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.waits(5)
def test_excess_workers_are_stopped_and_the_events_give_the_reason(tmp_path: Path) -> None:
    run(
        small_model(GRAPH),
        workers="auto",
        epochs=100,
        intervals=1,
        evaluate_every=50,
        latency_s=0.02,
        out=str(tmp_path / "r"),
    )
    events = read_events(tmp_path / "r")
    tuned = [e for e in events if e["kind"] == "autotune"]
    ups = sum(e["kind"] == "worker-up" for e in events)
    assert ups == 1 or any("were idle" in e["why"] for e in tuned)


def test_a_worker_without_its_run_exits_quietly() -> None:
    serve(Ticket("no-run", "no-token", "127.0.0.1", 9, 5.0))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"servers": 91}, "--servers 91 for 90 vertices: a server needs at least one, use fewer"),
        ({"mode": "fast"}, "--mode 'fast': use sync, pipe, async"),
        ({"staleness": 1}, "--staleness 1 with --mode sync"),
        ({"workers": 0}, "--workers 0: give a number of at least 1, or auto"),
        ({"epochs": 0}, "--epochs is 0: give at least 1"),
        ({"launcher": "mail"}, "there is no launcher 'mail'"),
        ({"edges": "nobody"}, "edges is 'nobody': give worker or server"),
        ({"init": {}}, "init: convs.0.lin.weight is missing"),
    ],
)
def test_an_invalid_request_is_rejected_before_anything_starts(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        run(small_model(GRAPH), **{**options, "out": str(tmp_path / "run")})
    assert sentence in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.waits(9)
def test_a_single_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    model = small_model(GRAPH)
    stopped: list[int] = []

    def stop(done: EpochLoss, elapsed_s: float) -> None:
        if done.epoch >= 4 and not stopped:
            stopped.extend(e["pid"] for e in read_events(tmp_path / "run") if e["kind"] == "worker-up")
            os.kill(stopped[0], signal.SIGSTOP)

    result = run(model, workers=1, evaluate_every=2, out=str(tmp_path / "run"), callbacks=GnnCallbacks(on_epoch=stop))
    assert stopped
    assert result.losses == pytest.approx(reference(model), abs=1e-5)
    assert result.summary["workers_lost"] >= 1  # on a busy machine another worker may also be too slow
    assert result.summary["relaunches"] >= 1
    assert all_processes_ended(tmp_path / "run")
