"""The mailbox matches frames and waits, across threads and under cancellation, and loses no frame."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.transport.transport_variants import frame_key, run_with_timeout

from culm.errors import EpochClosed
from culm.testing import run_virtual
from culm.transport.frames.mailbox import Mailbox

FRAME = (torch.ones(1),)


def in_a_thread(mailbox: Mailbox) -> None:
    thread = threading.Thread(target=mailbox.put, args=(frame_key(), FRAME))
    thread.start()
    thread.join()


def test_a_frame_from_another_thread_wakes_the_waiter() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.get(frame_key()))
        await asyncio.sleep(0)
        in_a_thread(mailbox)
        assert await waiting == FRAME

    run_with_timeout(main())


def test_a_frame_survives_a_wait_that_was_cancelled_before_it_came() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.get(frame_key()))
        await asyncio.sleep(0)
        waiting.cancel()
        mailbox.put(frame_key(), FRAME)
        assert await mailbox.get(frame_key()) == FRAME
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    run_virtual(main())


def test_a_frame_survives_a_wait_that_was_cancelled_after_it_came() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.get(frame_key()))
        await asyncio.sleep(0)
        mailbox.put(frame_key(), FRAME)
        waiting.cancel()
        assert await mailbox.get(frame_key()) == FRAME
        assert waiting.cancelled()

    run_virtual(main())


def test_a_frame_survives_a_wait_that_was_cancelled_while_it_changed_threads() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.get(frame_key()))
        await asyncio.sleep(0)
        in_a_thread(mailbox)
        waiting.cancel()
        assert await mailbox.get(frame_key()) == FRAME

    run_with_timeout(main())


def test_a_frame_that_arrives_after_the_loop_is_closed_is_harmless() -> None:
    boxes: list[Mailbox] = []

    async def main() -> None:
        boxes.append(Mailbox())
        boxes[0]._waiters[frame_key()] = asyncio.get_running_loop().create_future()

    asyncio.run(main())
    boxes[0].put(frame_key(), FRAME)  # the loop is closed: the I/O thread may be a moment behind


def test_a_cancelled_wait_of_a_closed_epoch_stores_nothing() -> None:
    async def main() -> None:
        mailbox = Mailbox()
        waiting = asyncio.create_task(mailbox.get(frame_key(epoch=1)))
        await asyncio.sleep(0)
        mailbox.put(frame_key(epoch=1), FRAME)
        waiting.cancel()
        mailbox.close_epochs(2)
        await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(EpochClosed):
            await mailbox.get(frame_key(epoch=1))

    run_virtual(main())


@given(
    st.lists(st.tuples(st.sampled_from(["put", "get", "cancel", "close"]), st.integers(0, 3), st.booleans())),
)
def test_every_frame_is_received_once_or_stored_or_of_a_closed_epoch(moves: list[tuple[str, int, bool]]) -> None:
    """Keys are (epoch n, frame n); each is put once, and has one waiter at a time; in any order."""

    async def main() -> None:
        mailbox = Mailbox()
        put: set[int] = set()
        got: list[int] = []
        waits: dict[int, asyncio.Task[None]] = {}
        floor = 0

        async def get(number: int) -> None:
            (found,) = await mailbox.get(frame_key(epoch=number))
            assert found is not None
            got.append(int(found))

        for move, number, rest in moves:
            if move == "put" and number not in put:
                put.add(number)
                mailbox.put(frame_key(epoch=number), (torch.tensor(number),))
            elif move == "get" and (number not in waits or waits[number].done()):
                waits[number] = asyncio.create_task(get(number))
            elif move == "cancel" and number in waits:
                waits[number].cancel()
            elif move == "close":
                floor = max(floor, number)
                mailbox.close_epochs(number)
            if rest:
                await asyncio.sleep(0)
        for wait in waits.values():
            wait.cancel()
        await asyncio.gather(*waits.values(), return_exceptions=True)
        left = {number for number in put if mailbox.take(frame_key(epoch=number)) is not None}
        assert len(got) == len(set(got))
        assert not left & set(got)
        assert {n for n in put if n >= floor} <= left | set(got)
        assert all(number >= floor for number in left)

    run_virtual(main())
