"""Encrypted store: a store for machines that share a secret. Without the secret, values can be neither read, nor
forged, nor put back.

Values are encrypted with AES-SIV under a key derived from the secret and the job's name. Each is bound to the store key
that holds it and to its version there: the revision at which the key was created, and the number of writes since. These
are counters of the store that no client can set, so that an old value that is written again does not decrypt. A key is
created empty and counts as missing until its first value is written, because the revision at which it is created is not
known before.

Key names, sizes and times stay visible, and everyone with write access to etcd can delete keys: use etcd's users and
TLS against that. Anyone who controls etcd itself, or restores a backup of it, controls its counters as well.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from culm.cluster.store.store import KeyVersion, StoreChange, VersionedStore, VersionedValue
from culm.errors import RunError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

MIN_SECRET_BYTES = 16
_SECRET_MARKER_KEY = "secret"
"""Key of an encrypted marker: a client that can decrypt it has the right secret."""
LAUNCHER_KEY = "launcher"
"""Key that exists while the job's launcher does; its value is empty and not encrypted."""


def check_secret(secret: bytes) -> bytes:
    """Return the secret. Raises UsageError if it is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise UsageError(
            f"CULM_SECRET has {len(secret)} bytes: use at least {MIN_SECRET_BYTES}, the same on every machine of the "
            "job, as in CULM_SECRET=$(openssl rand -hex 32)"
        )
    return secret


def connection_secret(secret: bytes, job: str) -> bytes:
    """The secret with which connections between the nodes of a job are authenticated."""
    return hmac.digest(secret, f"culm wire {job}".encode(), "sha256")


class EncryptedStore:
    """A store with encrypted values. A value that cannot be decrypted raises RunError: it is not of this job, or it is
    an old value of the key. Calls of one client are executed in the order in which they were made."""

    def __init__(self, store: VersionedStore, secret: bytes, job: str) -> None:
        self._store = store
        self._cipher = _cipher(hmac.digest(secret, f"culm store {job}".encode(), "sha512"))
        self._versions: dict[str, KeyVersion] = {}
        """The last version of each key that this client has read or written."""
        self._call_order_lock = asyncio.Lock()

    def _encrypt(self, key: str, version: KeyVersion, value: bytes) -> bytes:
        return bytes(self._cipher.encrypt(value, _binding(key, version)))

    def _decrypt(self, key: str, version: KeyVersion, ciphertext: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._cipher.decrypt(ciphertext, _binding(key, version)))
        except (InvalidTag, ValueError):
            raise RunError(
                f"the value of {key!r} in the store was not written there by a client that knows the secret, or it is "
                "an old value that was put back"
            ) from None

    async def write_secret_marker(self) -> None:
        """Write the marker with which other clients check that they have the same secret."""
        await self.put(_SECRET_MARKER_KEY, b"culm")

    async def check_secret_marker(self) -> None:
        """Raises UsageError if the job was started with another secret."""
        try:
            await self.get(_SECRET_MARKER_KEY)
        except RunError:
            raise UsageError(
                "CULM_SECRET is not the secret of this job: set the one that culm run was started with, or use "
                "its token (--join)"
            ) from None

    async def get(self, key: str) -> bytes | None:
        async with self._call_order_lock:
            return (await self._read(key))[1]

    async def _read(self, key: str) -> tuple[VersionedValue | None, bytes | None]:
        """(what the store has, the value): None and None if there is no such key."""
        stored = await self._store.read_version(key)
        if stored is None:
            self._versions.pop(key, None)
            return None, None
        self._versions[key] = stored.version
        return stored, self._decrypt(key, stored.version, stored.value) if stored.value else None

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        async with self._call_order_lock:
            while not await self._write(key, value, self._versions.get(key), session):
                await self._store_version(key)

    async def _store_version(self, key: str) -> None:
        """Learn the version of a key that another client has changed."""
        stored = await self._store.read_version(key)
        if stored is None:
            self._versions.pop(key, None)
        else:
            self._versions[key] = stored.version

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        async with self._call_order_lock:
            while True:
                stored, value = await self._read(key)
                if value != old:
                    return False
                version, replaced = (None, b"") if stored is None else (stored.version, stored.value)
                if await self._write(key, new, version, session, replaced):
                    return True

    async def _write(
        self, key: str, value: bytes, current: KeyVersion | None, session: bool, replaced: bytes = b""
    ) -> bool:
        """Write a key if its version is `current` (None: if it does not exist). Returns whether it was written."""
        if current is None:
            if not await self._store.write_version(key, b"", None, session=session):
                return False
            await self._store_version(key)
            current = self._versions.get(key)
            if current is None or current.writes != 1:  # another client was faster
                return False
        written = current.next()
        sealed = self._encrypt(key, written, value)
        if not await self._store.write_version(key, sealed, current, session=session, replaced=replaced):
            return False
        self._versions[key] = written
        return True

    async def delete(self, key: str) -> None:
        async with self._call_order_lock:
            self._versions.pop(key, None)
            await self._store.delete(key)

    async def evict(self, key: str) -> bool:
        return await self._store.evict(key)

    async def watch(self, prefix: str) -> AsyncGenerator[StoreChange, None]:
        delivered: set[str] = set()
        async with aclosing(self._store.watch_versions(prefix)) as changes:
            async for (key, stored), version in changes:
                if key in (_SECRET_MARKER_KEY, LAUNCHER_KEY):
                    continue
                if stored:
                    delivered.add(key)
                    yield StoreChange(key, self._decrypt(key, version, stored))
                elif key in delivered:
                    delivered.discard(key)
                    yield StoreChange(key, None)


def _binding(key: str, version: KeyVersion) -> list[bytes]:
    """What a value is bound to, as associated data of AES-SIV."""
    return [key.encode(), f"{version.created} {version.writes}".encode()]


def _cipher(key: bytes) -> AESSIV:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    except ImportError:
        raise UsageError("a job of several machines encrypts its values in etcd: pip install cryptography") from None
    return AESSIV(key)
