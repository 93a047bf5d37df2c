"""Layers that are built aside, while their worker may be told that it need not."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from culm.errors import JobError
from culm.runtime.building import built
from culm.runtime.clock import RealClock

from .jobs import job


def test_what_goes_wrong_where_a_worker_has_stopped_waiting_for_its_layers_is_not_shouted_about() -> None:
    begun, go = threading.Event(), threading.Event()
    shouted: list[dict[str, Any]] = []

    def broken() -> nn.Module:
        begun.set()
        go.wait()
        raise JobError("no such weights")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: shouted.append(context))
        described = job(layers=[broken])
        waiting = asyncio.create_task(built(RealClock(), described, [(0, 1)], 1, 0, torch.device("cpu"), 0))
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
