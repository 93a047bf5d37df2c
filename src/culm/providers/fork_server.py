"""Fork server: a process that has imported torch and the job, and forks a node in milliseconds.

    supervisor ──pipe── fork server ──fork── agent 0 ──fork── its workers
                                ──fork── agent 1 ──fork── its workers ...

It computes nothing and starts no threads, so that forking is safe. It and all its children are one process group. When
the pipe to the supervisor closes, it kills the group and itself, so that nothing is left running.
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
from culm.cluster.run_setup import RunSetup, StepGate
from culm.config import RunConfig
from culm.errors import USER_EXCEPTIONS, CulmError, RunError, message_suffix
from culm.job import Job, absolute_reference
from culm.market.rental_cost import RentalTerms
from culm.providers.kill_injection import ProcessTable
from culm.providers.process_title import set_process_title
from culm.providers.run_store import StoreLocation
from culm.transport.frames.encryption_policy import EncryptionPolicy

_REAP_S = 0.2
GRACE_S = 30.0
"""Seconds that a node has to hand over after SIGTERM, unless configured otherwise."""
NVML_CHECK_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"


class JobSource(msgspec.Struct, frozen=True):
    """Where a job comes from: FILE[:function] with replaced fields, or a pickled Job from `culm.train`."""

    reference: str = ""
    overrides: dict[str, str] = {}
    pickled: bytes = b""
    path: tuple[str, ...] = ()
    """sys.path of the launcher, so that the fork server finds the same modules."""


class LoadJob(msgspec.Struct, frozen=True, tag="load"):
    """Import the job and prepare a run of it."""

    source: JobSource
    config: RunConfig
    identify: bool = False
    """Whether to return the identity of the job, with which other machines compare theirs."""
    gate: StepGate | None = None
    """What a step waits for; None: the job's on_step hook, if it has one."""


class CheckJob(msgspec.Struct, frozen=True, tag="check_job"):
    """Import a job that other machines run, and compare its identity with theirs."""

    source: JobSource
    identity: dict[str, str]


class StartNode(msgspec.Struct, frozen=True, tag="start"):
    """Fork a node."""

    node: int
    store: StoreLocation
    secret: bytes
    host: str = "127.0.0.1"
    ports: tuple[int, int] | None = None
    workers_on_host: int = 1
    """Number of workers on this machine."""
    workers_per_node: int = 1
    run: int = 0
    title: str = ""
    """The name of the job in process titles; empty: as in the store."""
    kills: tuple[str, ...] = ()
    """Kills that the nodes of the run inject themselves."""
    zone: str = ""
    restarts_workers: bool = False
    """Whether its worker processes may be ended and replaced by new ones."""
    runs_hooks: bool = False
    """Whether the node needs a process for the job's hook or for writers, in case it becomes the leader."""
    notice: str = "none"
    """Source of preemption notices, in addition to SIGTERM: aws, gcp, azure or none."""
    grace_s: float = GRACE_S
    """Seconds to hand over after SIGTERM."""
    rental: RentalTerms | None = None
    """What the node costs."""
    encrypt: EncryptionPolicy = "auto"
    """Whether connections to other nodes are encrypted."""


class StopNode(msgspec.Struct, frozen=True, tag="stop"):
    """Stop a node: with SIGKILL, or with SIGTERM and SIGKILL after `notice_s`. A node that has ended is no error."""

    node: int
    run: int
    notice_s: float = 0.0


class JobLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The job was imported and the run prepared."""

    setup: RunSetup
    identity: dict[str, str] = {}
    gpus: int = 0
    """How many workers can have a GPU of this machine of their own."""
    may_use_gpus: bool = False
    """Whether workers on a machine with several GPUs use one each."""


class JobMatches(msgspec.Struct, frozen=True, tag="job_matches"):
    """The job on this machine equals the job of the run."""

    gpus: int = 0
    """How many workers can have a GPU of this machine of their own."""


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Progress of a long preparation."""

    text: str
    done: int
    total: int


class LoadFailed(msgspec.Struct, frozen=True, tag="refused"):
    """The job could not be imported, or the run could not be prepared: an error by class name and message."""

    kind: str
    message: str
    trace: str


class AgentExited(msgspec.Struct, frozen=True, tag="exited"):
    """The agent process of a node has ended."""

    node: int
    status: int
    run: int = 0


