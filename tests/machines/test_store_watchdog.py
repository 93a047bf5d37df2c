"""The dead-man's switch of a rented machine, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from culm.errors import RunError
from culm.machines.store_watchdog import wait_until_abandoned
from culm.testing.virtual_time import VirtualClock, run_virtual

Life = Callable[[float], tuple[bool, int] | None]
"""(whether the launcher lives, the revision of the last step) at a time; None: the store does not answer."""


class Signs:
    """The signs of a run, as a function of the time."""

    def __init__(self, clock: VirtualClock, life: Life) -> None:
        self._clock, self._life = clock, life

    async def read(self) -> tuple[bool, int]:
        found = self._life(self._clock.now())
        if found is None:
            raise RunError("the store does not answer")
        return found


@pytest.mark.parametrize(
    ("life", "gives_up_at", "reason"),
    [
        (lambda t: (t < 1000, 1), 1990.0, "neither a launcher nor a new step for 1000 s"),
        (lambda t: (t < 1000, int(t // 100) if t < 5000 else 50), 6000.0, "neither a launcher nor a new step"),
        (lambda t: (True, 1) if t < 3000 else None, 3990.0, "the store has not answered for 1000 s"),
        (lambda t: None if 500 < t < 1400 else (t < 2000, 1), 2990.0, "neither a launcher nor a new step"),
    ],
)
def test_a_machine_gives_up_when_there_was_no_sign_of_the_run_for_long(
    life: Life, gives_up_at: float, reason: str
) -> None:
    async def main() -> tuple[float, str]:
        clock = VirtualClock()
        said = await wait_until_abandoned(Signs(clock, life), 1000.0, clock)
        return clock.now(), said

    at, said = run_virtual(main())
    assert reason in said
    assert gives_up_at - 60 <= at <= gives_up_at + 60
