"""The baseline strategies on real processes: after a SIGKILL the run continues as the strategy prescribes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import job, linear

from culm.checkpoint import CheckpointCatalog, Storage
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, local_run
from culm.testing import reference
from culm.training import pickle_job

pytestmark = pytest.mark.real
PATIENCE_S = 90.0
STEPS = 6
JOB = job(layers=[linear] * 4, steps=STEPS, exact=True)
KILL = "node=3 step=3 at=1B3"


def trained(fork_server: ForkServerClient, out: Path, **request: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The summary of a run that must succeed, and its events."""

    async def main() -> dict[str, Any]:
        asked = RunConfig(pipelines=2, stages=2, out=str(out), replace_within=0.0, **request)
        async with local_run(fork_server, pickle_job(JOB), asked) as run:
            result = await run.wait_for_result()
            assert result.summary is not None, result.message
            return result.summary

    async def bounded() -> dict[str, Any]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    summary = asyncio.run(bounded())
    return summary, [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def left_over(checkpoints: Path) -> list[Path]:
    """Files that belong to no checkpoint: shards of an incomplete one, or written too late."""
    catalog = CheckpointCatalog(Storage(checkpoints))
    kept = {checkpoints / f"step-{step:08d}" / name for step in catalog.steps() for name in catalog.check(step).files}
    return [path for path in checkpoints.rglob("*") if path.is_file() and path not in kept | manifests(checkpoints)]


def manifests(checkpoints: Path) -> set[Path]:
    return set(checkpoints.rglob("manifest.json"))


@pytest.mark.parametrize("restart", ["warm", "cold"])
@pytest.mark.parametrize("strategy", ["checkpoint", "migrate"])
def test_a_sigkill_restarts_all_nodes_from_the_checkpoint_and_changes_nothing_else(
    fork_server: ForkServerClient, tmp_path: Path, strategy: str, restart: str
) -> None:
    summary, events = trained(
        fork_server, tmp_path, strategy=strategy, restart=restart, checkpoint_every=2, kills=(KILL,)
    )  # fmt: skip
    assert summary["state_sha256"] == reference(JOB).state_sha256
    assert summary["samples"] == summary["samples_expected"]
    (lost,) = summary["recoveries"]
    assert (lost["lost"], lost["source"]) == ([3], "checkpoint")
    assert left_over(tmp_path / "checkpoints") == []
    renewed = sorted(event["node"] for event in events if event["kind"] == "worker_renewed")
    assert renewed == ([0, 1, 2] if restart == "cold" else [])


def test_under_drop_the_complete_pipeline_continues_and_the_ledger_counts_dropped_samples(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    summary, events = trained(fork_server, tmp_path, strategy="drop", kills=(KILL,))
    (dropping,) = [event for event in events if event["kind"] == "dropping"]
    without = {int(step): micros for step, micros in dropping["open_steps"].items()}
    without |= dict.fromkeys(range(dropping["step"], STEPS), dropping["micro_batches"])
    assert summary["state_sha256"] == reference(JOB, dropped=without).state_sha256
    assert summary["samples_lost"] == JOB.micro_batch * sum(map(len, without.values())) > 0


def test_auto_survives_a_sigkill(fork_server: ForkServerClient, tmp_path: Path) -> None:
    summary, events = trained(fork_server, tmp_path, strategy="auto", kills=(KILL,))
    assert summary["state_sha256"] == reference(JOB).state_sha256
    assert (summary["strategy"], summary["samples_lost"], summary["samples_redone"]) == ("reroute", 0, 0)
    assert "strategy reroute: " in next(event["why"] for event in events if event["kind"] == "run_started")
