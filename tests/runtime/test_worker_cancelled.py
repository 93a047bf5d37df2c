"""A worker whose task is cancelled, by its agent or because its device has failed, ends whatever it waits for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from tests.tiny_jobs import job

from culm.runtime import messages
from culm.runtime.checkpoint_io import CheckpointWriter
from culm.runtime.clock import RealClock
from culm.runtime.worker import Worker


def test_a_worker_that_is_cancelled_while_it_leaves_an_epoch_ends() -> None:
    async def main() -> None:
        inbox: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        transport: Any = SimpleNamespace(
            address="worker-0",
            set_damage_handler=lambda _: None,
            send_message=lambda *_: None,
            receive_message=inbox.get,
            close_epochs=lambda _: {},
        )
        halted, may_end = asyncio.Event(), asyncio.Event()

        async def action() -> None:
            """An action that takes a moment to end."""
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                halted.set()
                await may_end.wait()
                raise

        worker = Worker(job(), 0, "agent-0", transport, RealClock())
        worker._training = asyncio.create_task(action())
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(0)
        inbox.put_nowait(("leader", messages.encode(messages.Halt(2, "leader"))))
        await halted.wait()
        running.cancel()
        may_end.set()
        await asyncio.wait([running], timeout=60.0)
        assert running.cancelled()

    asyncio.run(main())


def test_a_worker_that_is_cancelled_while_it_gives_up_a_checkpoint_ends() -> None:
    """The write ends a moment after it was cancelled: the cancellation of the caller is not lost with it."""

    async def main() -> None:
        writer = CheckpointWriter(0, cast("Any", None), RealClock(), cast("Any", None))
        cancelled, may_end = asyncio.Event(), asyncio.Event()

        async def write() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                await may_end.wait()
                raise

        async def train() -> None:
            await writer.close()
            await asyncio.Event().wait()

        writer._write_task = asyncio.create_task(write())
        await asyncio.sleep(0)
        training = asyncio.create_task(train())
        await cancelled.wait()
        training.cancel()
        may_end.set()
        await asyncio.wait([training], timeout=60.0)
        assert training.cancelled()

    asyncio.run(main())
