"""Real runs while strangers hold connections to all of their ports."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.gnn.run_folder import all_processes_ended
from tests.gnn.silent_connections import SilentConnections, open_files_allowed
from tests.gnn.simulated_run import small_graph, small_model

from culm.gnn import GnnResult, train
from culm.gnn.gnn_run import GnnCallbacks

GRAPH = small_graph()
SERVERS, PARAMETER_SERVERS = 2, 1
LISTENERS = SERVERS + PARAMETER_SERVERS + 1
LIMIT_S = 45.0
"""The rest of a run takes about 2 s. Silent connections that occupy threads delay it by 10 s for every few of them: by
more than a minute for 40."""


def run(out: Path | None = None, on_epoch: Callable[..., None] = lambda *_: None) -> GnnResult:
    return train(
        GRAPH,
        small_model(GRAPH),
        epochs=80,
        workers=2,
        threads=1,
        servers=SERVERS,
        parameter_servers=PARAMETER_SERVERS,
        out=out,
        callbacks=GnnCallbacks(on_epoch=on_epoch),
    )


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.real
@pytest.mark.parametrize(
    ("per_port", "first_bytes"),
    [(40, b""), (1500, b""), (40, b"\xff" * 300)],
    ids=["40 silent", "1500 silent", "40 half handshakes"],
)
def test_strangers_on_every_port_change_no_bit_and_do_not_delay_the_end(
    per_port: int, first_bytes: bytes, tmp_path: Path
) -> None:
    failure_free = run()
    with open_files_allowed(2 * LISTENERS * per_port + 200), SilentConnections(per_port, first_bytes) as silent:
        connected_at: list[float] = []

        def wait_for_strangers(*_: Any) -> None:
            """After the first training epoch: all ports are open by then."""
            if not connected_at:
                silent.wait_for_ports(LISTENERS)
                connected_at.append(time.monotonic())

        disturbed = run(tmp_path / "run", wait_for_strangers)
        assert time.monotonic() - connected_at[0] < LIMIT_S
    assert disturbed.losses == failure_free.losses
    assert disturbed.summary["weights_sha256"] == failure_free.summary["weights_sha256"]
    assert disturbed.summary["generations"] == 1
    assert all_processes_ended(tmp_path / "run")
