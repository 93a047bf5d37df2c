"""The nursery: one process that has torch and the job imported, and forks a node out of itself in milliseconds.

    launcher ──pipe── nursery ──fork── agent 0 ──fork── worker 0
                              ──fork── agent 1 ──fork── worker 1 ...

It computes nothing and starts no threads, so that forking it is safe. Everything below it is one process group: when
the pipe to the launcher closes, for whatever reason, it ends the group and itself, and nothing is left running.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import msgspec

from culm import errors
from culm.cluster.setup import Request, Setup
from culm.errors import RAISED, CulmError, RunError, said
from culm.job import Job
from culm.providers.stores import Place
from culm.providers.strike import Board

_REAP_S = 0.2
GRACE_S = 30.0
"""What a notice leaves a node, where nobody says how much."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


class JobSource(msgspec.Struct, frozen=True):
    """Where a job comes from: FILE[:function] with replaced fields, or the pickle that `culm.train` made of it."""

    reference: str = ""
    overrides: dict[str, str] = {}
    pickled: bytes = b""
    path: tuple[str, ...] = ()
    """sys.path of the launcher, so that the same modules are found."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Import the job and decide the setup of a run of it."""

    source: JobSource
    request: Request
    identify: bool = False
    """Whether other machines will have to compare themselves with this one."""


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Import a job that others run, and see whether this machine agrees with them."""

    source: JobSource
    identity: dict[str, str]


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Fork a node."""

    node: int
    place: Place
    secret: bytes
    host: str = "127.0.0.1"
    ports: tuple[int, int] | None = None
    neighbours: int = 1
    """Workers on this machine."""
    run: int = 0
    kills: tuple[str, ...] = ()
    """Blows that the nodes of the run strike themselves with."""
    zone: str = ""
    renews: bool = False
    """Whether its worker may be ended and started anew."""
    notice: str = "none"
    """Who tells of a spot notice, beside SIGTERM."""
    grace_s: float = GRACE_S
    """What SIGTERM leaves."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Take a node away: kill it, or with a notice tell its agent. One that is gone already is no error."""

    node: int
    run: int
    notice_s: float = 0.0


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    setup: Setup
    identity: dict[str, str] = {}


class Met(msgspec.Struct, frozen=True, tag="met"):
    """This machine agrees."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Something long is under way."""

    text: str
    done: int
    total: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """What was asked for is wrong, or failed."""

    kind: str
    message: str
    trace: str


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """A node's agent has ended."""

    node: int
    status: int
    run: int = 0


Order: TypeAlias = Load | Meet | Start | Stop
Report: TypeAlias = Loaded | Met | Progress | Refused | Exited
_encode = msgspec.msgpack.Encoder().encode
_orders = msgspec.msgpack.Decoder(Order)
reports = msgspec.msgpack.Decoder(Report)
orders = _encode


