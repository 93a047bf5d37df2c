"""Loader processes: load micro-batches of a worker in advance, beside its computation (Job.loaders).

A loader is forked from the worker and runs the same code with the same seeds, so that a micro-batch has the same bits
wherever it is loaded. It has no other open files than its pipe, and ends with the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from culm.errors import CulmError, LayerFailed
from culm.runtime.compute.rng import sample_indices

if TYPE_CHECKING:
    from collections.abc import Callable

    from culm.job import Job

_PR_SET_PDEATHSIG = 1
StepMicro: TypeAlias = tuple[int, int]
"""Step and number of a micro-batch."""


class LoaderPool:
    """Processes that load micro-batches in the order in which they are requested, each micro-batch in one of them.

    Used by one thread at a time, except for `kill`. Call `close`; processes of a pool that is not closed end with this
    process.
    """

    def __init__(self, job: Job, load: Callable[[int, int], Any]) -> None:
        """`load`: (step, micro-batch) -> a micro-batch on the CPU."""
        self._job, self._load = job, load
        self._loaders: list[_Loader] = []
        self._requested: dict[StepMicro, _Loader] = {}
        self._loaded: dict[StepMicro, Any] = {}

    def request(self, wanted: Iterable[StepMicro]) -> None:
        """Load these micro-batches in advance, unless that is under way. Others that were requested are dropped."""
        micro_batches = list(wanted)
        for stale in self._loaded.keys() - set(micro_batches):
            del self._loaded[stale]
        for each in micro_batches:
            self.add(*each)

    def add(self, step: int, micro: int) -> None:
        """Load one more micro-batch, unless that is under way or done."""
        if self.has(step, micro):
            return
        if not self._loaders:
            self._loaders = [_Loader(self._load) for _ in range(self._job.loaders)]
        loader = min(self._loaders, key=lambda one: one.waiting)
        self._requested[step, micro] = loader
        loader.request((step, micro))

    def take(self, step: int, micro: int) -> Any:
        """A micro-batch that was requested. Raises LayerFailed as `wait` does, and what loading it raised."""
        self.wait(step, micro)
        result = self._loaded.pop((step, micro))
        if isinstance(result, CulmError):
            raise result
        return result

    def wait(self, step: int, micro: int) -> None:
        """Wait until a requested micro-batch is loaded. Raises LayerFailed, which names its items, if a loader dies, or
        does not deliver it within Job.loader_timeout."""
        wanted = step, micro
        deadline = time.monotonic() + self._job.loader_timeout
        while wanted not in self._loaded:
            loader = self._requested[wanted]
            self._receive(loader, wanted, deadline)

    def is_loaded(self, step: int, micro: int) -> bool:
        """Whether a micro-batch can be taken without waiting. Receives what has arrived."""
        while (loader := self._requested.get((step, micro))) is not None and loader.has_result:
            self._receive(loader, (step, micro), time.monotonic())
        return (step, micro) in self._loaded

    def has(self, step: int, micro: int) -> bool:
        """Whether a micro-batch was requested and not taken."""
        return (step, micro) in self._requested or (step, micro) in self._loaded

    def _receive(self, loader: _Loader, wanted: StepMicro, deadline: float) -> None:
        """Receive the next micro-batch of a loader, which may be another one than the one that is waited for."""
        current = loader.oldest
        try:
            result = loader.receive(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self.close()
            raise LayerFailed(
                f"a loader did not deliver {self._items(current)} within {self._job.loader_timeout:g} s: fix Job.data, "
                "or raise Job.loader_timeout"
            ) from None
        except EOFError:
            self.close()
            raise LayerFailed(
                f"a loader process {loader.exit_description()} while it loaded {self._items(current)}: check Job.data "
                "and the memory, or set loaders=0"
            ) from None
        self._requested.pop(current, None)
        self._loaded[current] = result
        if current != wanted and current[0] < wanted[0] - 1:
            del self._loaded[current]  # of a step that is over

    def _items(self, micro_batch: StepMicro) -> str:
        return f"item {sample_indices(self._job, *micro_batch)} of Job.data"

    def kill(self) -> None:
        """Kill the processes, so that a `wait` in another thread raises. `close` has to follow."""
        for loader in list(self._loaders):
            loader.kill()

    def close(self) -> None:
        """End the processes. Not while another thread waits."""
        for loader in self._loaders:
            loader.close()
        self._loaders, self._requested, self._loaded = [], {}, {}

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class _Loader:
    """One process, and the micro-batches that it has to load, in order."""

    def __init__(self, load: Callable[[int, int], Any]) -> None:
        self._pipe, other_end = Pipe()
        self._queue: list[StepMicro] = []
        self._status: int | None = None
        worker = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _serve(other_end, load, worker)
        other_end.close()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def oldest(self) -> StepMicro:
        return self._queue[0]

    @property
    def has_result(self) -> bool:
        """Whether a micro-batch has arrived, or the process has ended."""
        return self._pipe.poll(0)

    def request(self, micro_batch: StepMicro) -> None:
        self._queue.append(micro_batch)
        with contextlib.suppress(BrokenPipeError):  # receive raises for a process that has ended
            self._pipe.send(micro_batch)

    def receive(self, timeout_s: float) -> Any:
        """The oldest requested micro-batch. Raises TimeoutError, or EOFError if the process has ended."""
        try:
            if not self._pipe.poll(timeout_s):
                raise TimeoutError
            data = self._pipe.recv_bytes()
        except (ConnectionError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise EOFError from error
        del self._queue[0]
        return pickle.loads(data)

    def exit_description(self) -> str:
        self._wait()
        assert self._status is not None
        if os.WIFSIGNALED(self._status):
            return f"was killed by {signal.Signals(os.WTERMSIG(self._status)).name}"
        return f"ended with status {os.waitstatus_to_exitcode(self._status)}"

    def kill(self) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        if self._status is None:
            self.kill()
            self._wait()
        self._pipe.close()

    def _wait(self) -> None:
        if self._status is None:
            try:
                self._status = os.waitpid(self._pid, 0)[1]
            except ChildProcessError:  # something else has waited for it
                self._status = 0


def _serve(pipe: Connection, load: Callable[[int, int], Any], worker: int) -> None:
    """The process of a loader: load what is asked for until the pipe is closed. Does not return."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != worker:  # it ended before the request
            return
        _close_other_files(pipe.fileno())
        torch.set_num_threads(1)
        while True:
            step, micro = pipe.recv()
            try:
                result = load(step, micro)
            except CulmError as error:
                result = error
            pipe.send_bytes(pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL))
    except EOFError:
        pass
    finally:
        os._exit(0)


def _close_other_files(kept: int) -> None:
    """Close the sockets of the worker: other nodes notice its end by them."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 the names are numbers
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
