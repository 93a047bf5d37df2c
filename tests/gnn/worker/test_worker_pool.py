"""The worker pool: keeps the target number of workers, and launches no extra ones for a slow launch."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest

from culm.errors import RunError
from culm.gnn.launch.launcher import Ticket
from culm.gnn.transport import gnn_messages as messages
from culm.gnn.transport.tensor_link import TensorLink, connect_link
from culm.gnn.worker import worker_pool
from culm.gnn.worker.worker_pool import WorkerPool


@dataclass
class FakeClock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class SlowLauncher:
    """A slow launcher whose workers never connect."""

    clock: FakeClock
    seconds: float
    launched: int = 0
    name: str = "slow"

    async def launch(self, ticket: Ticket, count: int) -> None:
        self.launched += count
        self.clock.now += self.seconds

    async def close(self) -> None:
        pass


async def run_pool(launcher: SlowLauncher, *, seconds_per_poll: float, polls: int) -> None:
    pool = WorkerPool("r1", "token", launcher, 2, worker_seconds=60, on_event=lambda **_: None)
    supply = asyncio.create_task(pool.maintain_target_size())
    try:
        for _ in range(polls):
            await asyncio.sleep(0)
            launcher.clock.now += seconds_per_poll
        if supply.done():
            supply.result()
    finally:
        supply.cancel()
        with contextlib.suppress(asyncio.CancelledError, RunError):
            await supply
        await pool.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake_clock = FakeClock()
    monkeypatch.setattr(worker_pool, "time", fake_clock)
    monkeypatch.setattr(worker_pool, "_POLL_S", 0)
    return fake_clock


def test_a_slow_launch_does_not_count_against_the_connect_timeout(clock: FakeClock) -> None:
    launcher = SlowLauncher(clock, seconds=60.0)
    asyncio.run(run_pool(launcher, seconds_per_poll=1.0, polls=15))
    assert launcher.launched == 2


def test_workers_that_do_not_connect_in_time_are_launched_again(clock: FakeClock) -> None:
    launcher = SlowLauncher(clock, seconds=0.0)
    asyncio.run(run_pool(launcher, seconds_per_poll=3.0, polls=10))
    assert launcher.launched == 4


def test_a_run_without_any_worker_fails(clock: FakeClock) -> None:
    with pytest.raises(RunError, match=r"no worker has connected for 120 s: check that the slow launcher"):
        asyncio.run(run_pool(SlowLauncher(clock, seconds=0.0), seconds_per_poll=10.0, polls=20))


def test_a_stopped_worker_does_not_count_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> int:
        pool, closed = (
            WorkerPool("r1", "token", SlowLauncher(FakeClock(), 0.0), 1, worker_seconds=60, on_event=lambda **_: None),
            asyncio.Event(),
        )

        async def drain_after_worker_closed(link: TensorLink) -> None:
            """Let the worker close its end first, and let the pool notice, before the pool closes the link."""
            del link
            await closed.wait()
            for _ in range(5):
                await asyncio.sleep(0)

        def handle_message(link: TensorLink, message: messages.GnnMessage, tensors: object) -> None:
            link.close()
            closed.set()

        monkeypatch.setattr(TensorLink, "wait_until_drained", drain_after_worker_closed)
        worker = await connect_link(pool.address, "token", "worker w1 r1", handle_message, lambda _: None)
        worker.send(messages.WorkerHeartbeat(1, "here"))
        while len(pool) == 0:
            await asyncio.sleep(0)
        await pool.close()
        return pool.lost_count

    assert asyncio.run(scenario()) == 0
