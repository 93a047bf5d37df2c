"""Fork server for programs of culm: they start in milliseconds, forked from a process that has imported torch and culm.

tests ──socket── fork server ──fork── culm run ──fork── fork server of nodes ── nodes ...

A forked program has the arguments, environment, descriptors, session, process group, signals and exit code of a freshly
started one and can be killed like it. Forking cannot show that all imports work: therefore every subcommand that starts
processes also has tests in which it is started freshly.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeAlias

import msgspec

ROOT = Path(__file__).parents[1]
COMMAND = str(Path(sys.executable).with_name("culm"))
PROGRAM_MODULES = (
    "culm",
    "culm.providers.fork_server",
    "culm.providers.supervisor.supervisor_process",
    "culm.gnn.launch.elastic_fork_server",
)
"""Modules that are programs, in addition to those of benchmarks and tests."""
HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
BEFORE_TORCH = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Variables that programs set before they import torch: here torch is imported before them."""


class Program(msgspec.Struct, frozen=True):
    """What to run, and its environment."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    session: bool
    group: int
    """The process group to join; 0: one of its own; -1: that of the parent."""
    descriptors: list[int]
    """The descriptor numbers in the program."""
    network: str = ""
    """The network namespace; empty: the usual one."""


StartedProcess: TypeAlias = tuple[int, socket.socket | None]
"""A process, and a socket that reports its end if it is not our child."""
StartProgram: TypeAlias = Callable[[Program, list[int]], StartedProcess]
"""Starts a program with our descriptors for it."""


class Popen(subprocess.Popen[Any]):
    """Like subprocess.Popen, but programs of culm are forked by `start_program`."""

    start_program: ClassVar[StartProgram | None] = None
    _exit_socket: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        how = _EXECUTE_CHILD_SIGNATURE.bind(self, *given).arguments
        arguments = [os.fspath(word) for word in how["args"]] if not isinstance(how["args"], str) else []
        start, network = type(self).start_program, ""
        if arguments[:3] == ["ip", "netns", "exec"]:
            network, arguments = arguments[3], arguments[4:]
        if start is None or not _is_program(arguments) or (start is _fork_here and _has_threads()):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        own = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
        passed = sorted(how["pass_fds"])
        descriptors = [standard if found == -1 else found for standard, found in enumerate(own)] + passed
        folder = os.fspath(how["cwd"] or Path.cwd())
        environment = dict(os.environ if how["env"] is None else how["env"])
        program = Program(
            arguments, folder, environment, how["start_new_session"], how["process_group"], [0, 1, 2, *passed], network
        )
        self.pid, self._exit_socket = start(program, descriptors)
        self._child_created = True
        self._close_pipe_fds(*(how[name] for name in _PIPES))  # type: ignore[attr-defined]

    def poll(self) -> int | None:
        if self._exit_socket is None:
            return super().poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._exit_socket is None:
            return super().wait(timeout)
        if not select.select([self._exit_socket], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        exit_status = self._exit_socket.recv(64)
        assert exit_status, "the process that programs are forked from has ended"
        self.returncode = int(exit_status)
        self._exit_socket.close()
        self._exit_socket = None
        return self.returncode


_CLONE_NEWNET = 0x40000000
_EXECUTE_CHILD_SIGNATURE = inspect.signature(Popen.__base__._execute_child)  # type: ignore[union-attr]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _is_program(arguments: list[str]) -> bool:
    """Whether this is `culm ...` or `python [-u] -m module ...`; other options of python change the start."""
    words = [word for word in arguments[:4] if word != "-u"]
    if words[:2] == [sys.executable, "-m"]:
        return words[2] in PROGRAM_MODULES or words[2].startswith(("benchmarks.", "tests."))
    return words[:1] == [COMMAND]


@contextlib.contextmanager
def forked_programs(start: StartProgram) -> Iterator[None]:
    """Fork programs of culm that are started in this block."""
    usual, Popen.start_program, subprocess.Popen = subprocess.Popen, start, Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = usual  # type: ignore[misc]


@contextlib.contextmanager
def fresh_programs() -> Iterator[None]:
    """Start programs freshly in this block, also inside `forked_programs`."""
    usual, Popen.start_program = Popen.start_program, None
    try:
        yield
    finally:
        Popen.start_program = usual


@contextlib.contextmanager
def program_fork_server() -> Iterator[StartProgram]:
    """A process that forks programs, shared by all test processes. It ends with the last of them."""
    name = f"\0culm-zygote-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack:
        with Path(__file__).open() as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # the first test process starts it
            try:
                ours.connect(name)
            except ConnectionRefusedError:
                stack.enter_context(_start_server(name))
                ours.connect(name)
        yield _client(stack.enter_context(ours))


def _start_server(name: str) -> subprocess.Popen[bytes]:
    """Start a fork server that accepts connections under a name at once, and serves when its imports are done."""
    path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(name)
        door.listen()
        return subprocess.Popen(
            [sys.executable, "-m", "tests.program_fork_server", str(door.fileno())],
            cwd=ROOT,
            pass_fds=[door.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | BEFORE_TORCH | {"PYTHONPATH": path},
        )


def _client(zygote: socket.socket) -> StartProgram:
    def start(program: Program, descriptors: list[int]) -> StartedProcess:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            socket.send_fds(zygote, [msgspec.msgpack.encode(program)], [its.fileno(), *descriptors])
        return int(mine.recv(64)), mine

    return start


def _serve(door: socket.socket) -> None:
    """Fork programs and report their ends until no client is left."""
    running: dict[int, tuple[int, socket.socket]] = {}
    askers = {(first := door.accept()[0]).fileno(): first}
    while askers:
        ready = select.select([door.fileno(), *askers, *running], [], [])[0]
        for ended in [found for found in ready if found in running]:
            pid, reply_socket = running.pop(ended)
            os.close(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with reply_socket, contextlib.suppress(BrokenPipeError):
                reply_socket.send(str(code).encode())
        for asking in [found for found in ready if found in askers]:
            message, descriptors, *_ = socket.recv_fds(askers[asking], 1 << 20, 64)
            if not message:
                askers.pop(asking).close()
                continue
            reply_socket = socket.socket(fileno=descriptors[0])
            pid = _fork(msgspec.msgpack.decode(message, type=Program), descriptors[1:], reply_socket)
            running[os.pidfd_open(pid)] = pid, reply_socket
            for descriptor in descriptors[1:]:
                os.close(descriptor)
        if door.fileno() in ready:
            another = door.accept()[0]
            askers[another.fileno()] = another


def _fork_here(program: Program, descriptors: list[int]) -> StartedProcess:
    """Fork a program from a program that has itself been forked with all imports."""
    return _fork(program, descriptors), None


def _has_threads() -> bool:
    """Whether threads are running, which makes forking unsafe."""
    return len(list(Path("/proc/self/task").iterdir())) > 1


def _fork(program: Program, descriptors: list[int], asker: socket.socket | None = None) -> int:
    # Return only when the child is set up: the caller may ask for its process group at once.
    ready_reader, ready_writer = os.pipe()
    pid = os.fork()
    if not pid:
        _run_in_child(program, descriptors, ready_writer, asker)
    os.close(ready_writer)
    os.read(ready_reader, 64)
    os.close(ready_reader)
    return pid


def _run_in_child(program: Program, descriptors: list[int], ready_writer: int, asker: socket.socket | None) -> NoReturn:
    """Do what happens between a fork, an exec, and the first line of the program."""
    gc.freeze()  # earlier objects belong to the parent: their descriptors are closed here and the numbers reused
    _reset_signals()
    if program.session:
        os.setsid()
    if program.group >= 0:
        os.setpgid(0, program.group)
    os.chdir(program.folder)
    if program.network:
        _enter_network_namespace(program.network)
    for descriptor in _place_descriptors(
        descriptors, program.descriptors, [ready_writer, *([asker.fileno()] if asker is not None else [])]
    ):
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.path[:] = dict.fromkeys([program.folder, *_paths(), *sys.path])
    _open_streams(raw="-u" in program.arguments[1:2])
    with forked_programs(_fork_here):
        _exit_quickly(_run(program.arguments))


def _paths() -> list[str]:
    return [str(Path(place).absolute()) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]


def _reset_signals() -> None:
    """Reset Python signal handlers, as an exec does."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as python does when it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _enter_network_namespace(network: str) -> None:
    """Enter a network namespace, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", network).open("rb") as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into {network}")


def _place_descriptors(descriptors: list[int], numbers: list[int], others: list[int]) -> list[int]:
    """Move descriptors to the numbers that the program expects and close the rest, except `others`; returns the new
    numbers of those."""
    free = max([*descriptors, *numbers, *others]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, free) for descriptor in [*descriptors, *others]]
    for descriptor, number in zip(moved, numbers, strict=False):
        os.dup2(descriptor, number)
    kept = moved[len(numbers) :]
    first = 0
    for number in [*sorted([*numbers, *kept]), os.sysconf("SC_OPEN_MAX")]:
        if first < number:  # an empty range is all there is, to closerange
            os.closerange(first, number)
        first = number + 1
    return kept


def _open_streams(*, raw: bool) -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name in [(1, "stdout"), (2, "stderr")]:
        binary = open(number, "wb", 0 if raw else -1, closefd=False)  # noqa: SIM115
        lines, errors = number == 2 or os.isatty(number), "strict" if number == 1 else "backslashreplace"
        stream = io.TextIOWrapper(binary, "utf-8", errors, line_buffering=lines, write_through=raw)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(arguments: list[str]) -> int:
    """Run the program; returns its exit code."""
    try:
        if arguments[0] == COMMAND:
            sys.argv[:] = arguments
            runpy.run_path(COMMAND, run_name="__main__")
        else:
            module = arguments.index("-m") + 1
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # of runpy: it is meant
            sys.argv[:] = arguments[module:]
            runpy.run_module(arguments[module], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _exit_quickly(code: int) -> NoReturn:
    """Exit as python does, but without tearing down all modules, which would take as long as a test."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _preload() -> None:
    fork_server = importlib.import_module("culm.providers.fork_server")
    with fork_server.gc_frozen_imports():
        for module in (
            "culm.gnn.server.server_process",
            "culm.gnn.worker.elastic_worker",
            "culm.gnn.gnn_run",
            "culm.cluster.prepare_run",
        ):
            importlib.import_module(module)
        importlib.import_module("culm.providers.store_view")  # of pages; culm.gnn.gnn_run has the rest of them
        for _ in importlib.import_module("culm.cli").root_click_command().commands.values():
            pass  # imports the module of the command
        fork_server.preload_modules()
        importlib.import_module("benchmarks.pipeline.torch_rank")
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Half of the time of each fork went into copying and freeing page tables of 57,000 small pages. Kernels older than
    6.1 refuse this, and the pages stay small."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with Path("/proc/self/maps").open() as maps:
        fields = [line.split() for line in maps]
    for place, rights, *_ in (found for found in fields if len(found) == 5 or found[-1] == "[heap]"):
        first, end = (int(address, 16) for address in place.split("-"))
        first, end = -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if rights == "rw-p" and first < end:
            madvise(first, end - first, MADV_COLLAPSE)


def main(descriptor: int) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it silently
    _preload()
    _serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    # Run as a module this file is __main__; programs of programs need the importable one.
    importlib.import_module("tests.program_fork_server").main(int(sys.argv[1]))
