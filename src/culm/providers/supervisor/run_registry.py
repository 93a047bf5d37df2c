"""The jobs of this user on this machine: a folder for each, by which `culm attach`, `logs` and `stop` find it.

    ~/.culm/runs/NAME/job.json        locked by the supervisor while it lives
                      socket          windows connect to it
                      history         what a detached run has shown, once it has ended

CULM_HOME replaces ~/.culm. Folders and files can be read by their owner only.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from culm.errors import UsageError
from culm.observe.writers.run_folder import local_path

_ENTRY, _SOCKET, _HISTORY = "job.json", "socket", "history"
_KEPT_S = 7 * 24 * 3600.0
"""How long the history of a detached run is kept after its end, in seconds."""
_MAX_NAMES = 1000


class JobEntry(msgspec.Struct, frozen=True):
    """A job of this machine."""

    name: str
    pid: int
    """Process id of its supervisor."""
    out: str | None = None
    """Its run folder: an absolute path, or a URL."""
    job: str = ""
    """FILE[:function]; empty: a Python object."""
    started_at: float = 0.0
    """Unix time."""


class FoundJob(msgspec.Struct, frozen=True):
    """A job that was found by its name or its run folder."""

    entry: JobEntry
    folder: Path
    running: bool

    def connect(self) -> socket.socket:
        """Connect to the supervisor. Raises UsageError if the job has ended meanwhile."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short_path(self.folder) as place:
                door.connect(f"{place}/{_SOCKET}")
        except OSError:
            door.close()
            raise UsageError(f"job {self.entry.name!r} has just ended") from None
        return door

    def history(self) -> bytes:
        """What a detached run has shown, as frames. Raises UsageError if it was removed meanwhile."""
        try:
            return (self.folder / _HISTORY).read_bytes()
        except OSError:
            raise UsageError(f"job {self.entry.name!r} has ended, and its history was removed") from None


class RegisteredJob:
    """A job of this process in the registry. `socket` accepts its windows."""

    def __init__(self, name: str, out: str | None, job: str) -> None:
        """Register a job under `name`, or under the name with a number appended if a running job has it.

        Raises UsageError if the folder of the registry cannot be written.
        """
        try:
            runs = _runs_folder()
            self.folder = Path(tempfile.mkdtemp(prefix=".new-", dir=runs))
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with _short_path(self.folder) as place:
                self.socket.bind(f"{place}/{_SOCKET}")
            self.socket.listen()
            self._file = (self.folder / _ENTRY).open("wb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.entry = JobEntry(name, os.getpid(), absolute_folder(out), job, time.time())
            self._take_name(runs, name)
        except OSError as error:
            raise UsageError(
                f"{_home()}/runs cannot be used ({error.strerror}): set CULM_HOME to a folder of your own"
            ) from None

    def _take_name(self, runs: Path, wanted: str) -> None:
        """Write the entry and rename the folder to the first free name. A folder of an ended job is replaced."""
        for number in range(1, _MAX_NAMES):
            name = wanted if number == 1 else f"{wanted}-{number}"
            found = _read_folder(runs / name)
            if found is not None and found.running:
                continue
            if (runs / name).exists():
                shutil.rmtree(runs / name, ignore_errors=True)
            self.entry = msgspec.structs.replace(self.entry, name=name)
            os.ftruncate(self._file.fileno(), 0)
            os.pwrite(self._file.fileno(), msgspec.json.encode(self.entry), 0)
            with contextlib.suppress(OSError):  # another job took the name meanwhile
                self.folder = self.folder.rename(runs / name)
                return
        raise OSError(0, f"{_MAX_NAMES} jobs are called {wanted}")

    def close(self, history: bytes | None = None) -> None:
        """Remove the job, or keep what it has shown."""
        if history is None:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # the run itself has ended well
                descriptor = os.open(self.folder / _HISTORY, os.O_WRONLY | os.O_CREAT, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(history)
        self.socket.close()
        self._file.close()


def known_jobs() -> list[FoundJob]:
    """The jobs of this user on this machine, the oldest first. Entries of killed supervisors, and of jobs that ended a
    week ago, are removed."""
    try:
        folders = [folder for folder in _runs_folder().iterdir() if not folder.name.startswith(".")]
    except OSError:
        return []
    found = [job for folder in folders if (job := _read_folder(folder)) is not None]
    for job in (job for job in found if _is_stale(job)):
        shutil.rmtree(job.folder, ignore_errors=True)
    return sorted((job for job in found if not _is_stale(job)), key=lambda job: job.entry.started_at)


def find_job(name_or_folder: str) -> FoundJob:
    """The job of this name or with this run folder. Raises UsageError that lists the known jobs if there is none."""
    jobs = known_jobs()
    place = absolute_folder(name_or_folder)
    found = [job for job in jobs if job.entry.name == name_or_folder]
    found += [job for job in jobs if job.entry.out is not None and job.entry.out == place]
    if found:
        return next((job for job in found if job.running), found[0])
    raise UsageError(f"there is no job {name_or_folder!r} on this machine: {_known_words(name_or_folder, jobs)}")


def _known_words(given: str, jobs: list[FoundJob]) -> str:
    if not jobs:
        return "no job of this user is running"
    names = [job.entry.name for job in jobs]
    close = difflib.get_close_matches(given, names, n=1)
    words = ", ".join(name if job.running else f"{name} (ended)" for name, job in zip(names, jobs, strict=True))
    return f"did you mean {close[0]}? The known jobs are {words}" if close else f"the known jobs are {words}"


def registry_name(job_name: str | None, reference: str) -> str:
    """The name of a job on this machine: `job_name`, else that of its file, else "train" for a Python object."""
    name = job_name or Path(reference.rpartition(":")[0] or reference).stem or "train"
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).lstrip(".") or "job"


def absolute_folder(out: str | None) -> str | None:
    """A run folder by which it can be compared: an absolute path, or the URL as it is."""
    if out is None or (path := local_path(out)) is None:
        return out
    return str(Path(path).resolve())


def _home() -> Path:
    given = os.environ.get("CULM_HOME")
    return Path(given) if given else Path.home() / ".culm"


def user_folder(name: str) -> Path:
    """A folder of culm for this user on this machine. If it is new, it can be read by its owner only."""
    folder = _home() / name
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, exist_ok=True)
    return folder


def _runs_folder() -> Path:
    return user_folder("runs")


def _read_folder(folder: Path) -> FoundJob | None:
    """The job of a folder; None if there is none."""
    try:
        with (folder / _ENTRY).open("rb") as file:
            entry = msgspec.json.decode(file.read(), type=JobEntry)
            return FoundJob(entry, folder, _is_locked(file.fileno()))
    except (OSError, msgspec.MsgspecError):
        return None


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_stale(job: FoundJob) -> bool:
    if job.running:
        return False
    try:
        return (job.folder / _HISTORY).stat().st_mtime < time.time() - _KEPT_S
    except OSError:
        return True


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """A path of the folder that fits into the 107 bytes of a socket address."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
