"""Stream: an iterable data set with a position, so that any worker can read any recent item again.

A worker that needs items has a reader of its own. The reader numbers the items from the first one of the run, keeps
those of the last steps, and takes the stream's `state_dict` at the beginning of every step. To go back further, or to
start in the middle of a run, it loads the newest such state before the item and reads on from there. Checkpoints and
copies of layers carry the state. The stream must give the same items when it is read again: before the run its first
items are read twice, and in the run every reader reports a digest of the items of each step, which must all be equal.

A state is stored with a digest of the items that follow it. If the items after `load_state_dict` are others (a shuffle
buffer is not part of the state of most libraries), the state is not used: items are skipped from the beginning instead.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from culm.data.item_digest import digest_items
from culm.errors import USER_EXCEPTIONS, CulmError, JobError, LayerFailed, message_suffix

_KEPT_BLOCKS = 4
"""Blocks (steps) whose items are kept: two steps may be open, and the next one is loaded in advance."""
_KEPT_STATES = 16
_REPEATED_ITEMS = 64
"""Items that are read twice before a run, at most."""
_CHECKED_ITEMS = 8
"""Items after a state that its digest covers, or those of a step if they are fewer."""
POSITION_NAME = "data.position"
"""Name of the scalar with the positions of a stream in a checkpoint and in copies of layers."""


@dataclass(frozen=True)
class StreamState:
    """Where a stream is before item `number` of the run."""

    number: int
    passes: int
    """Complete passes over the source before it."""
    offset: int
    """Items of the current pass before it."""
    state: Any
    """The state_dict of the source; None: it has none, and `offset` items are skipped instead."""
    check: str | None = None
    """Digest of the first items from `number` on; None: not known yet."""


class Stream:
    """The items of an iterable: a torch IterableDataset, a streaming data set of Hugging Face `datasets`, a loader.

    `function` turns an item into (input, target). Items are used in the order of the source: shuffle there. When the
    source ends, it is read again (after `set_epoch(pass)`, if it has that method). A source with `state_dict` and
    `load_state_dict` continues at any item without reading those before it. Raises JobError for an iterator, which
    can be read only once.
    """

    def __init__(self, source: Any, function: Callable[[Any], Any] | None = None, *, block: int = 1) -> None:
        """`block`: items of a step. The Job sets it."""
        if not hasattr(source, "__iter__"):
            raise JobError(f"Job.data is a {type(source).__name__}: use a data set with len() and [i], or an iterable")
        if hasattr(source, "__next__"):
            raise JobError(
                f"Job.data is a {type(source).__name__}, an iterator that can be read only once: pass an object whose "
                "__iter__ starts again, such as an IterableDataset"
            )
        self._source, self._function, self.block = source, function, block
        self._states = {0: StreamState(0, 0, 0, None)}
        self._block_digests: dict[int, str] = {}
        """Digests of the last blocks that were read, by the number of their first item."""
        self._reset()

    def _reset(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._opened: Any = None
        self._passes = self._offset = self._next = 0
        self._items: dict[int, Any] = {}

    def with_block(self, block: int) -> Stream:
        """The same stream from its beginning, with this many items per step."""
        return Stream(self._source, self._function, block=block)

    @property
    def is_resumable(self) -> bool:
        """Whether the source has state_dict and load_state_dict, or is skipped item by item instead."""
        return hasattr(self._source, "load_state_dict")

    def __getstate__(self) -> dict[str, Any]:
        """Without the open source: another process opens its own."""
        closed: dict[str, Any] = {
            "_iterator": None,
            "_opened": None,
            "_passes": 0,
            "_offset": 0,
            "_next": 0,
            "_items": {},
        }
        return {**self.__dict__, **closed}

    def __getitem__(self, number: int) -> Any:
        """Item `number` of the run. Raises LayerFailed, which names it, if the source fails."""
        if number not in self._items:
            self._move_to(number)
            while number not in self._items:
                self._read_next()
        item = self._items[number]
        return item if self._function is None else self._function(item)

    def block_digest(self, number: int) -> str | None:
        """Digest of the items of the block that begins at `number`, whose rest is read if its beginning was; None: it
        was not read, or long ago. Raises JobError if the stream gave other items when it was read before."""
        if number in self._items:
            self._move_to(max(self._items) + 1)
            while number not in self._block_digests:
                self._read_next()
        return self._block_digests.get(number)

    def check_items_single(self) -> None:
        """Raise JobError for a loader of torch that returns batches, which would be collated once more."""
        if getattr(self._source, "batch_sampler", None) is not None:
            raise JobError(
                f"Job.data is a {type(self._source).__name__} that returns batches, and Job.micro_batch says how many "
                "items a micro-batch has: make it with batch_size=None, or pass its data set"
            )

    def check_repeatable(self) -> None:
        """Read the first items of a copy of the stream. Raises JobError unless they are those that this one gives."""
        again = self.with_block(self.block)
        for number in range(min(self.block, _REPEATED_ITEMS)):
            for stream in (self, again):
                if number not in stream._items:
                    stream._move_to(number)
                while number not in stream._items:
                    stream._read_next()
            if digest_items([self._items[number]]) != digest_items([again._items[number]]):
                raise JobError(other_items_message(f"gives another item {number} when it is read again"))

    def positions(self, number: int) -> str:
        """The states before item `number` and before the steps after it that are known, as JSON. A state that JSON can
        not hold is left out: then items are skipped instead."""
        if number not in self._states or self._states[number].check is None:
            self._move_to(number)
            while self._next < number:
                self._read_next()
            self._keep_state()
            while self._states[number].check is None:
                self._read_next()
        return json.dumps([vars(_plain(state)) for at, state in sorted(self._states.items()) if at >= number])

    def newest_positions(self) -> str:
        """The newest known states as JSON, for another worker that starts to read the stream."""
        checked = [state for _, state in sorted(self._states.items()) if state.check is not None]
        return json.dumps([vars(_plain(state)) for state in checked[-_KEPT_BLOCKS:]])

    def add_positions(self, text: str) -> None:
        """Add states of `positions`, to start from when an item near them is needed."""
        for fields in json.loads(text):
            state = StreamState(**fields)
            self._states.setdefault(state.number, state)

    def _move_to(self, number: int) -> None:
        """Open the source at the best state before an item, unless reading on from here is as short."""
        best = max(at for at in self._states if at <= number)
        is_open = self._iterator is not None and self._next <= number
        if not is_open or best > self._next:
            self._open(self._states[best])

    def _open(self, state: StreamState) -> None:
        loads = state.state is not None and state.check is not None
        self._passes, self._offset, self._next = state.passes, state.offset, state.number
        self._start_pass(state.state if loads else None)
        for _ in range(0 if loads else state.offset):
            self._read_source()
        if loads and not self._continues_as(state):
            self._states[state.number], self._items = replace(state, state=None), {}
            self._open(self._states[state.number])

    def _continues_as(self, state: StreamState) -> bool:
        """Whether the items after a state that was loaded are those that followed it before."""
        self._items, known, self._block_digests = {}, self._block_digests, {}
        while self._next < state.number + self._checked_items:
            self._read_next()
        continues = self._digest(state.number) == state.check
        self._block_digests = known | (self._block_digests if continues else {})
        return continues

    @property
    def _checked_items(self) -> int:
        return min(_CHECKED_ITEMS, self.block)

    def _digest(self, number: int) -> str:
        """Digest of the items that the check of a state covers. They have been read."""
        return digest_items(self._items[at] for at in range(number, number + self._checked_items))

    def _start_pass(self, state: Any) -> None:
        try:
            self._opened = copy.deepcopy(self._source)
            if hasattr(self._opened, "set_epoch"):
                self._opened.set_epoch(self._passes)
            if state is not None:
                self._opened.load_state_dict(copy.deepcopy(state))
            self._iterator = iter(self._opened)
        except USER_EXCEPTIONS as error:
            raise LayerFailed(
                f"Job.data could not be opened at item {self._next}: {type(error).__name__}{message_suffix(error)}"
            ) from error

    def _read_next(self) -> None:
        if self._next % self.block == 0:
            self._keep_state()
        item = self._read_source()
        if item is _END:
            if not self._offset:
                raise JobError(f"Job.data ends without an item in pass {self._passes}: it needs at least one item")
            self._passes, self._offset = self._passes + 1, 0
            self._start_pass(None)
            return
        self._items[self._next] = item
        self._next, self._offset = self._next + 1, self._offset + 1
        self._check_state(self._next - self._checked_items)
        if self._next % self.block == 0:
            self._check_block(self._next - self.block)
        for old in [at for at in self._items if at < self._next - _KEPT_BLOCKS * self.block or at >= self._next]:
            del self._items[old]

    def _check_block(self, number: int) -> None:
        """Compare a block that has just been read with what was read before."""
        digest = digest_items(self._items[at] for at in range(number, self._next))
        if self._block_digests.setdefault(number, digest) != digest:
            first = f"{number} to {self._next - 1}"
            raise JobError(other_items_message(f"gave other items {first} when they were read again"))
        for old in sorted(self._block_digests)[:-_KEPT_STATES]:
            del self._block_digests[old]

    def _check_state(self, number: int) -> None:
        """Add the digest to a state whose items have just been read."""
        state = self._states.get(number)
        if state is not None and state.check is None and all(n in self._items for n in range(number, self._next)):
            self._states[number] = replace(state, check=self._digest(number))

    def _read_source(self) -> Any:
        assert self._iterator is not None
        try:
            return next(self._iterator, _END)
        except CulmError:
            self._iterator = None
            raise
        except USER_EXCEPTIONS as error:
            self._iterator = None  # a generator that raised would end here when it is asked again
            raise LayerFailed(
                f"Job.data raised {type(error).__name__} for item {self._next}{message_suffix(error)}"
            ) from error

    def _keep_state(self) -> None:
        """Take the state of the source, unless it is known: just after load_state_dict a source may not have one."""
        if self._next in self._states:
            return
        state = copy.deepcopy(self._opened.state_dict()) if self.is_resumable and self._offset else None
        self._states[self._next] = StreamState(self._next, self._passes, self._offset, state)
        for old in sorted(self._states)[1:-_KEPT_STATES]:  # the first one is the beginning
            del self._states[old]


_END: Any = object()


def other_items_message(what: str) -> str:
    """The sentence about a stream that is not repeatable."""
    return (
        f"Job.data is a stream that {what}: every worker reads it itself, so its shuffling must depend on a seed and "
        "not on the process, the time or the global random state; or write the items to files first"
    )


def _plain(state: StreamState) -> StreamState:
    """The state with its state_dict only if JSON gives it back unchanged."""
    try:
        if json.loads(json.dumps(state.state)) == state.state:
            return state
    except (TypeError, ValueError):
        pass
    return replace(state, state=None)
