"""A run that is interrupted ends at a step boundary with a checkpoint, whatever its strategy and whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_jobs import job

from culm.checkpoint import CheckpointCatalog, Storage
from culm.testing import Cluster, reference, simulate

STEPS = 40


def interrupted(out: Path, strategy: str, lost: int | None = None) -> int:
    """Interrupt a run after four steps, perhaps with a node lost at the same time. Returns its number of steps."""

    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(4)
        if lost is not None:
            cluster.kill(lost)
        cluster.store.write("gate/finish", b"0")

    found = simulate(
        job(steps=STEPS, exact=True),
        pipelines=2,
        stages=2,
        strategy=strategy,
        out=str(out),
        cost=lambda *_: 0.4,
        latency=0.001,
        script=script,
    )
    done = int(found.summary["steps"])
    assert found.weights_sha256 == reference(job(steps=done, exact=True)).weights_sha256
    assert CheckpointCatalog(Storage(out / "checkpoints")).newest().manifest.step == done
    assert found.summary["checkpoints"][-1] == done
    return done


@pytest.mark.parametrize("strategy", ["none", "checkpoint", "shadow", "reroute", "migrate", "templates"])
def test_an_interrupted_run_ends_soon_with_a_checkpoint(tmp_path: Path, strategy: str) -> None:
    assert 4 <= interrupted(tmp_path, strategy) <= 8


@pytest.mark.parametrize("lost", [0, 3], ids=["leader", "worker"])
@pytest.mark.parametrize("strategy", ["checkpoint", "shadow", "reroute"])
def test_an_interrupt_during_a_recovery_is_not_lost(tmp_path: Path, strategy: str, lost: int) -> None:
    assert interrupted(tmp_path, strategy, lost) <= 10


def test_a_resumed_run_continues_where_the_interrupted_one_ended(tmp_path: Path) -> None:
    done = interrupted(tmp_path / "a", "shadow")
    found = simulate(
        job(steps=done + 4, exact=True), stages=2, strategy="none", resume=str(tmp_path / "a"), out=str(tmp_path / "b")
    )
    assert found.weights_sha256 == reference(job(steps=done + 4, exact=True)).weights_sha256
