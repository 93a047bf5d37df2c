"""Dead-man's switch of a machine: it must not wait, and cost money, for a run that is gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from culm.cluster.store.encrypted_store import LAUNCHER_KEY
from culm.cluster.store.etcd.etcd_gateway import EtcdGateway
from culm.cluster.store.etcd.etcd_messages import RangeAnswer
from culm.cluster.timeouts import derive_timeouts
from culm.errors import RunError

if TYPE_CHECKING:
    from culm.cluster.store.etcd import EtcdAccess
    from culm.runtime.clock import Clock

_POLLS = 10
"""How often the store is asked within the time after which a machine gives up."""
_MAX_POLL_S = 30.0


class RunSigns(Protocol):
    """What shows that a run is alive."""

    async def read(self) -> tuple[bool, int]:
        """(whether the process that started the run lives, a number that changes with every step)."""


async def wait_until_abandoned(signs: RunSigns, abandon_after_s: float, clock: Clock) -> str:
    """Return when there was no sign of the run for `abandon_after_s` seconds, with the reason.

    A sign is the key of the launcher, which goes with its process, or another committed step: a run may go on without
    its launcher. A store that does not answer gives no sign.
    """
    poll_s = min(_MAX_POLL_S, abandon_after_s / _POLLS)
    heard_at, revision, answers = clock.now(), 0, False
    while True:
        try:
            async with asyncio.timeout(poll_s):
                has_launcher, found = await signs.read()
        except (RunError, TimeoutError, OSError):
            answers = False
        else:
            answers = True
            if has_launcher or found != revision:
                heard_at, revision = clock.now(), found
        if clock.now() - heard_at >= abandon_after_s:
            words = "the run had neither a launcher nor a new step" if answers else "the store has not answered"
            return f"{words} for {abandon_after_s:.0f} s: this machine gives up"
        await clock.sleep(poll_s)


class StoredRunSigns:
    """The signs of a job in etcd."""

    def __init__(self, access: EtcdAccess, job: str, clock: Clock) -> None:
        self._keys = [f"culm/{job}/key/{name}".encode() for name in (LAUNCHER_KEY, "step")]
        self._gateway = EtcdGateway(access, clock, attempt_timeout_s=derive_timeouts().store_call, log=lambda _: None)

    async def read(self) -> tuple[bool, int]:
        launcher, step = [
            await self._gateway.call("/v3/kv/range", {"key": key, "keys_only": True}, RangeAnswer) for key in self._keys
        ]
        return bool(launcher.kvs), step.kvs[0].mod_revision if step.kvs else 0

    async def close(self) -> None:
        await self._gateway.close()
