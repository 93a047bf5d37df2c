"""Local workers: forked, dialling back, and gone when the launcher is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.gnn.house import small_graph

from culm.errors import RunError, UsageError
from culm.gnn.cutter import CUTTER, owners_aside
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.local import LocalLauncher
from culm.gnn.partition import owners

from . import launch_standin as standin

pytestmark = pytest.mark.real


def ticket(port: int, *, seconds: float = 60) -> Ticket:
    return Ticket(run="r1", token="secret", host="127.0.0.1", port=port, seconds=seconds)


def test_workers_dial_back_with_their_ticket_and_none_is_left_after_close() -> None:
    async def story() -> list[int]:
        launcher = LocalLauncher(entry=standin.named(standin.serve))
        async with standin.desk() as desk:
            await launcher.launch(ticket(desk.port), 3)
            cards = await desk.workers(3)
            assert {(c["run"], c["token"], c["seconds"]) for c in cards} == {("r1", "secret", 60)}
            assert sorted(c["pid"] for c in cards) == sorted(await launcher.pids())
            await launcher.launch(ticket(desk.port), 1)
            cards.append(await desk.worker())
            await launcher.close()
            await launcher.close()
        return [c["pid"] for c in cards]

    pids = asyncio.run(story())
    assert len(set(pids)) == 4
    assert all(map(standin.ended, pids))


def test_workers_of_two_kinds_come_out_of_one_process_and_end_together() -> None:
    async def story() -> list[int]:
        first = LocalLauncher(entry=standin.named(standin.serve))
        second = LocalLauncher(entry=standin.named(standin.hang), beside=first)
        async with standin.desk() as desk:
            await first.launch(ticket(desk.port), 1)
            (card,) = await desk.workers(1)
            await second.launch(ticket(desk.port), 2)
            assert await first.pids() == (card["pid"],)
            others = await second.pids()
            assert len({card["pid"], *others}) == 3
            assert {os.getpgid(pid) for pid in others} == {os.getpgid(card["pid"])}
            await second.close()
        return [card["pid"], *others]

    assert all(map(standin.ended, asyncio.run(story())))


def test_a_killed_worker_is_gone_from_the_living_and_the_others_stay() -> None:
    async def story() -> None:
        launcher = LocalLauncher(entry=standin.named(standin.serve))
        async with standin.desk() as desk:
            await launcher.launch(ticket(desk.port), 2)
            victim, other = [c["pid"] for c in await desk.workers(2)]
            os.kill(victim, signal.SIGKILL)
            assert await desk.gone.get() == victim
            while victim in await launcher.pids():
                pass
            assert await launcher.pids() == (other,)
            await launcher.close()

    asyncio.run(story())


def test_a_worker_that_hangs_is_ended_when_its_time_is_up() -> None:
    async def story() -> None:
        launcher = LocalLauncher(entry=standin.named(standin.hang))
        async with standin.desk() as desk:
            await launcher.launch(ticket(desk.port, seconds=0.3), 1)
            pid = (await desk.worker())["pid"]
            assert await asyncio.wait_for(desk.gone.get(), 60) == pid
            await launcher.close()

    asyncio.run(story())


def test_a_worker_that_raises_takes_nobody_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        launcher = LocalLauncher(entry=standin.named(standin.crash))
        await launcher.launch(ticket(1), 2)
        while await launcher.pids():
            pass
        await launcher.launch(ticket(1), 1)
        await launcher.close()

    asyncio.run(story())
    assert "worker of r1 could not start" in capfd.readouterr().err


def test_an_order_whose_sender_gave_up_does_not_shift_the_answers() -> None:
    async def story() -> None:
        launcher = LocalLauncher(entry=standin.named(standin.serve))
        async with standin.desk() as desk:
            with pytest.raises(TimeoutError):  # the nursery is still importing
                await asyncio.wait_for(launcher.launch(ticket(desk.port), 1), 0.01)
            assert len(await launcher.pids()) == 1
            await launcher.close()

    asyncio.run(story())


LAUNCHED = """
import asyncio, os, signal
from gnn import launch_standin as standin
from culm.gnn.cutter import CUTTER, owners_aside
from culm.gnn.launch.base import Ticket
from culm.gnn.launch.local import LocalLauncher
from culm.gnn.partition import owners
async def main():
    launcher = LocalLauncher(entry=standin.named(standin.hang))
    await launcher.launch(Ticket("r1", "t", "127.0.0.1", {port}, 60), 2)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def test_workers_do_not_outlive_a_launcher_that_is_killed() -> None:
    async def story() -> None:
        async with standin.desk() as desk:
            env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = subprocess.Popen([sys.executable, "-c", LAUNCHED.format(port=desk.port)], env=env)
            pids = {card["pid"] for card in await desk.workers(2)}
            process.kill()
            process.wait()
            assert {await asyncio.wait_for(desk.gone.get(), 60) for _ in pids} == pids

    asyncio.run(story())


def test_a_closed_launcher_launches_nothing() -> None:
    async def story() -> None:
        launcher = LocalLauncher()
        await launcher.close()
        await launcher.launch(ticket(1), 1)

    with pytest.raises(RunError, match="closed"):
        asyncio.run(story())


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(UsageError, match="count is -1"):
        asyncio.run(LocalLauncher().launch(ticket(1), -1))


def test_an_entry_that_is_not_there_ends_the_launch_with_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        launcher = LocalLauncher(entry="culm.gnn.nowhere:serve")
        with pytest.raises(RunError, match="has ended"):
            await launcher.launch(ticket(1), 1)
        await launcher.close()

    asyncio.run(story())
    assert "culm.gnn.nowhere:serve" in capfd.readouterr().err


def test_metis_works_aside_and_finds_what_it_would_find_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that leads, a SIGTERM that it hears would be taken for an error of METIS."""
    graph = small_graph()
    here = owners(graph, 3)
    monkeypatch.setattr("culm.gnn.partition.metis", None)

    async def story() -> None:
        launcher = LocalLauncher(entry=CUTTER)
        try:
            assert np.array_equal(await owners_aside(graph, 3, launcher, tmp_path / "cut"), here)
            failing = LocalLauncher(entry=standin.named(standin.crash), beside=launcher)
            with pytest.raises(RunError, match=r"METIS could not cut gen:sbm.* into 2 parts"):
                await owners_aside(graph, 2, failing, tmp_path / "again")
        finally:
            await launcher.close()

    asyncio.run(story())
