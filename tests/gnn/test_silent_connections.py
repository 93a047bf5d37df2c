"""Real runs while strangers hold connections to all of their ports."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.gnn.run_folder import all_processes_ended
from tests.gnn.silent_connections import SilentConnections, open_files_allowed
from tests.gnn.simulated_run import small_graph, small_model

from culm.gnn import GnnResult, train

GRAPH = small_graph()
SERVERS, PARAMETER_SERVERS = 2, 1
LISTENERS = SERVERS + PARAMETER_SERVERS + 1
LIMIT_S = 20.0
"""An undisturbed run takes about 2 s; silent connections that occupy threads delay it by 10 s for every few of them."""


def run(out: Path | None = None) -> GnnResult:
    return train(
        GRAPH,
        small_model(GRAPH),
        epochs=80,
        workers=2,
        threads=1,
        servers=SERVERS,
        parameter_servers=PARAMETER_SERVERS,
        out=out,
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
    undisturbed = run()
    with open_files_allowed(2 * LISTENERS * per_port + 200), SilentConnections(per_port, first_bytes) as silent:
        started_at = time.monotonic()
        disturbed = run(tmp_path / "run")
        assert time.monotonic() - started_at < LIMIT_S
        assert len([count for count in silent.count_by_port.values() if count]) >= LISTENERS
    assert disturbed.losses == undisturbed.losses
    assert disturbed.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert disturbed.summary["generations"] == 1
    assert all_processes_ended(tmp_path / "run")
