"""24 real SIGKILLs of a node's agent and worker, at an action, with processes connected only by sockets.

The sweep over every action is simulated (tests/testing); this fixed sample shows that real nodes behave the same. Each
run must end with the weights and the optimizer state of one failure-free process, to the last bit.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cached_runs import reference_result
from tests.tiny_jobs import job, linear

from culm.cluster.prepare_run import inspect_layers
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, local_run
from culm.training import pickle_job

pytestmark = pytest.mark.real
PATIENCE_S = 60.0
STEP = 1
TRIES = 6
JOB = job(layers=[linear] * 6, steps=STEP + 4, exact=True)

SAMPLE = [
    # 2 x 3: pipeline 0 is nodes 0 to 2 with micro-batches 0 and 1, pipeline 1 nodes 3 to 5 with 2 and 3.
    ("reroute", "1f1b", 2, "node=0 at=0F1"),
    ("reroute", "1f1b", 2, "node=4 at=1B2"),
    ("reroute", "1f1b", 2, "node=5 at=2R"),
    ("reroute", "1f1b", 2, "node=1 at=1S"),
    ("reroute", "1f1b", 2, "node=2 at=2S+"),
    ("reroute", "1f1b", 2, "leader at=commit"),
    ("reroute", "zb", 2, "node=2 at=2I0"),
    ("reroute", "zb", 2, "node=3 at=0W3"),
    ("reroute", "zb", 2, "node=1 at=1R"),
    ("reroute", "zb", 2, "node=3,4 at=1F3"),
    ("shadow", "1f1b", 2, "node=5 at=2F2"),
    ("shadow", "1f1b", 2, "node=0 at=0B0"),
    ("shadow", "1f1b", 2, "node=1,2 at=1B1"),
    ("shadow", "zb", 2, "node=4 at=1I3"),
    ("shadow", "zb", 2, "node=2 at=2S"),
    ("shadow", "zb", 2, "leader at=commit"),
    ("shadow-lazy", "1f1b", 2, "node=3 at=0R"),
    ("shadow-lazy", "1f1b", 2, "node=2,3 at=2B1"),
    ("shadow-lazy", "zb", 2, "node=1 at=1W0"),
    ("shadow-lazy", "zb", 2, "node=5 at=2S+"),
    # One pipeline: only its shadows hold what is lost.
    ("shadow", "1f1b", 1, "node=0 at=0F3"),
    ("shadow", "zb", 1, "node=1 at=1W2"),
    ("shadow-lazy", "1f1b", 1, "node=2 at=2R"),
    ("shadow-lazy", "zb", 1, "node=1 at=1S"),
]


def trained(fork_server: ForkServerClient, request: RunConfig) -> tuple[dict[str, Any], int]:
    """The summary of a run that must succeed, and its last leader."""

    async def main() -> tuple[dict[str, Any], int]:
        async with local_run(fork_server, pickle_job(JOB), request) as run:
            result = await run.wait_for_result()
            assert result.summary is not None, result.message
            return result.summary, run.leader or 0

    async def bounded() -> tuple[dict[str, Any], int]:
        return await asyncio.wait_for(main(), PATIENCE_S)

    return asyncio.run(bounded())


def hurt(fork_server: ForkServerClient, strategy: str, schedule: str, pipelines: int, kill: str) -> dict[str, Any]:
    """A run with a kill. Which node leads is known only afterwards, so a kill of the leader is aimed at the leader of
    the previous attempt, until it hits."""
    leader = 0
    for _ in range(TRIES):
        aimed = f"{kill.replace('leader', f'node={leader}')} step={STEP}"
        request = RunConfig(pipelines=pipelines, stages=3, schedule=schedule, strategy=strategy, kills=(aimed,))
        summary, leader = trained(fork_server, request)
        if summary["preemptions"]:
            return summary
        assert "leader" in kill
    raise AssertionError(f"in {TRIES} runs the leader was never the one that was aimed at")


@pytest.mark.parametrize(("strategy", "schedule", "pipelines", "kill"), SAMPLE)
def test_a_node_killed_by_sigkill_changes_no_bit_of_the_result(
    fork_server: ForkServerClient, strategy: str, schedule: str, pipelines: int, kill: str
) -> None:
    summary = hurt(fork_server, strategy, schedule, pipelines, kill)
    assert summary["weights_sha256"] == reference_result(JOB).weights_sha256
    assert summary["state_sha256"] == reference_result(JOB).state_sha256
    assert summary["samples"] == summary["samples_expected"] == JOB.steps * JOB.global_batch
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
    lost = [node for recovered in summary["recoveries"] for node in recovered["lost"]]
    assert summary["preemptions"] == len(lost) == 1 + kill.count(",")
    assert all(recovered["source"] in ("peers", "shadow") for recovered in summary["recoveries"])
    assert all(recovered["detect_ms"] > 0 for recovered in summary["recoveries"])


@pytest.mark.parametrize("kill", ["node=4 at=1I3", "node=2 at=2S"])
def test_a_sigkill_under_a_planned_schedule_changes_no_bit(
    fork_server: ForkServerClient, tmp_path: Path, kill: str
) -> None:
    """The profile says that splitting a backward costs nothing, so that the plan has whole and split ones."""
    path = str(tmp_path / "profile.json")
    profile = inspect_layers(JOB).profile
    layers = tuple(msgspec.structs.replace(layer, halving_s=0.0) for layer in profile.layers)
    msgspec.structs.replace(profile, layers=layers).save(path)
    request = RunConfig(
        pipelines=2, stages=3, schedule="planned", profile=path, improve_plan=0, kills=(f"{kill} step={STEP}",)
    )
    summary, _ = trained(fork_server, request)
    assert (summary["schedule"], summary["preemptions"]) == ("planned", 1)
    assert summary["state_sha256"] == reference_result(JOB).state_sha256
    assert 0 < summary["schedule_prediction"]["of_bubble_free"] <= 1


def test_the_sample_has_24_kills() -> None:
    assert len(set(SAMPLE)) == 24


def test_a_run_whose_layers_have_no_holder_returns_to_its_newest_checkpoint(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    """One pipeline loses a stage together with its only shadow."""
    kills = (f"node=1,2 step={STEP + 2} at=1F2",)
    request = RunConfig(stages=3, strategy="shadow", kills=kills, out=str(tmp_path), checkpoint_every=1)
    summary, _ = trained(fork_server, request)
    assert summary["state_sha256"] == reference_result(JOB).state_sha256
    assert [recovered["source"] for recovered in summary["recoveries"]] == ["checkpoint"]
