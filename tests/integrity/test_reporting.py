"""What a run reports of its losses: detection of killed processes, the time without a leader, counts after a resume."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import job

from culm.cluster.agent.liveness_probe import LivenessProber
from culm.cluster.run_setup import NodeRecord, encode
from culm.cluster.store.store import SessionLost
from culm.errors import RunError
from culm.observe.report.load_run import RunFolderReader
from culm.observe.report.report_data import build_report_data
from culm.testing import Faults, simulate
from culm.testing.virtual_time import VirtualClock, run_virtual

SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}


class Evictions:
    """A store that remembers whose session was ended."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def evict(self, key: str) -> bool:
        self.keys.append(key)
        return True


@pytest.mark.parametrize("probes", [1, 10, 30])
def test_a_killed_agent_that_still_listens_is_probed_until_it_does_not(probes: int) -> None:
    """Its worker has ended, but the agent gets no core to end on. A lease would take seconds longer."""
    store, asked = Evictions(), [0]

    async def refuses(_: str) -> bool:
        asked[0] += 1
        return asked[0] >= probes

    async def main() -> None:
        prober = LivenessProber(store, refuses, VirtualClock(None))  # type: ignore[arg-type]
        prober.add_node("nodes/3", encode(NodeRecord(3, "agent:3", ("worker:3",), "print", None, 0, "")))
        prober.handle_broken_connection("worker:3")
        await asyncio.sleep(9.0)
        assert not prober._nodes, "a node that is gone is forgotten"
        await prober.close()

    run_virtual(main())
    assert store.keys == ["nodes/3"]


def test_a_probe_without_a_session_ends_silently() -> None:
    """asyncio would print a traceback of an exception that nobody reads."""

    class NoSession:
        async def evict(self, key: str) -> bool:
            raise SessionLost("the session is lost")

    async def refuses(_: str) -> bool:
        return True

    async def main() -> None:
        reports: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        prober = LivenessProber(NoSession(), refuses, VirtualClock(None))  # type: ignore[arg-type]
        prober.add_node("nodes/3", encode(NodeRecord(3, "agent:3", (), "print", None, 0, "")))
        prober.handle_broken_connection("agent:3")
        await asyncio.sleep(1.0)
        await prober.close()
        gc.collect()
        assert reports == []

    run_virtual(main())


@pytest.mark.parametrize("node", [0, 3])
def test_the_recovery_includes_the_time_in_which_the_run_stood_still(
    node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows when the node fell silent. The last commit of the lost leader is known."""
    monkeypatch.setattr(VirtualClock, "killed_at", lambda *_: None)
    described = job(exact=True, steps=8)
    failure_free = simulate(described, cost=lambda *_: 0.01, **SHAPE)
    ran = simulate(
        described, cost=lambda *_: 0.01, faults=Faults().partition(node, step=4, seconds=1e6), lease_s=2.0, **SHAPE
    )
    (record,) = ran.summary["recoveries"]
    counted = sum(record[name] for name in ("detect_ms", "decide_ms", "move_ms", "redo_ms")) / 1e3
    stood_still = ran.summary["wall_s"] - failure_free.summary["wall_s"]
    assert stood_still > 1.5
    assert counted > 0.9 * stood_still - 0.1


def test_preemptions_and_recoveries_agree_after_a_resume(tmp_path: Path) -> None:
    """Node 3 is lost in both parts of the run."""
    out, first = str(tmp_path / "a"), Faults().kill(3, step=1).kill((0, 1, 2), step=4)
    with pytest.raises(RunError):
        simulate(job(steps=8), faults=first, out=out, checkpoint_every=2, **SHAPE)
    simulate(job(steps=8), faults=Faults().kill(3, step=6), out=out, resume=out, **SHAPE)
    shown = build_report_data(RunFolderReader(out).read())
    lost = [node for recovery in shown.recoveries for node in recovery.lost]
    assert (shown.preemptions, lost) == (2, ["3", "3"])
