"""Local workers: forked, connected, and ended when the launcher is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.gnn import fake_worker
from tests.gnn.simulated_run import small_graph

from culm.errors import RunError, UsageError
from culm.gnn.graph.graph_partition import assign_owners
from culm.gnn.launch.launcher import Ticket
from culm.gnn.launch.local_launcher import LocalLauncher
from culm.gnn.leader.metis_process import METIS_ENTRY, assign_owners_in_process

pytestmark = pytest.mark.real


def ticket(port: int, *, seconds: float = 60) -> Ticket:
    return Ticket(run="r1", token="secret", host="127.0.0.1", port=port, seconds=seconds)


def test_workers_connect_with_their_ticket_and_none_is_left_after_close() -> None:
    async def scenario() -> list[int]:
        launcher = LocalLauncher(entry=fake_worker.entry_name(fake_worker.serve))
        async with fake_worker.open_pool() as pool:
            await launcher.launch(ticket(pool.port), 3)
            introductions = await pool.next_workers(3)
            assert {(c["run"], c["token"], c["seconds"]) for c in introductions} == {("r1", "secret", 60)}
            assert sorted(c["pid"] for c in introductions) == sorted(await launcher.worker_pids())
            await launcher.launch(ticket(pool.port), 1)
            introductions.append(await pool.next_worker())
            await launcher.close()
            await launcher.close()
        return [c["pid"] for c in introductions]

    pids = asyncio.run(scenario())
    assert len(set(pids)) == 4
    assert all(map(fake_worker.process_ends, pids))


def test_two_launchers_share_a_fork_server_and_end_together() -> None:
    async def scenario() -> list[int]:
        first = LocalLauncher(entry=fake_worker.entry_name(fake_worker.serve))
        second = LocalLauncher(entry=fake_worker.entry_name(fake_worker.hang), share_with=first)
        async with fake_worker.open_pool() as pool:
            await first.launch(ticket(pool.port), 1)
            (introduction,) = await pool.next_workers(1)
            await second.launch(ticket(pool.port), 2)
            assert await first.worker_pids() == (introduction["pid"],)
            others = await second.worker_pids()
            assert len({introduction["pid"], *others}) == 3
            assert {os.getpgid(pid) for pid in others} == {os.getpgid(introduction["pid"])}
            await second.close()
        return [introduction["pid"], *others]

    assert all(map(fake_worker.process_ends, asyncio.run(scenario())))


def test_a_killed_worker_is_not_listed_and_the_others_stay() -> None:
    async def scenario() -> None:
        launcher = LocalLauncher(entry=fake_worker.entry_name(fake_worker.serve))
        async with fake_worker.open_pool() as pool:
            await launcher.launch(ticket(pool.port), 2)
            victim, other = [c["pid"] for c in await pool.next_workers(2)]
            os.kill(victim, signal.SIGKILL)
            assert await pool.ended_pids.get() == victim
            while victim in await launcher.worker_pids():
                pass
            assert await launcher.worker_pids() == (other,)
            await launcher.close()

    asyncio.run(scenario())


def test_a_worker_that_hangs_is_ended_after_its_lifetime() -> None:
    async def scenario() -> None:
        launcher = LocalLauncher(entry=fake_worker.entry_name(fake_worker.hang))
        async with fake_worker.open_pool() as pool:
            await launcher.launch(ticket(pool.port, seconds=0.3), 1)
            pid = (await pool.next_worker())["pid"]
            assert await asyncio.wait_for(pool.ended_pids.get(), 60) == pid
            await launcher.close()

    asyncio.run(scenario())


def test_a_worker_that_raises_does_not_affect_others(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        launcher = LocalLauncher(entry=fake_worker.entry_name(fake_worker.crash))
        await launcher.launch(ticket(1), 2)
        while await launcher.worker_pids():
            pass
        await launcher.launch(ticket(1), 1)
        await launcher.close()

    asyncio.run(scenario())
    assert "worker of r1 could not start" in capfd.readouterr().err


def test_a_cancelled_request_does_not_shift_the_responses() -> None:
    async def scenario() -> None:
        launcher = LocalLauncher(entry=fake_worker.entry_name(fake_worker.serve))
        async with fake_worker.open_pool() as pool:
            with pytest.raises(TimeoutError):  # the fork server is still importing
                await asyncio.wait_for(launcher.launch(ticket(pool.port), 1), 0.01)
            assert len(await launcher.worker_pids()) == 1
            await launcher.close()

    asyncio.run(scenario())


LAUNCHER_SCRIPT = """
import asyncio
from tests.gnn import fake_worker
from culm.gnn.launch.launcher import Ticket
from culm.gnn.launch.local_launcher import LocalLauncher
async def main():
    launcher = LocalLauncher(entry=fake_worker.entry_name(fake_worker.hang))
    await launcher.launch(Ticket("r1", "t", "127.0.0.1", {port}, 60), 2)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_workers_do_not_outlive_a_launcher_that_is_killed() -> None:
    async def scenario() -> None:
        async with fake_worker.open_pool() as pool:
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = subprocess.Popen([sys.executable, "-c", LAUNCHER_SCRIPT.format(port=pool.port)], env=env)
            pids = {introduction["pid"] for introduction in await pool.next_workers(2)}
            process.kill()
            process.wait()
            assert {await asyncio.wait_for(pool.ended_pids.get(), 60) for _ in pids} == pids

    asyncio.run(scenario())


def test_a_closed_launcher_launches_nothing() -> None:
    async def scenario() -> None:
        launcher = LocalLauncher()
        await launcher.close()
        await launcher.launch(ticket(1), 1)

    with pytest.raises(RunError, match="closed"):
        asyncio.run(scenario())


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(UsageError, match="count is -1"):
        asyncio.run(LocalLauncher().launch(ticket(1), -1))


def test_an_unknown_entry_fails_the_launch(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        launcher = LocalLauncher(entry="culm.gnn.nowhere:serve")
        with pytest.raises(RunError, match="has ended"):
            await launcher.launch(ticket(1), 1)
        await launcher.close()

    asyncio.run(scenario())
    assert "culm.gnn.nowhere:serve" in capfd.readouterr().err


def test_metis_in_a_process_gives_the_same_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """METIS runs in a process of its own, because it would take a SIGTERM of the leader's process for its own error."""
    graph = small_graph()
    expected = assign_owners(graph, 3)
    monkeypatch.setattr("culm.gnn.graph.graph_partition.metis_partition", None)

    async def scenario() -> None:
        launcher = LocalLauncher(entry=METIS_ENTRY)
        try:
            assert np.array_equal(await assign_owners_in_process(graph, 3, launcher, tmp_path / "cut"), expected)
            failing = LocalLauncher(entry=fake_worker.entry_name(fake_worker.crash), share_with=launcher)
            with pytest.raises(RunError, match=r"METIS could not partition gen:sbm.* into 2 parts"):
                await assign_owners_in_process(graph, 2, failing, tmp_path / "again")
        finally:
            await launcher.close()

    asyncio.run(scenario())
