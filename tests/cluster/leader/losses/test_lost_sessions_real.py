"""Real nodes whose sessions in etcd expire together: they rejoin with their state, and no bit differs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import Nap, job

from culm.cluster.leader.output import input_log
from culm.cluster.run_setup import RunResult
from culm.cluster.store.etcd import EtcdStore
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.testing import reference
from culm.training import pickle_job

pytestmark = [pytest.mark.real, pytest.mark.waits(8), pytest.mark.usefixtures("forked_programs")]
PATIENCE_S = 180.0
STEPS = 60
NODES = 4
STOPPED_S = 5.0
"""Longer than a lease, which is 2 s long here."""
Disturb = Callable[[RunHandle], Awaitable[None]]


@pytest.fixture(scope="module")
def fork_server(forked_programs: None) -> Iterator[ForkServerClient]:
    """A fork server of this module, because its etcd is stopped."""
    with ForkServerClient() as made:
        yield made


def run_disturbed(fork_server: ForkServerClient, folder: Path, disturb: Disturb, **fields: Any) -> RunResult:
    """Run a 2 x 2 job, disturb it after its third step, and return its result."""
    request = RunConfig(pipelines=2, stages=2, strategy="reroute", suspect_after=1.0, out=str(folder))
    described = job(layers=fields.get("layers", [Nap] * 4), steps=STEPS, exact=True)

    async def main() -> RunResult:
        async with local_run(fork_server, pickle_job(described), request) as run:
            for _ in range(3):
                await run.next_step()
            await disturb(run)
            return await run.wait_for_result()

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def failure_free() -> str:
    return reference(job(layers=[partial(Nap, 0.0)] * 4, steps=STEPS, exact=True)).state_sha256


def processes_of(fork_server: ForkServerClient) -> list[int]:
    """The process ids of all agents and workers."""
    agents = [fork_server.process_table.agent_pid(node) for node in range(NODES)]
    return [
        *agents,
        *(int(pid) for a in agents for pid in Path(f"/proc/{a}/task/{a}/children").read_text().split()),
    ]


async def stop_for_a_while(processes: Sequence[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    for process in processes:
        os.kill(process, signal.SIGCONT)


def assert_nothing_lost(result: RunResult, folder: Path) -> None:
    assert result.summary is not None, result.message
    assert result.summary["state_sha256"] == failure_free()
    assert result.summary["preemptions"] == 0
    assert (result.summary["samples_lost"], result.summary["samples_duplicated"]) == (0, 0)
    kinds = [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds.count("sessions_expired") == 1
    for path in folder.glob(input_log.FILE_PATTERN):
        count, difference = input_log.replay(path)
        assert (count > 10, difference) == (True, None), path


def test_an_etcd_that_hangs_for_longer_than_a_lease_loses_no_node(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    async def disturb(_: RunHandle) -> None:
        assert fork_server.private_etcd is not None
        await stop_for_a_while([fork_server.private_etcd.pid])

    assert_nothing_lost(run_disturbed(fork_server, tmp_path, disturb), tmp_path)


def test_nodes_that_all_stand_still_for_longer_than_a_lease_are_not_lost(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    async def disturb(_: RunHandle) -> None:
        await stop_for_a_while(processes_of(fork_server))

    assert_nothing_lost(run_disturbed(fork_server, tmp_path, disturb), tmp_path)


@pytest.mark.parametrize("who", ["the leader", "another node"])
def test_a_node_whose_session_has_ended_returns_with_its_state(
    fork_server: ForkServerClient, tmp_path: Path, who: str
) -> None:
    """Its lease is revoked while it computes."""

    async def disturb(run: RunHandle) -> None:
        assert run.leader is not None
        assert isinstance(run.store, EtcdStore)
        assert await run.store.evict(f"nodes/{run.leader if who == 'the leader' else (run.leader + 1) % NODES}")

    result = run_disturbed(fork_server, tmp_path, disturb)
    assert result.summary is not None, result.message
    assert (result.summary["state_sha256"], result.summary["preemptions"]) == (failure_free(), 0)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert "lost" not in kinds
