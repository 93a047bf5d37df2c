"""Check that all machines of a run write to the same folder, before one of them computes.

The first machine leaves a file in the folder and puts the file's name into the store. A machine that does not find the
file there has another disk: the shards that it writes would be missing in every checkpoint.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.observe.writers.run_folder import SHARED_PREFIX, local_path

if TYPE_CHECKING:
    from culm.cluster.store.store import Store
    from culm.runtime.clock import Clock

_KEY = "folder"
"""Holds the name of the file."""
_APPEAR_TIMEOUT_S = 15.0
"""A network file system may show a file of another machine so much later."""
_POLL_S = 0.5
_FIX = "give the run a folder that all machines share, at the same path, or a URL as in s3://bucket/runs/a"


async def check_shared_folder(store: Store, out: str | None, clock: Clock) -> None:
    """Raise UsageError if `out` is a local folder that this machine does not share with the first one of the run, or
    cannot write to."""
    path = None if out is None else local_path(out)
    if path is None:
        return
    name = await store.get(_KEY) or await _leave_file(store, path)
    until = clock.now() + _APPEAR_TIMEOUT_S
    while not _has_file(path, name.decode()):
        if clock.now() >= until:
            raise UsageError(
                f"this machine cannot join: --out {out} is not the folder that the other machines write to (it has no "
                f"file {name.decode()}); {_FIX}"
            )
        await clock.sleep(_POLL_S)


async def _leave_file(store: Store, path: Path) -> bytes:
    """Leave a file in the folder, unless another machine was faster. Returns the name of the file to look for."""
    name = f"{SHARED_PREFIX}{secrets.token_hex(8)}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        (path / name).touch(mode=0o600)
    except OSError as error:
        raise UsageError(
            f"this machine cannot join: --out {str(path)!r} cannot be written ({error.strerror}); {_FIX}"
        ) from None
    if await store.swap(_KEY, None, name.encode()):
        for earlier in path.glob(f"{SHARED_PREFIX}*"):
            if earlier.name != name:
                earlier.unlink(missing_ok=True)
        return name.encode()
    (path / name).unlink(missing_ok=True)
    found = await store.get(_KEY)
    return found or name.encode()


def _has_file(path: Path, name: str) -> bool:
    """Whether the folder lists the file. A listing is newer than what a network file system remembers of a name."""
    with contextlib.suppress(OSError):
        return any(entry.name == name for entry in path.iterdir())
    return False
