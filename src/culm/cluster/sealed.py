"""A store for machines that share a secret: who does not know it can neither read a value nor write one that others
would take.

Values are sealed with AES-SIV under a key made of the secret and the job's name, each bound to the key that it lies
under. Equal values look equal, so that compare-and-swap works on what lies in etcd. Names of keys, sizes and times are
there for everybody to see, and whoever may write to etcd can remove keys: against that, etcd has users and TLS.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from culm.cluster.store import Change
from culm.errors import RunError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    from culm.cluster.probe import EvictingStore

SHORTEST_SECRET = 16
_MARK = "secret"
"""Lies under this key, sealed: who can open it has the right secret."""
LAUNCHER = "launcher"
"""Lies there for as long as the launcher of the job does; it says nothing, and is not sealed."""


def check_secret(secret: bytes) -> bytes:
    """The secret, if it is long enough to be one."""
    if len(secret) < SHORTEST_SECRET:
        raise UsageError(
            f"CULM_SECRET has {len(secret)} bytes: use at least {SHORTEST_SECRET}, the same on every machine of the "
            "job, as in CULM_SECRET=$(openssl rand -hex 32)"
        )
    return secret


def wire_secret(secret: bytes, job: str) -> bytes:
    """What connections between the nodes of a job prove to each other."""
    return hmac.digest(secret, f"culm wire {job}".encode(), "sha256")


class SealedStore:
    """Another store, with its values sealed. A value that does not open raises RunError: it is not of this job."""

    def __init__(self, store: EvictingStore, secret: bytes, job: str) -> None:
        self._store = store
        self._cipher = _cipher(hmac.digest(secret, f"culm store {job}".encode(), "sha512"))

    def _seal(self, key: str, value: bytes) -> bytes:
        return bytes(self._cipher.encrypt(value, [key.encode()]))

    def _open(self, key: str, sealed: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._cipher.decrypt(sealed, [key.encode()]))
        except (InvalidTag, ValueError):
            raise RunError(
                f"the value of {key!r} in the store was not written by somebody who knows the secret"
            ) from None

    async def sign(self) -> None:
        """Leave the mark by which others see that they have the same secret."""
        await self.put(_MARK, b"culm")

    async def check(self) -> None:
        """UsageError: the job was begun with another secret."""
        try:
            await self.get(_MARK)
        except RunError:
            raise UsageError(
                "CULM_SECRET is not the secret of this job: set the one that culm run was started with"
            ) from None

    async def get(self, key: str) -> bytes | None:
        found = await self._store.get(key)
        return None if found is None else self._open(key, found)

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        await self._store.put(key, self._seal(key, value), session=session)

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        before = None if old is None else self._seal(key, old)
        return await self._store.swap(key, before, self._seal(key, new), session=session)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)

    async def evict(self, key: str) -> bool:
        return await self._store.evict(key)

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        async with aclosing(self._store.watch(prefix)) as changes:
            async for key, value in changes:
                if key not in (_MARK, LAUNCHER):
                    yield Change(key, None if value is None else self._open(key, value))


def _cipher(key: bytes) -> AESSIV:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    except ImportError:
        raise UsageError("a job of several machines seals what it keeps in etcd: pip install cryptography") from None
    return AESSIV(key)