class Nursery:
    """The nursery's own side of the pipe."""

    def __init__(self, pipe: Connection, board: Board) -> None:
        self._pipe, self._board = pipe, board
        self._job: Job | None = None
        self._nodes: dict[int, Start] = {}
        """By process id of the agent."""
        self._deadlines: dict[int, float] = {}
        """By process id of the agent: when a notice has run out."""

    def serve(self) -> None:
        """Obey until the launcher is gone."""
        while True:
            self._reap()
            self._enforce()
            try:
                if self._pipe.poll(_REAP_S):
                    self._obey(_orders.decode(self._pipe.recv_bytes()))
            except (EOFError, OSError):
                return

    def _obey(self, order: Order) -> None:
        if isinstance(order, Start):
            self._start(order)
        elif isinstance(order, Stop):
            self._stop(order)
        else:
            self._load(order)

    def _load(self, order: Load | Meet) -> None:
        try:
            job = self._job = _load(order.source)
        except BaseException as error:  # Ctrl-C is not heard here: whatever is raised, code of the user raised it
            self._report(_refusal(error))
            return
        self._aside(lambda: self._prepared(job, order) if isinstance(order, Load) else _met(job, order))

    def _prepared(self, job: Job, order: Load) -> Loaded:
        from culm.cluster.prepare import prepare

        def told(text: str, done: int, total: int) -> None:
            self._report(Progress(text, done, total))

        setup = msgspec.structs.replace(prepare(job, order.request, progress=told), name=order.source.reference)
        return Loaded(setup, _identity(job, order.source) if order.identify else {})

    def _aside(self, made: Callable[[], Report]) -> None:
        """In a child, since trying the layers out may start threads or a GPU, after which forking is unsafe."""

        heard, tell = os.pipe()  # code of the user may end the process with a status of its choice

        def child() -> None:
            try:
                self._report(made())
            except BaseException as error:  # ... or ask to end it, and be heard of all the same
                self._report(_refusal(error))
            os.write(tell, b".")

        _, status = os.waitpid(fork(child), 0)
        os.close(tell)
        with os.fdopen(heard, "rb") as told:
            if not told.read():
                self._report(Refused("RunError", _untimely(os.waitstatus_to_exitcode(status)), ""))

    def _report(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # the launcher is gone: `serve` will notice
            self._pipe.send_bytes(_encode(report))

    def _start(self, order: Start) -> None:
        job = self._job
        assert job is not None

        def child() -> None:
            from culm.providers.node import run_node

            self._pipe.close()
            run_node(job, order, self._board)

        # A notice may come before anybody waits for it, in the first moment of the process, too.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            agent = fork(child)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._nodes[agent] = order
        self._board.enter(order.node, agent)

    def _stop(self, order: Stop) -> None:
        """A node that has ended and was not reaped yet keeps its process id: nobody else is ever struck."""
        for agent, started in self._nodes.items():
            if (started.node, started.run) == (order.node, order.run):
                os.kill(agent, signal.SIGTERM if order.notice_s else signal.SIGKILL)
                self._deadlines[agent] = time.monotonic() + order.notice_s

    def _enforce(self) -> None:
        """Nobody stays for longer than his notice."""
        now = time.monotonic()
        for agent in [agent for agent, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[agent]
            if agent in self._nodes:
                os.kill(agent, signal.SIGKILL)

    def _reap(self) -> None:
        while self._nodes:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._nodes:
                order = self._nodes.pop(pid)
                self._report(Exited(order.node, os.waitstatus_to_exitcode(status), order.run))


def fork(child: Callable[[], None]) -> int:
    """Run a function in a forked process that ends with it, whatever happens; returns the process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        child()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except CulmError as error:  # it says itself what is wrong, as that the store is out of reach
        print(f"culm: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def readable(descriptor: int) -> None:
    """Wait for a pipe or a process descriptor without blocking the loop."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, settle)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


def _load(source: JobSource) -> Job:
    from culm.job import load, override
    from culm.runtime.keys import seed_everything

    sys.path[:] = [*source.path, *(p for p in sys.path if p not in source.path)]
    seed_everything(0)  # layers given as modules get their initial weights here
    if not source.pickled:
        return load(source.reference, source.overrides)
    import cloudpickle

    try:
        job = cloudpickle.loads(source.pickled)
    except RAISED as error:
        raise errors.JobError(
            f"the job can not be taken to another process: {type(error).__name__}{said(error)}; "
            "put it into a file and use culm run"
        ) from error
    assert isinstance(job, Job)
    return override(job, source.overrides)


def _met(job: Job, order: Meet) -> Met:
    from culm.cluster.identity import check_identity

    check_identity(_identity(job, order.source), order.identity)
    return Met()


def _identity(job: Job, source: JobSource) -> dict[str, str]:
    from culm.cluster.identity import identity

    return identity(job, source.reference)


def _untimely(code: int) -> str:
    """Why nothing has come of trying the layers out."""
    if code < 0:
        return f"trying the layers out ended with signal {-code}: is there enough memory for one layer?"
    return f"trying the layers out ended the process with exit code {code}: a layer or the data must not do so"


def _refusal(error: BaseException) -> Refused:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, CulmError):
        return Refused(type(error).__name__, str(error), trace)
    return Refused("RunError", f"{type(error).__name__}{said(error)}", trace)


def refused(report: Refused) -> CulmError:
    """The error behind a refusal, in the launcher."""
    kind: type[CulmError] = getattr(errors, report.kind, RunError)
    error = kind(report.message)
    error.trace = report.trace
    return error


def main(descriptor: int, board: int) -> None:
    """The nursery process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    for stream in (sys.stdout, sys.stderr):  # a line of a node is one write: lines of others do not come between
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # nodes are connected to each other, each to all
    os.environ[NVML_CHECK] = "1"  # looking for a GPU must not start one here
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # that a peer is gone culm says itself, in one line
    with preloading():
        import torch

        torch.set_num_threads(1)
        _preload()
    try:
        Nursery(Connection(descriptor), Board(board)).serve()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def preloading() -> Iterator[None]:
    """Import for many nodes. Imports leave no garbage: to look for it would take a fifth of their time.

    A node shares the pages of this process until it writes to them. What was imported lives for ever, so that no
    collector need look at it; and a cache of methods that is full of what imports have looked up would be replaced
    entry by entry, each on a page that nobody else needs.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()  # its name since Python 3.13


def _preload() -> Any:
    """Import what every node needs, once. The first optimizer of a process imports dynamo: a second of CPU a node."""
    import encodings.idna  # whoever connects by a name or an address needs it

    import numpy.random
    import torch._dynamo
    import torch.utils.flop_counter

    from culm.providers import node
    from culm.transport import gloo

    with torch.autograd.profiler.record_function("culm"):  # as optimizers do; the first one imports a module
        pass
    return encodings, gloo, node, numpy, torch


if __name__ == "__main__":
    # Run as a module this file is __main__; the messages must be those of the importable module.
    importlib.import_module("culm.providers.nursery").main(*map(int, sys.argv[1:]))
