"""The contract of a transport, for each variant."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from tests.transport.transport_variants import (
    MEMORY,
    TransportVariant,
    close_once,
    frame_key,
    next_lost_connection,
    same_tensor,
)
from torch import Tensor

from culm.errors import EpochClosed
from culm.transport.interface import ControlMessage, Transport

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
    a.send(b.address, frame_key(), tensors)
    return await b.receive(frame_key())


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_with_its_bits_layout_and_requires_grad(variant: TransportVariant, name: str) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            (found,) = await over(a, b, TENSORS[name])
        assert same_tensor(found, TENSORS[name])

    variant.run(main())


@pytest.mark.parametrize("name", GAPS)
def test_a_tensor_with_gaps_arrives_without_them(variant: TransportVariant, name: str) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            (found,) = await over(a, b, GAPS[name])
        assert same_tensor(found, GAPS[name].resolve_conj().resolve_neg().contiguous())

    variant.run(main())


def test_a_frame_may_hold_many_tensors_and_none_values(variant: TransportVariant) -> None:
    sent = (None, torch.ones(2), None, torch.zeros(0), torch.tensor(1), None)

    async def main() -> None:
        async with variant.endpoints() as (a, b):
            found = await over(a, b, *sent)
            assert len(found) == len(sent)
            assert all(map(same_tensor, found, sent))
            assert await over(a, b) == ()

    variant.run(main())


def test_frames_are_found_under_their_key_whatever_the_order(variant: TransportVariant) -> None:
    keys = [frame_key(name, epoch=e, step=s) for e in (1, 2) for s in (0, 1) for name in ("0F0", "1B0", "evaluate 0F0")]
    order = random.Random(0)

    async def main() -> None:
        async with variant.endpoints() as (a, b):
            for k in order.sample(keys, len(keys)):
                a.send(b.address, k, [torch.tensor(keys.index(k))])
            for k in order.sample(keys, len(keys)):
                (found,) = await b.receive(k)
                assert found is not None
                assert found.item() == keys.index(k)

    variant.run(main())


def test_a_frame_can_be_taken_without_waiting_once_it_is_there_and_only_once(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            assert b.try_receive(frame_key("first")) is None
            a.send(b.address, frame_key("first"), [torch.ones(1)])
            a.send(b.address, frame_key("second"), [])
            await b.receive(frame_key("second"))
            assert b.try_receive(frame_key("first")) == (torch.ones(1),)
            assert b.try_receive(frame_key("first")) is None

    variant.run(main())


def test_a_receiver_cannot_change_the_tensors_of_the_sender(variant: TransportVariant) -> None:
    async def main() -> None:
        mine = torch.ones(4)
        async with variant.endpoints() as (a, b):
            (found,) = await over(a, b, mine)
            assert found is not None
            found.zero_()
        assert mine.sum() == 4

    variant.run(main())


def test_an_endpoint_can_send_to_itself(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints(1) as (a,):
            assert same_tensor((await over(a, a, torch.ones(3)))[0], torch.ones(3))

    variant.run(main())


def test_all_endpoints_can_send_large_frames_to_each_other_at_once(variant: TransportVariant) -> None:
    """Both directions fill up before either end reads: a sender must never wait for its own reader."""
    size, count = 1 << 16, 60

    async def main() -> None:
        async with variant.endpoints(3) as all_of_them:
            for i in range(count):
                for a in all_of_them:
                    for b in all_of_them:
                        a.send(b.address, frame_key(f"{a.address} {i}"), [torch.full((size,), float(i))])
            for b in all_of_them:
                for a in all_of_them:
                    for i in range(count):
                        (found,) = await b.receive(frame_key(f"{a.address} {i}"))
                        assert found is not None
                        assert found[0] == found[-1] == i

    variant.run(main())


def test_a_wait_ends_at_once_when_it_is_cancelled_and_the_next_one_gets_the_frame(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            waiting = asyncio.create_task(b.receive(frame_key()))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert same_tensor((await over(a, b, torch.ones(1)))[0], torch.ones(1))

    variant.run(main())


def test_closing_an_epoch_wakes_its_waiters_only(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            old = [asyncio.create_task(b.receive(frame_key(name, epoch=e))) for e in (1, 2) for name in ("x", "y")]
            new = asyncio.create_task(b.receive(frame_key(epoch=3)))
            await asyncio.sleep(0)
            b.close_epochs(3)
            for task in old:
                with pytest.raises(EpochClosed):
                    await task
            a.send(b.address, frame_key(epoch=3), [torch.ones(1)])
            assert same_tensor((await new)[0], torch.ones(1))

    variant.run(main())


def test_frames_of_a_closed_epoch_are_never_delivered(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            a.send(b.address, frame_key("early", epoch=1), [torch.ones(1)])
            a.send(b.address, frame_key("mark", epoch=2), [])
            await b.receive(frame_key("mark", epoch=2))
            b.close_epochs(2)
            a.send(b.address, frame_key("late", epoch=1), [torch.ones(1)])
            a.send(b.address, frame_key("second mark", epoch=2), [])
            await b.receive(frame_key("second mark", epoch=2))
            for name in ("early", "late"):
                assert b.try_receive(frame_key(name, epoch=1)) is None
                with pytest.raises(EpochClosed):
                    await b.receive(frame_key(name, epoch=1))

    variant.run(main())


def test_an_epoch_once_closed_is_not_opened_by_closing_a_lower_one(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (_, b):
            b.close_epochs(5)
            b.close_epochs(2)
            with pytest.raises(EpochClosed):
                await b.receive(frame_key(epoch=4))

    variant.run(main())


def test_messages_of_one_sender_keep_their_order_among_frames_and_other_senders(variant: TransportVariant) -> None:
    count = 200

    async def main() -> None:
        async with variant.endpoints(3) as (a, b, c):
            for i in range(count):
                for sender in (a, c):
                    sender.send_message(b.address, str(i).encode())
                    sender.send(b.address, frame_key(f"{sender.address} {i}"), [torch.zeros(100)])
            messages = [await b.receive_message() for _ in range(2 * count)]
        for sender in (a, c):
            assert [int(body or b"") for who, body in messages if who == sender.address] == list(range(count))

    variant.run(main())


def test_an_empty_message_is_delivered(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            a.send_message(b.address, b"")
            assert await b.receive_message() == ControlMessage(a.address, b"")

    variant.run(main())


def test_closing_sends_what_is_queued_and_is_seen_after_the_last_message(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            for i in range(50):
                a.send(b.address, frame_key(str(i)), [torch.full((100_000,), float(i))])
                a.send_message(b.address, str(i).encode())
            await close_once(a)
            for i in range(50):
                assert await b.receive_message() == ControlMessage(a.address, str(i).encode())
            assert await b.receive_message() == ControlMessage(a.address, None)
            for i in range(50):
                (found,) = await b.receive(frame_key(str(i)))
                assert found is not None
                assert found[-1] == i

    variant.run(main())


def test_a_peer_that_closes_is_reported_to_endpoints_that_sent_to_it(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            b.send_message(a.address, b"hello")
            assert await a.receive_message() == ControlMessage(b.address, b"hello")
            await close_once(a)
            assert await next_lost_connection(b) == ControlMessage(a.address, None)

    variant.run(main())


def test_sending_to_a_missing_endpoint_reports_a_loss(variant: TransportVariant) -> None:
    async def main() -> None:
        async with variant.endpoints() as (a, b):
            await close_once(b)
            a.send_message(b.address, b"is anybody there?")
            assert await next_lost_connection(a) == ControlMessage(b.address, None)
            a.send_message(b.address, b"really?")  # nothing more happens, and nothing fails
            assert same_tensor((await over(a, a, torch.ones(1)))[0], torch.ones(1))

    variant.run(main())


def test_messages_of_a_removed_endpoint_are_not_delivered() -> None:
    """In the simulation a coroutine may outlive its endpoint: a node that was killed must not send any more."""

    async def main() -> None:
        async with MEMORY.endpoints() as (a, b):
            a.send_message(b.address, b"alive")
            assert await b.receive_message() == ControlMessage(a.address, b"alive")
            await close_once(a)
            assert await b.receive_message() == ControlMessage(a.address, None)
            a.send_message(b.address, b"I am not dead")
            a.send(b.address, frame_key(), [torch.ones(1)])
            await asyncio.sleep(1)
            assert b.try_receive(frame_key()) is None
            b.send_message(b.address, b"a mark")
            assert await b.receive_message() == ControlMessage(b.address, b"a mark")

    MEMORY.run(main())
