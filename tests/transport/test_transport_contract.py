"""What a transport promises, whichever side it is."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from torch import Tensor

from culm.errors import EpochClosed
from culm.transport.base import Letter, Transport

from .sides import MEMORY, Side, key, leave, lost, same

IMAGE = torch.randn(2, 3, 4, 5)
TENSORS: dict[str, Tensor] = {
    "float32": torch.randn(3, 4),
    "float64": torch.randn(2, dtype=torch.float64),
    "bfloat16": torch.randn(5).bfloat16(),
    "float8": torch.randn(5).to(torch.float8_e4m3fn),
    "int64": torch.tensor([2**62, -1]),
    "bool": torch.tensor([[True], [False]]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "a number": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    "transposed": torch.randn(3, 4).t(),
    "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels last": IMAGE.to(memory_format=torch.channels_last),
    "one channel, last": IMAGE[:, :1].to(memory_format=torch.channels_last),
    "part of another": torch.randn(4, 4)[1:3],
    "wants a gradient": torch.randn(2, requires_grad=True),
    "made by a layer": torch.randn(2, requires_grad=True) * 2,
}
GAPS: dict[str, Tensor] = {
    "every other": torch.randn(4, 6)[:, ::2],
    "a chunk": torch.randn(4, 6).chunk(3, dim=1)[1],
    "expanded": torch.randn(3, 1).expand(3, 4),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
}


async def over(a: Transport, b: Transport, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    a.send(b.address, key(), tensors)
    return await b.receive(key())


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_bits_its_layout_and_its_wish_for_a_gradient(side: Side, name: str) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            (found,) = await over(a, b, TENSORS[name])
        assert same(found, TENSORS[name])

    side.run(main())


@pytest.mark.parametrize("name", GAPS)
def test_a_tensor_with_gaps_arrives_without_them(side: Side, name: str) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            (found,) = await over(a, b, GAPS[name])
        assert same(found, GAPS[name].resolve_conj().resolve_neg().contiguous())

    side.run(main())


def test_a_frame_may_hold_many_tensors_and_places_without_one(side: Side) -> None:
    sent = (None, torch.ones(2), None, torch.zeros(0), torch.tensor(1), None)

    async def main() -> None:
        async with side.endpoints() as (a, b):
            found = await over(a, b, *sent)
            assert len(found) == len(sent)
            assert all(map(same, found, sent))
            assert await over(a, b) == ()

    side.run(main())


def test_frames_are_found_under_their_key_whatever_the_order(side: Side) -> None:
    keys = [key(name, epoch=e, step=s) for e in (1, 2) for s in (0, 1) for name in ("0F0", "1B0", "evaluate 0F0")]
    order = random.Random(0)

    async def main() -> None:
        async with side.endpoints() as (a, b):
            for k in order.sample(keys, len(keys)):
                a.send(b.address, k, [torch.tensor(keys.index(k))])
            for k in order.sample(keys, len(keys)):
                (found,) = await b.receive(k)
                assert found is not None
                assert found.item() == keys.index(k)

    side.run(main())


def test_a_frame_can_be_taken_without_waiting_once_it_is_there_and_only_once(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            assert b.arrived(key("first")) is None
            a.send(b.address, key("first"), [torch.ones(1)])
            a.send(b.address, key("second"), [])
            await b.receive(key("second"))
            assert b.arrived(key("first")) == (torch.ones(1),)
            assert b.arrived(key("first")) is None

    side.run(main())


def test_what_the_receiver_does_to_a_tensor_the_sender_does_not_see(side: Side) -> None:
    async def main() -> None:
        mine = torch.ones(4)
        async with side.endpoints() as (a, b):
            (found,) = await over(a, b, mine)
            assert found is not None
            found.zero_()
        assert mine.sum() == 4

    side.run(main())


def test_an_endpoint_can_send_to_itself(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints(1) as (a,):
            assert same((await over(a, a, torch.ones(3)))[0], torch.ones(3))

    side.run(main())


def test_everyone_can_send_a_lot_to_everyone_at_once(side: Side) -> None:
    """Both directions fill up before anybody reads: whoever sends must never wait for its own reader."""
    size, count = 1 << 16, 60

    async def main() -> None:
        async with side.endpoints(3) as all_of_them:
            for i in range(count):
                for a in all_of_them:
                    for b in all_of_them:
                        a.send(b.address, key(f"{a.address} {i}"), [torch.full((size,), float(i))])
            for b in all_of_them:
                for a in all_of_them:
                    for i in range(count):
                        (found,) = await b.receive(key(f"{a.address} {i}"))
                        assert found is not None
                        assert found[0] == found[-1] == i

    side.run(main())


def test_a_wait_ends_at_once_when_it_is_cancelled_and_the_next_one_gets_the_frame(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            waiting = asyncio.create_task(b.receive(key()))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert same((await over(a, b, torch.ones(1)))[0], torch.ones(1))

    side.run(main())


def test_closing_an_epoch_wakes_who_waits_for_it_and_nobody_else(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            old = [asyncio.create_task(b.receive(key(name, epoch=e))) for e in (1, 2) for name in ("x", "y")]
            new = asyncio.create_task(b.receive(key(epoch=3)))
            await asyncio.sleep(0)
            b.close_epochs(3)
            for task in old:
                with pytest.raises(EpochClosed):
                    await task
            a.send(b.address, key(epoch=3), [torch.ones(1)])
            assert same((await new)[0], torch.ones(1))

    side.run(main())


def test_what_belongs_to_a_closed_epoch_is_never_found_again(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            a.send(b.address, key("early", epoch=1), [torch.ones(1)])
            a.send(b.address, key("mark", epoch=2), [])
            await b.receive(key("mark", epoch=2))
            b.close_epochs(2)
            a.send(b.address, key("late", epoch=1), [torch.ones(1)])
            a.send(b.address, key("second mark", epoch=2), [])
            await b.receive(key("second mark", epoch=2))
            for name in ("early", "late"):
                assert b.arrived(key(name, epoch=1)) is None
                with pytest.raises(EpochClosed):
                    await b.receive(key(name, epoch=1))

    side.run(main())


def test_an_epoch_once_closed_is_not_opened_by_closing_a_lower_one(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (_, b):
            b.close_epochs(5)
            b.close_epochs(2)
            with pytest.raises(EpochClosed):
                await b.receive(key(epoch=4))

    side.run(main())


def test_letters_of_one_sender_keep_their_order_between_frames_and_other_senders(side: Side) -> None:
    count = 200

    async def main() -> None:
        async with side.endpoints(3) as (a, b, c):
            for i in range(count):
                for sender in (a, c):
                    sender.post(b.address, str(i).encode())
                    sender.send(b.address, key(f"{sender.address} {i}"), [torch.zeros(100)])
            letters = [await b.letter() for _ in range(2 * count)]
        for sender in (a, c):
            assert [int(body or b"") for who, body in letters if who == sender.address] == list(range(count))

    side.run(main())


def test_an_empty_letter_is_a_letter(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            a.post(b.address, b"")
            assert await b.letter() == Letter(a.address, b"")

    side.run(main())


def test_closing_lets_out_what_was_queued_and_is_heard_after_the_last_letter(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            for i in range(50):
                a.send(b.address, key(str(i)), [torch.full((100_000,), float(i))])
                a.post(b.address, str(i).encode())
            await leave(a)
            for i in range(50):
                assert await b.letter() == Letter(a.address, str(i).encode())
            assert await b.letter() == Letter(a.address, None)
            for i in range(50):
                (found,) = await b.receive(key(str(i)))
                assert found is not None
                assert found[-1] == i

    side.run(main())


def test_a_peer_that_goes_is_missed_by_whoever_spoke_to_it_too(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            b.post(a.address, b"hello")
            assert await a.letter() == Letter(b.address, b"hello")
            await leave(a)
            assert await lost(b) == Letter(a.address, None)

    side.run(main())


def test_speaking_to_nobody_is_answered_by_a_loss(side: Side) -> None:
    async def main() -> None:
        async with side.endpoints() as (a, b):
            await leave(b)
            a.post(b.address, b"is anybody there?")
            assert await lost(a) == Letter(b.address, None)
            a.post(b.address, b"really?")  # nothing more happens, and nothing breaks
            assert same((await over(a, a, torch.ones(1)))[0], torch.ones(1))

    side.run(main())


def test_what_the_dead_say_is_not_heard() -> None:
    """In memory a coroutine may outlive its endpoint: a node that was killed must not go on speaking."""

    async def main() -> None:
        async with MEMORY.endpoints() as (a, b):
            a.post(b.address, b"alive")
            assert await b.letter() == Letter(a.address, b"alive")
            await leave(a)
            assert await b.letter() == Letter(a.address, None)
            a.post(b.address, b"I am not dead")
            a.send(b.address, key(), [torch.ones(1)])
            await asyncio.sleep(1)
            assert b.arrived(key()) is None
            b.post(b.address, b"a mark")
            assert await b.letter() == Letter(b.address, b"a mark")

    MEMORY.run(main())
