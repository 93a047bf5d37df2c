"""Input log: the events of a leader with their times, and a hash of its instructions. `culm replay` reads it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from culm.cluster.leader.events import Instruction, LeaderEvent
from culm.cluster.leader.leader_state import JobFacts, LeaderState
from culm.cluster.run_setup import RunSetup
from culm.errors import UsageError
from culm.text_format import count_noun

MAX_BYTES = 64 << 20
"""Size of the log of one leader, after which nothing more is recorded."""
FILE_PATTERN = "leader-*.log"
VERSION = 5
_LENGTH = struct.Struct("<I")
_NO_INSTRUCTIONS = bytes(8)


class LogHeader(msgspec.Struct, frozen=True):
    """The inputs of a new LeaderState."""

    version: int
    job: JobFacts
    setup: RunSetup
    node: int
    address: str
    now: float
    slowest_action_s: float

    def new_state(self) -> LeaderState:
        return LeaderState(
            self.job, self.setup, self.node, self.address, self.now, slowest_action_s=self.slowest_action_s
        )


class LogEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event and what the leader did."""

    now: float
    event: LeaderEvent
    digest: bytes
    """Digest of the instructions."""
    names: tuple[str, ...] = ()
    """The kinds of the instructions, to show a difference."""


class ReplayDifference(msgspec.Struct, frozen=True):
    """The first event for which a replay gave other instructions."""

    number: int
    entry: LogEntry
    instructions: list[str]


class LeaderReplay(msgspec.Struct, frozen=True):
    """The replay of one leader's log. str() says the result in a sentence."""

    log: str
    """Name of its file."""
    events: int
    """How many were handled, up to the first difference."""
    difference: ReplayDifference | None

    @property
    def equal(self) -> bool:
        """Whether the leader gives the recorded instructions for every event."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.log}: {count_noun(self.events, 'event')}, the same instructions"
        at = self.difference
        event, recorded = type(at.entry.event).__name__, ", ".join(at.entry.names) or "none"
        return (
            f"{self.log}: {count_noun(self.events, 'event')}, first difference at event {at.number} ({event} at "
            f"{at.entry.now:.6f}): recorded {recorded}; now {', '.join(at.instructions) or 'none'}\n{at.entry.event}"
        )


_encode = msgspec.msgpack.Encoder().encode
_header_decoder = msgspec.msgpack.Decoder(LogHeader)
_entry_decoder = msgspec.msgpack.Decoder(LogEntry)


def digest(instructions: Sequence[Instruction]) -> bytes:
    """A short hash of instructions."""
    if not instructions:  # most events of a large cluster
        return _NO_INSTRUCTIONS
    return hashlib.blake2b(_encode(instructions), digest_size=8).digest()


class InputLogWriter:
    """Collects entries on the event loop; `write` stores them and is called in a thread."""

    def __init__(self, path: Path, header: LogHeader, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._pending: list[bytes] = [_frame(_encode(header))]
        self._bytes = len(self._pending[0])
        self._file: BinaryIO | None = None
        self.is_full = False
        """Whether the log has reached its limit: events after that are not recorded."""

    def add(self, event: LeaderEvent, now: float, instructions: Sequence[Instruction]) -> None:
        """Record an event, unless the log is full."""
        if self.is_full:
            return
        names = tuple(type(each).__name__ for each in instructions)
        frame = _frame(_encode(LogEntry(now, event, digest(instructions), names)))
        if self._bytes + len(frame) > self._max_bytes:
            self.is_full = True
            return
        self._bytes += len(frame)
        self._pending.append(frame)

    def write(self) -> None:
        """Write what was added since the last call. Raises OSError."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        if self._file is None:
            self._file = self._path.open("wb")
        self._file.write(b"".join(pending))
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_log(path: Path) -> tuple[LogHeader, Iterator[LogEntry]]:
    """The header and the entries of a log. The last entry may be cut off if the leader was killed: it is left out.

    Raises UsageError if the file is not an input log of this version; the iterator raises it at a damaged entry.
    """
    frames = _frames(path.read_bytes())
    try:
        header = _header_decoder.decode(next(frames, b""))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not an input log of this version of culm: {error}") from error
    if header.job.transformed:
        names = ", ".join(header.job.transformed)
        raise UsageError(f"{path} cannot be replayed: Job.metrics applies functions to {names}, and the log has none")
    return header, _decode_entries(path, frames)


def _decode_entries(path: Path, frames: Iterator[bytes]) -> Iterator[LogEntry]:
    for number, frame in enumerate(frames, 1):
        try:
            yield _entry_decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is damaged at event {number}: {error}") from error


def replay(path: Path) -> tuple[int, ReplayDifference | None]:
    """Feed the events of a log to a new LeaderState. Returns how many it handled, and the first difference."""
    header, entries = read_log(path)
    state, count = header.new_state(), 0
    for count, entry in enumerate(entries, 1):
        instructions = state.handle(entry.event, entry.now)
        if digest(instructions) != entry.digest:
            return count, ReplayDifference(count, entry, [type(each).__name__ for each in instructions])
    return count, None


def replay_run(folder: str) -> list[LeaderReplay]:
    """Replay the logs of all leaders of a run. Raises UsageError if the folder has none."""
    paths = sorted(Path(folder).glob(FILE_PATTERN))
    if not paths:
        raise UsageError(f"{folder} has no {FILE_PATTERN}: name the local folder of a run (culm run --out)")
    return [LeaderReplay(path.name, *replay(path)) for path in paths]


def _frame(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _frames(data: bytes) -> Iterator[bytes]:
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if position + length > len(data):
            return
        yield data[position : position + length]
        position += length
