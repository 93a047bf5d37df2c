"""The virtual event loop: the order of callbacks, and what moves the clock."""

from __future__ import annotations

import asyncio

import pytest

from culm.cluster.prepare_run import inspect_layers
from culm.testing import Deadlock, VirtualClock, chaos, run_virtual
from culm.testing.virtual_time import virtual_loop


def test_timers_of_one_moment_run_in_the_order_of_creation() -> None:
    async def main() -> list[int]:
        ran: list[int] = []
        loop, many = virtual_loop(), range(20)
        for number in many:
            loop.call_at(2.0 if number % 3 else 1.0, ran.append, number)
        await asyncio.sleep(3)
        return ran

    assert run_virtual(main()) == sorted(range(20), key=lambda number: (number % 3 > 0, number))


def test_sleepers_of_one_moment_wake_in_the_order_of_their_calls() -> None:
    async def main() -> list[tuple[int, float]]:
        clock, woke = VirtualClock(), list[tuple[int, float]]()

        async def sleep(number: int) -> None:
            await clock.sleep(0.25 * (number + 1))
            await clock.sleep(2.0 - clock.now())
            woke.append((number, clock.now()))

        await asyncio.gather(*map(sleep, (3, 0, 2, 1)))
        return woke

    assert run_virtual(main()) == [(0, 2.0), (1, 2.0), (2, 2.0), (3, 2.0)]


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_sleep_of_zero_lets_others_run_once(seconds: float) -> None:
    async def main() -> list[str]:
        done: list[str] = []
        asyncio.get_running_loop().call_soon(done.append, "other")
        await VirtualClock().sleep(seconds)
        done.append("me")
        return done if VirtualClock().now() == 0.0 else []

    assert run_virtual(main()) == ["other", "me"]


def test_cancelled_sleeps_and_timers_do_not_move_the_clock() -> None:
    async def main() -> float:
        sleeping = asyncio.create_task(VirtualClock().sleep(5))
        timer = asyncio.get_running_loop().call_later(7, pytest.fail)
        await asyncio.sleep(1)
        sleeping.cancel()
        timer.cancel()
        await asyncio.sleep(2)
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        return VirtualClock().now()

    assert run_virtual(main()) == 3.0


def test_cancelled_timers_do_not_hide_a_deadlock() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(7, pytest.fail).cancel()
        asyncio.create_task(VirtualClock().sleep(5)).cancel()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="every coroutine waits and no timer is set"):
        run_virtual(main())


@pytest.mark.parametrize("feature", ["clip", "evaluation"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_chaos_features_do_not_change_the_model_check(feature: str, exact: bool) -> None:
    assert inspect_layers(chaos.make_job((feature,), exact, 6)) == inspect_layers(chaos.make_job((), exact, 4))