ForkServerCommand: TypeAlias = LoadJob | CheckJob | StartNode | StopNode
ForkServerReply: TypeAlias = JobLoaded | JobMatches | LoadProgress | LoadFailed | AgentExited
_encode_message = msgspec.msgpack.Encoder().encode
_command_decoder = msgspec.msgpack.Decoder(ForkServerCommand)
reply_decoder = msgspec.msgpack.Decoder(ForkServerReply)
encode_command = _encode_message


class ForkServer:
    """The fork server process: handles commands of the supervisor."""

    def __init__(self, pipe: Connection, process_table: ProcessTable) -> None:
        self._pipe, self._process_table = pipe, process_table
        self._job: Job | None = None
        self._nodes: dict[int, StartNode] = {}
        """Start commands by process id of the agent."""
        self._deadlines: dict[int, float] = {}
        """Times at which a node is killed after a notice, by process id of the agent."""

    def serve(self) -> None:
        """Handle commands until the supervisor closes the pipe."""
        while True:
            self._reap()
            self._kill_overdue()
            try:
                if self._pipe.poll(_REAP_S):
                    self._handle_command(_command_decoder.decode(self._pipe.recv_bytes()))
            except (EOFError, OSError):
                return

    def _handle_command(self, command: ForkServerCommand) -> None:
        if isinstance(command, StartNode):
            self._start(command)
        elif isinstance(command, StopNode):
            self._stop(command)
        else:
            self._load(command)

    def _load(self, command: LoadJob | CheckJob) -> None:
        try:
            job = self._job = load_job_source(command.source)
        except BaseException as error:  # SIGINT is ignored here: the exception comes from user code
            self._send_reply(_load_failure(error))
            return
        self._reply_from_child(
            lambda: self._prepare_setup(job, command) if isinstance(command, LoadJob) else _check_job(job, command)
        )

    def _prepare_setup(self, job: Job, command: LoadJob) -> JobLoaded:
        from culm.cluster.prepare_run import prepare_run
        from culm.runtime.compute.device import gpus_for_workers

        def progress(text: str, done: int, total: int) -> None:
            self._send_reply(LoadProgress(text, done, total))

        prepared = prepare_run(job, command.config, gate=command.gate, progress=progress)
        source = command.source
        setup = msgspec.structs.replace(
            prepared, name=source.reference, job_file=absolute_reference(source.reference), overrides=source.overrides
        )
        return JobLoaded(
            setup,
            _identity(job, command.source) if command.identify else {},
            gpus=gpus_for_workers(job),
            may_use_gpus=job.device in ("auto", "cuda"),
        )

    def _reply_from_child(self, make_reply: Callable[[], ForkServerReply]) -> None:
        """Make the reply in a child: running the layers may start threads or initialise a GPU, after which forking is
        unsafe. User code may end the child, so a pipe says whether it sent a reply."""
        read_end, write_end = os.pipe()

        def child() -> None:
            try:
                self._send_reply(make_reply())
            except BaseException as error:  # also SystemExit, which user code may raise
                self._send_reply(_load_failure(error))
            os.write(write_end, b".")

        _, status = os.waitpid(fork(child), 0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            if not pipe.read():
                self._send_reply(LoadFailed("RunError", _child_exit_message(os.waitstatus_to_exitcode(status)), ""))

    def _send_reply(self, reply: ForkServerReply) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone: `serve` will notice
            self._pipe.send_bytes(_encode_message(reply))

    def _start(self, command: StartNode) -> None:
        job = self._job
        assert job is not None

        def child() -> None:
            from culm.providers.node_process import run_node

            self._pipe.close()
            run_node(job, command, self._process_table)

        # Blocked in the child from its first instruction on, until the agent waits for SIGTERM as a notice.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            agent = fork(child)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        self._nodes[agent] = command
        self._process_table.add_node(command.node, agent)

    def _stop(self, command: StopNode) -> None:
        """Signal the agent. A child that was not reaped keeps its process id, so no other process can be hit."""
        for agent, started in self._nodes.items():
            if (started.node, started.run) == (command.node, command.run):
                os.kill(agent, signal.SIGTERM if command.notice_s else signal.SIGKILL)
                self._deadlines[agent] = time.monotonic() + command.notice_s

    def _kill_overdue(self) -> None:
        """Kill nodes whose notice has expired."""
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
                self._send_reply(AgentExited(order.node, os.waitstatus_to_exitcode(status), order.run))


def fork(child: Callable[[], None]) -> int:
    """Run a function in a forked process that exits when the function returns or raises. Returns the process id."""
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
    except CulmError as error:  # an expected error such as an unreachable store: the message suffices
        print(f"culm: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


async def wait_readable(descriptor: int) -> None:
    """Wait until a pipe or process descriptor is readable, without blocking the event loop."""
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


def load_job_source(source: JobSource) -> Job:
    """Import or unpickle the job as every process of a run does. Raises JobError if that fails."""
    from culm.job import load_job, override_fields
    from culm.runtime.compute.rng import seed_everything

    sys.path[:] = [*source.path, *(p for p in sys.path if p not in source.path)]
    seed_everything(0)  # initial weights of layers that are modules are drawn during the import
    if not source.pickled:
        return load_job(source.reference, source.overrides)
    import cloudpickle

    try:
        job = cloudpickle.loads(source.pickled)
    except USER_EXCEPTIONS as error:
        raise errors.JobError(
            f"the job cannot be sent to another process: {type(error).__name__}{message_suffix(error)}; "
            "put it into a file and use culm run"
        ) from error
    assert isinstance(job, Job)
    return override_fields(job, source.overrides)


def _check_job(job: Job, order: CheckJob) -> JobMatches:
    from culm.cluster.job_identity import check_identity
    from culm.runtime.compute.device import gpus_for_workers

    check_identity(_identity(job, order.source), order.identity)
    return JobMatches(gpus_for_workers(job))


def _identity(job: Job, source: JobSource) -> dict[str, str]:
    from culm.cluster.job_identity import job_identity

    return job_identity(job, source.reference)


def _child_exit_message(code: int) -> str:
    """The message for a child that ended without a reply."""
    if code < 0:
        return f"running the layers once ended with signal {-code}: is there enough memory for one layer?"
    return f"running the layers once ended the process with exit code {code}: a layer or the data set must not exit"


def _load_failure(error: BaseException) -> LoadFailed:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, CulmError):
        return LoadFailed(type(error).__name__, str(error), trace)
    return LoadFailed("RunError", f"{type(error).__name__}{message_suffix(error)}", trace)


def to_exception(failure: LoadFailed) -> CulmError:
    """The error of a failed load, to be raised in the launcher."""
    kind: type[CulmError] = getattr(errors, failure.kind, RunError)
    error = kind(failure.message)
    error.trace = failure.trace
    return error


def main(descriptor: int, table_descriptor: int) -> None:
    """The fork server process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    set_process_title("fork server")
    for stream in (sys.stdout, sys.stderr):  # one write per line, so that lines of different nodes are not mixed
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every node is connected to every other node
    os.environ[NVML_CHECK_VARIABLE] = "1"  # detect GPUs without initialising CUDA
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # culm reports lost peers itself
    with gc_frozen_imports():
        import torch

        torch.set_num_threads(1)
        preload_modules()
    try:
        ForkServer(Connection(descriptor), ProcessTable(table_descriptor)).serve()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def gc_frozen_imports() -> Iterator[None]:
    """Import without garbage collection, then freeze what was imported.

    Imports leave no garbage, and collecting takes a fifth of their time. A node shares the memory pages of this process
    until it writes to them: frozen objects are not touched by the collector, and clearing the method cache avoids that
    every node replaces it entry by entry.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()  # its name since Python 3.13


def preload_modules() -> Any:
    """Import what every node needs. The first optimizer of a process imports dynamo, which takes a second of CPU."""
    import encodings.idna  # needed for the first connection

    import numpy.random
    import torch._dynamo
    import torch.utils.flop_counter

    from culm.providers import node_process
    from culm.transport.collectives import gloo

    with torch.autograd.profiler.record_function("culm"):  # as optimizers do; the first call imports a module
        pass
    return encodings, gloo, node_process, numpy, torch


if __name__ == "__main__":
    # Run as a module this file is __main__; the messages must be those of the importable module.
    importlib.import_module("culm.providers.fork_server").main(*map(int, sys.argv[1:]))
