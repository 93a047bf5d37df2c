"""Launches of this user whose store and supervisor are on another machine, the head: how they are found from here.

    ~/.culm/heads/LAUNCH.json

A file exists from before the launch is started on its head until `culm down`, or until a week after its end.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from culm.errors import UsageError
from culm.providers.supervisor.run_registry import user_folder

KEPT_S = 7 * 24 * 3600.0
"""How long the head keeps what a run has shown."""


class HeadLaunch(msgspec.Struct, frozen=True):
    """A launch on a head."""

    launch: str
    job: str
    """Its name on the head, as for `culm attach`."""
    head: str
    """As ssh understands it: [USER@]HOST; or a Pod, as in pod/NAME."""
    ssh: tuple[str, ...]
    """The command that reaches it, ssh or kubectl, and its options."""
    program: tuple[str, ...]
    """The command that runs culm on the head."""
    started_at: float
    """Unix time."""


def note_head_launch(launch: HeadLaunch) -> None:
    """Write a launch, or replace what was written of it. Raises UsageError if that is not possible."""
    try:
        folder = user_folder("heads")
        new_file = folder / f".{launch.launch}"
        with os.fdopen(os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(launch))
        new_file.replace(folder / f"{launch.launch}.json")
    except OSError as error:
        raise UsageError(
            f"the folder of launches on heads cannot be used ({error}): set CULM_HOME to another folder"
        ) from None


def forget_head_launch(launch: HeadLaunch) -> None:
    """Remove what was written of a launch."""
    with contextlib.suppress(OSError):
        (user_folder("heads") / f"{launch.launch}.json").unlink()


def known_head_launches() -> list[HeadLaunch]:
    """The launches on heads that were started from here, the oldest first."""
    found = []
    try:
        paths = list(user_folder("heads").glob("*.json"))
    except OSError:
        return []
    for path in paths:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.append(msgspec.json.decode(path.read_bytes(), type=HeadLaunch))
    return sorted(found, key=lambda launch: launch.started_at)


def find_head_launch(name: str) -> HeadLaunch | None:
    """The newest launch of this name, or of a job of this name."""
    return next((each for each in reversed(known_head_launches()) if name in (each.launch, each.job)), None)
