"""The launches of this user on this machine: what was started, so that `culm down` can end it in any case.

    ~/.culm/launches/NAME/launch.json    locked by the supervisor while it lives
                          provider/      files of the provider
                          head/          certificate, secret and data of the store
                          DIGEST/        files of a job that was sent to this machine (`culm launch --head`)

A folder exists from before the first machine is requested until everything has been removed.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import shutil
import time
from pathlib import Path

import msgspec

from culm.errors import UsageError
from culm.machines.launch_order import LaunchOrder
from culm.machines.machine_provider import MachineProvider, ProviderSettings
from culm.machines.machine_provider_registry import open_machine_provider
from culm.providers.supervisor.run_registry import user_folder

_RECORD = "launch.json"


class LaunchRecord(msgspec.Struct, frozen=True):
    """A launch of this machine."""

    job: str
    """Name of the job on this machine, as for `culm attach`."""
    order: LaunchOrder
    machines: int
    """How many machines the run should have."""
    started_at: float
    """Unix time."""
    pid: int
    """Process id of its supervisor."""


class FoundLaunch(msgspec.Struct, frozen=True):
    """A launch whose folder exists."""

    record: LaunchRecord
    folder: Path
    is_supervised: bool
    """Whether its supervisor lives. If not, nothing replaces or ends its machines but `culm down`."""

    def open_provider(self) -> MachineProvider:
        """The provider of its machines. Raises UsageError if it cannot be used any more."""
        return open_machine_provider(self.record.order.provider, provider_settings(self.record.order, self.folder))

    def forget(self) -> None:
        """Remove its folder: everything of it has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)


class RegisteredLaunch:
    """A launch of this process in the registry."""

    def __init__(self, job: str, order: LaunchOrder, machines: int) -> None:
        """Register a launch. Raises UsageError if its folder cannot be written."""
        record = LaunchRecord(job, order, machines, time.time(), os.getpid())
        try:
            self.folder = launches_folder() / order.launch
            (self.folder / "provider").mkdir(parents=True, mode=0o700)
            self.folder.chmod(0o700)
            descriptor = os.open(self.folder / _RECORD, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._file = os.fdopen(descriptor, "wb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(msgspec.json.encode(record))
        except OSError as error:
            raise UsageError(
                f"the folder of launches cannot be used ({error}): set CULM_HOME to another folder"
            ) from None

    def close(self, *, forget: bool) -> None:
        """Unlock the launch. `forget`: everything of it has ended, and its folder is removed."""
        if forget:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._file.close()


def launches_folder() -> Path:
    """The folder of all launches. Raises OSError if it cannot be made."""
    return user_folder("launches")


def is_registered(folder: Path) -> bool:
    """Whether a launch has its record in this folder."""
    return (folder / _RECORD).exists()


def provider_settings(order: LaunchOrder, folder: Path) -> ProviderSettings:
    """How the provider of a launch is opened."""
    return ProviderSettings(
        launch=order.launch, folder=str(folder / "provider"), options=order.options, price=order.price
    )


def known_launches() -> list[FoundLaunch]:
    """The launches of this user on this machine that may have machines, the oldest first."""
    try:
        folders = list(launches_folder().iterdir())
    except OSError:
        return []
    found = [launch for folder in folders if (launch := _read_folder(folder)) is not None]
    return sorted(found, key=lambda launch: launch.record.started_at)


def find_launches(name: str) -> list[FoundLaunch]:
    """The launches of this name, or of a job of this name. Raises UsageError that lists the known ones if there is
    none."""
    launches = known_launches()
    found = [each for each in launches if name in (each.record.order.launch, each.record.job)]
    if found:
        return found
    names = [each.record.job for each in launches]
    close = difflib.get_close_matches(name, names, n=1)
    known = f"the known ones are {', '.join(names)}" if names else "nothing is launched"
    words = f"did you mean {close[0]}?" if close else known
    raise UsageError(f"there is no launch {name!r} on this machine: {words}")


def _read_folder(folder: Path) -> FoundLaunch | None:
    """The launch of a folder; None if there is none."""
    try:
        with (folder / _RECORD).open("rb") as file:
            record = msgspec.json.decode(file.read(), type=LaunchRecord)
            return FoundLaunch(record, folder, _is_locked(file.fileno()))
    except (OSError, msgspec.MsgspecError):
        return None


def _is_locked(descriptor: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True
