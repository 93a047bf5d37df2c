"""`culm bench scale`: the leader's real code with simulated nodes."""

from __future__ import annotations

import asyncio
import tempfile

import pytest
from benchmarks.scale.simulated_fleet import SimulatedFleet
from rich.console import Console

from benchmarks.scale import scale_bench, simulated_fleet
from culm.cluster.leader import leader_state


def test_the_rows_have_the_figures_that_scripts_rely_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_fleet, "STAGES", 2)
    monkeypatch.setattr(simulated_fleet, "MICRO_BATCHES", 2)
    monkeypatch.setattr(scale_bench, "STAGES", 2)
    monkeypatch.setattr(scale_bench, "QUICK_PIPELINES", (4,))
    result = scale_bench.run(quick=True)
    (row,) = result["rows"]
    assert row["nodes"] == 8
    for name in ("leader_ms_per_step", "decide_s", "spread_s", "epoch_bytes", "recovery_s", "adopt_s", "node_bytes"):
        assert row[name] > 0
    console = Console(record=True, width=140)
    console.print(scale_bench.render_table(result))
    assert "from the loss to the epoch" in console.export_text()
    assert scale_bench.draw_chart(result["rows"]).startswith("<svg")


def test_a_large_epoch_reaches_each_node_as_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit lowered, the store announces the epoch by its hash and every agent gets less than the whole."""
    monkeypatch.setattr(simulated_fleet, "STAGES", 2)
    monkeypatch.setattr(simulated_fleet, "MICRO_BATCHES", 32)
    monkeypatch.setattr(leader_state, "LARGE_EPOCH_BYTES", 0)

    async def start() -> tuple[list[int], int]:
        with tempfile.TemporaryDirectory() as folder:
            fleet = SimulatedFleet(4, folder)
            try:
                await fleet.start()
                return [len(part) for part in fleet.transport.parts], len(fleet.store.read("epoch") or b"")
            finally:
                await fleet.close()

    parts, whole = asyncio.run(start())
    assert len(parts) == 4
    assert max(parts) < whole
