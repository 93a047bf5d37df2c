"""Virtual time: it jumps, never hangs, and is reproducible."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.tiny_jobs import job

from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.testing import Cluster, Deadlock, VirtualClock, run_virtual, simulate
from culm.transport.frames.simulated_network import Delivery, DeliveryTiming, SimulatedNetwork


def test_a_long_sleep_takes_no_time_at_all() -> None:
    async def main() -> float:
        await asyncio.sleep(10**7)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10**7)


def test_sleepers_wake_in_the_order_of_their_times() -> None:
    woken: list[float] = []

    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        assert asyncio.get_running_loop().time() == pytest.approx(seconds)
        woken.append(seconds)

    async def main() -> None:
        await asyncio.gather(*map(sleeper, (3.0, 1.0, 2.5, 0.0, 1e-9)))

    run_virtual(main())
    assert woken == sorted(woken)


def test_an_endless_wait_raises_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="every coroutine waits and no timer is set"):
        run_virtual(main())


def test_a_timeout_ends_an_endless_wait() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3600)

    run_virtual(main())


@pytest.mark.parametrize("end", ["well", "with an error", "with a deadlock"])
def test_nothing_is_left_running_after_any_end(end: str) -> None:
    tidied: list[str] = []

    async def beside() -> None:
        try:
            await asyncio.sleep(10) if end == "well" else await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            tidied.append("task")

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            tidied.append("generator")

    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        tasks.append(asyncio.create_task(beside()))
        async for _ in numbers():
            break
        if end == "with an error":
            raise ValueError("an error")
        if end == "with a deadlock":
            await asyncio.Event().wait()

    if end == "well":
        run_virtual(main())
    else:
        with pytest.raises((ValueError, Deadlock)):
            run_virtual(main())
    assert all(task.done() for task in tasks)
    assert sorted(tidied) == ["generator", "task"]
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()


def test_the_result_or_error_of_the_coroutine_is_passed_on() -> None:
    async def good() -> int:
        return 7

    async def bad() -> int:
        raise KeyError("x")

    assert run_virtual(good()) == 7
    with pytest.raises(KeyError):
        run_virtual(bad())


class Tapped(SimulatedNetwork):
    """A network that records everything that arrives, with its time."""

    def __init__(self, latency: float) -> None:
        super().__init__(latency)
        self.history: list[tuple[float, str]] = []

    def schedule_delivery(self, delivery: Delivery, timing: DeliveryTiming, action: Any, *arguments: Any) -> None:
        def arrive() -> None:
            at = asyncio.get_running_loop().time()
            self.history.append((at, f"{delivery} {action.__qualname__} {_describe(arguments)}"))
            action(*arguments)

        super().schedule_delivery(delivery, timing, arrive)


def _describe(arguments: tuple[Any, ...]) -> str:
    """Sender and content; of long messages only the beginning, since the last one contains memory figures."""
    return " ".join(str(argument)[:200] for argument in arguments)


def history(**request: Any) -> tuple[list[tuple[float, str]], list[Any], list[Any]]:
    """Everything that happens in a simulated run: on the network, in the events, and in the steps."""
    MemoryFileSystem.store.clear()
    described = job(steps=4)
    network = Tapped(latency=0.003)
    setup = prepare_run(described, RunConfig(out="memory://run", **request))
    run_virtual(Cluster(described, setup, VirtualClock(lambda n, *_: 0.01 + 0.001 * n), network).run())
    files = {name: MemoryFileSystem.store[f"/run/{name}.jsonl"].getvalue() for name in ("events", "steps")}
    events, steps = ([json.loads(line) for line in files[name].splitlines()] for name in ("events", "steps"))
    return network.history, events, steps


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_a_simulated_run_is_reproducible(memory_url: str, schedule: str) -> None:
    """Every frame, message and event, at the same virtual time and in the same order."""
    first, second = (history(pipelines=2, stages=2, schedule=schedule, checkpoint_every=2) for _ in range(2))
    assert len(first[0]) > 90
    assert first == second


def test_the_cost_of_actions_determines_the_duration_of_a_run(memory_url: str) -> None:
    *_, steps = history(pipelines=1, stages=2)
    assert [step["t"] for step in steps] == sorted({step["t"] for step in steps})
    assert steps[-1]["t"] > 4 * 8 * 0.01  # four steps of at least eight actions, one after the other


def test_a_script_that_fails_fails_the_simulation() -> None:
    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(1)
        raise ZeroDivisionError("in the script")

    with pytest.raises(ZeroDivisionError):
        simulate(job(steps=10**6), stages=2, strategy="none", script=script)
