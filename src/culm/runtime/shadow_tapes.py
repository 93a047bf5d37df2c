"""Tapes of shadow replicas, which leave a device that has no room for them: they are needed after a loss only.

After a forward that was run in advance, what it keeps is copied into slabs beside the computation, and its memory on
the device is free when that is complete. The copies are dropped with the tape, at the commit of its step. Nothing here
waits, and nothing that is computed changes: without slabs the next forward is not run in advance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from culm.runtime.compute.off_loaded_tape import SavedTensors

if TYPE_CHECKING:
    from culm.device.device_copies import DeviceCopies
    from culm.runtime.clock import Clock
    from culm.runtime.compute.off_loaded_tape import OffLoadedTape
    from culm.runtime.compute.segment import Segment, Tape

MAX_LEAVING = 2
"""Tapes on the device, as their copies are under way or wait for slabs (see `plan.rent.memory_model`)."""
_ROOM_FOR_TAPES = 4
"""Tapes stay on a device that has room for this many times those of a step: those of two open steps, and as much
again for what the worker has not needed yet."""


class ShadowTapes:
    """The tapes of one worker in one epoch that leave its device."""

    def __init__(self, copies: DeviceCopies, clock: Clock, tapes: int, on_full: Callable[[int], None]) -> None:
        """`tapes`: how many a step has. `on_full` is called once, with the bytes of a tape, if there is no room for it
        in the slabs."""
        self._copies, self._clock, self._on_full = copies, clock, on_full
        self._tapes = tapes
        self._stays: bool | None = None
        """Whether tapes stay on the device. Decided by the size of the first one; None: there was none yet."""
        self._is_announced = False
        self._waiting: tuple[Segment, Tape, OffLoadedTape] | None = None
        """The tape that has no slabs yet."""
        self._leaving: list[OffLoadedTape] = []
        self._allocating: asyncio.Future[None] | None = None

    def note_forward(self, segment: Segment) -> SavedTensors | None:
        """What notes the tensors that a forward of the segment keeps. None: they stay on the device."""
        if self._stays:
            return None
        modules = [layer.module for layer in segment.layers]
        if isinstance(segment.job.loss, nn.Module):
            modules.append(segment.job.loss)
        return SavedTensors(self._copies.device, modules, self._copies.min_off_loaded_bytes)

    def add(self, segment: Segment, tape: Tape, saved: SavedTensors) -> None:
        """Let a tape leave, if it has to, when there are slabs for it. `may_run_forward` was true before it."""
        off_loaded = saved.off_loaded(tape, self._copies)
        if self._stays is None:
            self._stays = self._copies.has_room(_ROOM_FOR_TAPES * self._tapes * off_loaded.copied_bytes)
        if self._stays:
            return
        tape.set_off_loaded(off_loaded)
        self._waiting = segment, tape, off_loaded
        self._try_to_leave()

    def may_run_forward(self) -> bool:
        """Whether the tape of another forward could leave: those before have their slabs, and few copies are under
        way."""
        self._try_to_leave()
        self._leaving = [each for each in self._leaving if each.is_on_host and not each.is_copied]
        return self._waiting is None and len(self._leaving) < MAX_LEAVING

    def _try_to_leave(self) -> None:
        if self._waiting is None:
            return
        segment, tape, off_loaded = self._waiting
        if tape.off_loaded is not off_loaded or segment.tapes.get((tape.step, tape.micro)) is not tape:
            self._waiting = None  # its step was committed, or it was used
            return
        missing = off_loaded.missing_slabs()
        if missing is None:
            if not self._is_announced:
                self._is_announced = True
                self._on_full(off_loaded.copied_bytes)
        elif missing:
            self._allocate(missing)
        else:
            off_loaded.leave_device()
            self._leaving.append(off_loaded)
            self._waiting = None

    def _allocate(self, sizes: list[int]) -> None:
        """Allocate slabs in a thread: it takes milliseconds for each megabyte."""
        if self._allocating is None or self._allocating.done():
            call = self._clock.run_in_thread(self._copies.add_slabs, sizes)
            self._allocating = asyncio.ensure_future(call)
            self._allocating.add_done_callback(lambda task: task.cancelled() or task.exception())
