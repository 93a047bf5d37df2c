"""Checkpoint committer: writes the manifest of a complete checkpoint, and finds the newest one on storage."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from culm.checkpoint import CheckpointCatalog, ShardReceipt, Storage
from culm.cluster.leader.events import CommittedCheckpoint, FoundCheckpoint
from culm.errors import CheckpointError
from culm.runtime.storage_retry import STALL_S, retry_storage

if TYPE_CHECKING:
    from culm.cluster.leader.checkpoints.checkpoint_tracker import CheckpointTracker
    from culm.cluster.run_setup import RunSetup
    from culm.runtime.clock import Clock

_COMMIT_WAIT_S = 2.0
"""How long the leader waits for a commit before it continues in the background."""
_READ_RETRY_S = 60.0
"""How long a checkpoint that was written is searched for before it counts as gone."""


class CheckpointCommitter:
    """Commits checkpoints of a tracker, in a thread and with retries. It reads the tracker and does not change it."""

    def __init__(self, tracker: CheckpointTracker, setup: RunSetup, clock: Clock) -> None:
        self._tracker, self._setup, self._clock = tracker, setup, clock
        self._committed_steps = 0
        self._commit_task: asyncio.Task[CommittedCheckpoint | None] | None = None
        self._deletes_skipped = False
        self._commit_failure = asyncio.Event()
        """Set when an attempt of the commit under way has failed."""
        self.on_failure: Callable[[str, str], None] = lambda *_: None
        """Called with what is delayed and the reason when storage fails."""
        self.on_recovery: Callable[[], None] = lambda: None
        """Called when a commit has succeeded."""
        self.on_commit_end: Callable[[], None] = lambda: None
        """Called when a commit has ended, in the background or not."""

    def _newest_whole(self) -> tuple[int, int] | None:
        return self._tracker.newest_whole(self._committed_steps)

    async def commit_newest(self, committed_steps: int, folder: str) -> CommittedCheckpoint | None:
        """Commit the newest checkpoint whose shards and steps are all there; None: there is none, or it takes longer.

        A commit that fails or takes longer continues in the background: call again after `on_commit_end`. Pass what
        this returns to `CheckpointTracker.record_commit` before the next call.
        """
        self._committed_steps = max(self._committed_steps, committed_steps)
        if self._commit_task is None:
            if self._newest_whole() is None:
                return None
            self._commit_failure.clear()
            self._commit_task = asyncio.create_task(self._commit(folder))
            self._commit_task.add_done_callback(lambda _: self.on_commit_end())
        if not self._commit_failure.is_set():
            await self._wait_for_commit(_COMMIT_WAIT_S)
        if not self._commit_task.done():
            return None
        task, self._commit_task = self._commit_task, None
        return task.result()

    async def _wait_for_commit(self, timeout_s: float | None) -> None:
        """Wait until the commit has ended or an attempt of it has failed."""
        if self._commit_task is not None:
            failed = asyncio.ensure_future(self._commit_failure.wait())
            await asyncio.wait([self._commit_task, failed], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()

    async def _commit(self, folder: str) -> CommittedCheckpoint | None:
        """Commit the newest whole checkpoint, and retry until that succeeds."""

        def commit() -> CommittedCheckpoint | None:
            newest = self._newest_whole()  # a newer one may be complete since the last attempt
            return None if newest is None else self._write_commit(newest, folder)

        def handle_failure(why: str, stalled: bool) -> None:
            del stalled
            self._commit_failure.set()
            newest = self._newest_whole()
            self.on_failure(f"the checkpoint of step {newest[1] if newest is not None else 0}", why)

        result = await retry_storage(self._clock, commit, handle_failure)
        self.on_recovery()
        return result

    def _write_commit(self, key: tuple[int, int], folder: str) -> CommittedCheckpoint:
        """Write the manifest of a checkpoint, then delete old checkpoints. Runs in a thread."""
        step, parts = key[1], self._tracker.shards_of(key)
        catalog = CheckpointCatalog(Storage(folder, existing=folder))
        receipts = [ShardReceipt(r.name, r.sha256, r.size, r.tensors) for r in parts]
        scalars = {name: value for r in parts for name, value in r.scalars.items()}
        verified = step in self._tracker.verified_steps
        catalog.commit(
            step,
            receipts,
            scalars,
            self._setup.job_facts,
            time.time(),
            verified=verified,
            evaluations=self._tracker.decisive_evaluations(step),
        )
        prune_failed = ""
        try:
            self._write_best(catalog)
            self._prune(catalog, step)
        except CheckpointError as error:
            prune_failed = str(error)
        path = catalog.folder_of(step)
        return CommittedCheckpoint(step, sum(r.size for r in parts), prune_failed, verified, path)

    def _prune(self, catalog: CheckpointCatalog, newest: int = 0) -> None:
        """Delete old checkpoints. `newest`: the step of a checkpoint that the tracker does not know yet."""
        damaged: set[int] = set()
        if self._setup.resume_from is not None:  # it was passed over by the resume, and not written again since
            later = {step for step in catalog.steps() if step > self._setup.start}
            damaged = later - {*self._tracker.completed_steps, newest}
        catalog.prune(self._setup.keep_last, verify="sizes", keep=self._tracker.kept_steps, damaged=damaged)

    def _write_best(self, catalog: CheckpointCatalog) -> None:
        """Record which checkpoint is the best one, once it is committed."""
        best = self._tracker.best
        if best is not None and best.completed_steps in catalog.steps():
            catalog.write_best(best.completed_steps, best.name, best.value)

    def close(self) -> None:
        """Give up a commit that is under way."""
        if self._commit_task is not None:
            self._commit_task.cancel()

    async def prune_leftovers(self, folder: str) -> None:
        """Remove shards that arrived too late for their checkpoint. Call when no node writes any more. Errors are
        ignored: the next run in this folder removes them."""
        if self._tracker.completed_steps:
            catalog = CheckpointCatalog(Storage(folder))
            with contextlib.suppress(CheckpointError, TimeoutError):
                async with asyncio.timeout(STALL_S):
                    await self._clock.run_in_thread(self._prune, catalog)

    async def delete_skipped(self, folder: str, step: int) -> None:
        """Delete the shards of the skipped checkpoint of a step and of earlier ones that were not committed: on a full
        disk they may take the space of the next checkpoint. Errors are ignored. Does nothing while an earlier call is
        in progress: a storage that hangs must not occupy more than one thread."""
        if self._deletes_skipped:
            return
        self._deletes_skipped = True
        try:
            with contextlib.suppress(CheckpointError):
                await self._clock.run_in_thread(CheckpointCatalog(Storage(folder)).delete_uncommitted, step)
        finally:
            self._deletes_skipped = False

    async def return_to_verified(self, folder: str | None) -> FoundCheckpoint | None:
        """Step and folder of the newest verified checkpoint; None: there is none. Later ones are deleted."""
        for where in (folder, self._setup.resume_from):
            if where is not None:
                with contextlib.suppress(CheckpointError):
                    return FoundCheckpoint(await self._clock.run_in_thread(_keep_verified, where), where)
        if folder is not None:
            with contextlib.suppress(CheckpointError):
                await self._clock.run_in_thread(CheckpointCatalog(Storage(folder)).delete_after, self._setup.start)
        return None

    async def newest_checkpoint(self, folder: str | None) -> FoundCheckpoint | None:
        """Step and folder of the newest valid checkpoint of this run or of the one it resumed from; None: no such.

        If the run has written a checkpoint and none is found, the storage is unavailable: retry for a while.
        """
        await self._wait_for_commit(_COMMIT_WAIT_S)
        for where in (folder, self._setup.resume_from):
            if where is None:
                continue
            if where == folder and not self._tracker.completed_steps:
                with contextlib.suppress(CheckpointError):
                    return await self._clock.run_in_thread(_read_newest, where)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_READ_RETRY_S):
                    found = await retry_storage(
                        self._clock, partial(_read_newest, where), lambda why, _: self.on_failure("the restart", why)
                    )
                self.on_recovery()
                return found
            self.on_recovery()  # not a fault of the storage: the checkpoints are gone or damaged
        return None


def _read_newest(folder: str) -> FoundCheckpoint:
    """Step and folder of the newest valid checkpoint. Raises CheckpointError if there is none."""
    return FoundCheckpoint(CheckpointCatalog(Storage(folder)).newest().manifest.step, folder)


def _keep_verified(folder: str) -> int:
    """The step of the newest verified checkpoint, after later ones are deleted. Raises CheckpointError if there is
    none."""
    catalog = CheckpointCatalog(Storage(folder))
    step = catalog.newest(only_verified=True).manifest.step
    catalog.delete_after(step)
    return step
