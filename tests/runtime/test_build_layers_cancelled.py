"""Layers that are built in a thread while the worker may be cancelled."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
import torch
from tests.tiny_jobs import job
from torch import nn

from culm.errors import JobError
from culm.runtime.clock import RealClock
from culm.runtime.replica_builder import build_replica


def test_an_error_in_a_build_whose_worker_was_cancelled_is_not_logged() -> None:
    begun, go = threading.Event(), threading.Event()
    shouted: list[dict[str, Any]] = []

    def broken() -> nn.Module:
        begun.set()
        go.wait()
        raise JobError("no such weights")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: shouted.append(context))
        described = job(layers=[broken])
        waiting = asyncio.create_task(build_replica(RealClock(), described, [(0, 1)], 1, 0, torch.device("cpu"), 0))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        del waiting
        gc.collect()

    asyncio.run(main())
    assert not shouted


def test_a_build_that_ends_with_its_loop_is_not_logged() -> None:
    shouted: list[dict[str, Any]] = []

    class Nowhere(RealClock):
        async def run_in_thread(self, *_: Any, **__: Any) -> Any:
            await asyncio.Event().wait()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: shouted.append(context))
        asyncio.ensure_future(build_replica(Nowhere(), job(), [(0, 4)], 1, 0, torch.device("cpu"), 0))  # noqa: RUF006
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(main())
    assert not shouted
