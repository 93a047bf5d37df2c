"""Virtual time: what runs when, and what moves the clock."""

from __future__ import annotations

import asyncio

import pytest

from culm.cluster.prepare import look
from culm.testing import Deadlock, VirtualClock, chaos, run_virtual
from culm.testing.loop import virtual_loop


def test_what_is_due_at_one_moment_runs_in_the_order_of_being_asked_for() -> None:
    async def main() -> list[int]:
        ran: list[int] = []
        loop, many = virtual_loop(), range(20)
        for number in many:
            loop.call_at(2.0 if number % 3 else 1.0, ran.append, number)
        await asyncio.sleep(3)
        return ran

    assert run_virtual(main()) == sorted(range(20), key=lambda number: (number % 3 > 0, number))


def test_who_sleeps_until_one_moment_wakes_in_the_order_of_falling_asleep() -> None:
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
def test_to_sleep_for_no_time_lets_the_others_run_once(seconds: float) -> None:
    async def main() -> list[str]:
        done: list[str] = []
        asyncio.get_running_loop().call_soon(done.append, "other")
        await VirtualClock().sleep(seconds)
        done.append("me")
        return done if VirtualClock().now() == 0.0 else []

    assert run_virtual(main()) == ["other", "me"]


def test_a_sleep_or_a_timer_that_was_cancelled_does_not_move_the_clock() -> None:
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


def test_timers_that_were_cancelled_keep_nobody_from_seeing_a_deadlock() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(7, pytest.fail).cancel()
        asyncio.create_task(VirtualClock().sleep(5)).cancel()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match="every coroutine waits and no timer is set"):
        run_virtual(main())


@pytest.mark.parametrize("feature", ["clip", "evaluation"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
def test_jobs_of_chaos_look_alike_whatever_is_not_a_matter_of_their_layers(feature: str, exact: bool) -> None:
    assert look(chaos.job_of((feature,), exact, 6)) == look(chaos.job_of((), exact, 4))
