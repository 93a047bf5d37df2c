"""How many workers the nodes of a run on several machines have: one for each GPU of the first machine that joins.

Machines announce their GPUs in the store when they have checked the job, before the run decides its shape.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

from culm.errors import RunError, UsageError
from culm.text_format import count_noun

if TYPE_CHECKING:
    from culm.cluster.store.store import Store
    from culm.config import RunConfig

_PREFIX = "gpus/"
_REMIND_S = 30.0


def workers_for_gpus(config: RunConfig, gpus: int) -> int:
    """Workers of a node with so many GPUs: one each. If the config says the pipelines and stages, the most that divide
    them into whole nodes; if it also says the nodes, one."""
    if config.nodes is None:
        slots = (config.pipelines or 1) * (config.stages or 1)
        return max((count for count in range(1, gpus + 1) if slots % count == 0), default=1)
    is_fixed = config.pipelines is not None and config.stages is not None
    return 1 if is_fixed else max(1, gpus)


async def announce_gpus(store: Store, gpus: int) -> None:
    """Say how many GPUs this machine has for workers of the job."""
    await store.put(f"{_PREFIX}{uuid.uuid4().hex}", str(gpus).encode())


async def first_announced_gpus(store: Store, timeout_s: float, on_wait: Callable[[str], None]) -> int:
    """GPUs of the first machine that joins. `on_wait` is called with sentences. Raises RunError after `timeout_s`."""
    on_wait("waiting for the first machine: nodes get a worker for each GPU that it has (see --workers-per-node)")
    waited_s = 0.0
    first = asyncio.ensure_future(_first_value(store))
    try:
        while True:
            pause_s = min(_REMIND_S, timeout_s - waited_s)
            if (await asyncio.wait([first], timeout=pause_s))[0]:
                return int(first.result())
            waited_s += pause_s
            words = f"no machine has joined after {waited_s:.0f} s"
            if waited_s >= timeout_s:
                raise RunError(f"{words} (--start-timeout): start culm agent on the machines of the run")
            on_wait(f"{words}: start culm agent on the machines of the run")
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def _first_value(store: Store) -> bytes:
    async with aclosing(store.watch(_PREFIX)) as changes:
        async for _, value in changes:
            if value is not None:
                return value
    raise RunError("the store does not say any more which machines join")


def check_gpus(gpus: int, workers: int) -> str:
    """What to say about a machine whose number of GPUs differs from the workers of a node; empty: nothing. Raises
    UsageError if it has too few. `gpus`: 0 if workers do not use one each."""
    if 0 < gpus < workers:
        raise UsageError(
            f"this machine has {count_noun(gpus, 'GPU')}, and nodes of the run have {workers} workers, one for each "
            f"GPU of its first machine: leave this machine out, or start the run with --workers-per-node {gpus}"
        )
    if gpus > workers:
        return (
            f"this machine has {gpus} GPUs, and nodes of the run have {count_noun(workers, 'worker')}: "
            f"{gpus - workers} of them {'stays' if gpus - workers == 1 else 'stay'} unused"
        )
    return ""
