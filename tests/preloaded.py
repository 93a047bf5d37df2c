"""Programs of culm that start in milliseconds: forked out of a process that has torch and culm imported.

    tests ──socket── zygote ──fork── culm run ──fork── nursery ── nodes ...

They have the arguments, the environment, the descriptors, the session, the signals and the exit code of programs that
are started anew, and can be killed like those. Only that everything can be imported is not seen here: therefore every
verb that starts processes keeps tests in which it is started anew.
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
OURS = ("culm", "culm.providers.nursery", "culm.gnn.launch.nursery")
"""Modules that are programs, beside those of benchmarks and tests."""
HUGE = 2 << 20
MADV_COLLAPSE = 25
BEFORE_TORCH = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""What programs set before they import torch: here it is imported before them."""


class Program(msgspec.Struct, frozen=True):
    """What to run, and what it finds there."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    session: bool
    descriptors: list[int]
    """Their numbers in the program."""
    network: str = ""
    """The network namespace, where it is not the usual one."""


Started: TypeAlias = tuple[int, socket.socket | None]
"""A process, and who tells of its end where it is no child of ours."""
Start: TypeAlias = Callable[[Program, list[int]], Started]
"""With our descriptors for it."""


class Popen(subprocess.Popen[Any]):
    """As that of subprocess, but programs of culm are forked by `start`."""

    start: ClassVar[Start | None] = None
    _ends: socket.socket | None = None

    def _execute_child(self, *given: Any) -> None:
        how = _ASKED.bind(self, *given).arguments
        arguments = [os.fspath(word) for word in how["args"]] if not isinstance(how["args"], str) else []
        start, network = type(self).start, ""
        if arguments[:3] == ["ip", "netns", "exec"]:
            network, arguments = arguments[3], arguments[4:]
        if start is None or not _is_ours(arguments) or (start is _fork_here and _has_threads()):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        own = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
        passed = sorted(how["pass_fds"])
        descriptors = [standard if found == -1 else found for standard, found in enumerate(own)] + passed
        folder = os.fspath(how["cwd"] or Path.cwd())
        environment = dict(os.environ if how["env"] is None else how["env"])
        program = Program(arguments, folder, environment, how["start_new_session"], [0, 1, 2, *passed], network)
        self.pid, self._ends = start(program, descriptors)
        self._child_created = True
        self._close_pipe_fds(*(how[name] for name in _PIPES))  # type: ignore[attr-defined]

    def poll(self) -> int | None:
        if self._ends is None:
            return super().poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._ends is None:
            return super().wait(timeout)
        if not select.select([self._ends], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        told = self._ends.recv(64)
        assert told, "the process that programs are forked from has ended"
        self.returncode = int(told)
        self._ends.close()
        self._ends = None
        return self.returncode


_CLONE_NEWNET = 0x40000000
_ASKED = inspect.signature(Popen.__base__._execute_child)  # type: ignore[union-attr]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _is_ours(arguments: list[str]) -> bool:
    """`culm ...` or `python [-u] -m module ...`; other options of python change what a start is."""
    words = [word for word in arguments[:4] if word != "-u"]
    if words[:2] == [sys.executable, "-m"]:
        return words[2] in OURS or words[2].startswith(("benchmarks.", "tests."))
    return words[:1] == [COMMAND]


@contextlib.contextmanager
def forking(start: Start) -> Iterator[None]:
    """Whoever starts a program of culm gets it forked."""
    usual, Popen.start, subprocess.Popen = subprocess.Popen, start, Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = usual  # type: ignore[misc]


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Whoever starts a program gets it started anew, where others are forked, too."""
    usual, Popen.start = Popen.start, None
    try:
        yield
    finally:
        Popen.start = usual


@contextlib.contextmanager
def zygote() -> Iterator[Start]:
    """A process that forks programs: one for all that run tests together. It ends with the last of them."""
    name = f"\0culm-zygote-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack:
        with Path(__file__).open() as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # the first to come starts it
            try:
                ours.connect(name)
            except ConnectionRefusedError:
                stack.enter_context(_started(name))
                ours.connect(name)
        yield _asking(stack.enter_context(ours))


def _started(name: str) -> subprocess.Popen[bytes]:
    """A zygote that can be reached under a name from now on, and listens when it has imported everything."""
    path = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(name)
        door.listen()
        return subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", str(door.fileno())],
            cwd=ROOT,
            pass_fds=[door.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | BEFORE_TORCH | {"PYTHONPATH": path},
        )


def _asking(zygote: socket.socket) -> Start:
    def start(program: Program, descriptors: list[int]) -> Started:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            socket.send_fds(zygote, [msgspec.msgpack.encode(program)], [its.fileno(), *descriptors])
        return int(mine.recv(64)), mine

    return start


def _serve(door: socket.socket) -> None:
    """Fork programs, and tell of their ends, until nobody is left who could ask."""
    running: dict[int, tuple[int, socket.socket]] = {}
    askers = {(first := door.accept()[0]).fileno(): first}
    while askers:
        ready = select.select([door.fileno(), *askers, *running], [], [])[0]
        for ended in [found for found in ready if found in running]:
            pid, told = running.pop(ended)
            os.close(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with told, contextlib.suppress(BrokenPipeError):
                told.send(str(code).encode())
        for asking in [found for found in ready if found in askers]:
            message, descriptors, *_ = socket.recv_fds(askers[asking], 1 << 20, 64)
            if not message:
                askers.pop(asking).close()
                continue
            told = socket.socket(fileno=descriptors[0])
            pid = _fork(msgspec.msgpack.decode(message, type=Program), descriptors[1:], told)
            running[os.pidfd_open(pid)] = pid, told
            for descriptor in descriptors[1:]:
                os.close(descriptor)
        if door.fileno() in ready:
            another = door.accept()[0]
            askers[another.fileno()] = another


def _fork_here(program: Program, descriptors: list[int]) -> Started:
    """A program out of a program that has everything imported itself."""
    return _fork(program, descriptors), None


def _has_threads() -> bool:
    """After which forking is unsafe."""
    return len(list(Path("/proc/self/task").iterdir())) > 1


def _fork(program: Program, descriptors: list[int], asker: socket.socket | None = None) -> int:
    told, tell = os.pipe()  # nobody knows it before it is what it should be: it may be asked for its group at once
    pid = os.fork()
    if not pid:
        _become(program, descriptors, tell, asker)
    os.close(tell)
    os.read(told, 64)
    os.close(told)
    return pid


def _become(program: Program, descriptors: list[int], tell: int, asker: socket.socket | None) -> NoReturn:
    """What happens between a fork, an exec, and the first line of the program."""
    gc.freeze()  # what was there before belongs to others: its descriptors are closed, and their numbers taken
    _forget_signals()
    if program.session:
        os.setsid()
    os.chdir(program.folder)
    if program.network:
        _enter(program.network)
    for heard in _place(descriptors, program.descriptors, [tell, *([asker.fileno()] if asker is not None else [])]):
        os.write(heard, str(os.getpid()).encode())
        os.close(heard)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.path[:] = dict.fromkeys([program.folder, *_paths(), *sys.path])
    _open_streams(raw="-u" in program.arguments[1:2])
    with forking(_fork_here):
        _end(_run(program.arguments))


def _paths() -> list[str]:
    return [str(Path(place).absolute()) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]


def _forget_signals() -> None:
    """Handlers of python do not outlive an exec."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as python does when it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _enter(network: str) -> None:
    """As `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", network).open("rb") as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"no way into {network}")


def _place(descriptors: list[int], numbers: list[int], others: list[int]) -> list[int]:
    """Put descriptors where the program expects them and close the rest, but for others: where those are then."""
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
    """The exit code."""
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


def _end(code: int) -> NoReturn:
    """As python ends, but for taking all modules apart, which would take as long as a test."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _preload() -> None:
    nursery = importlib.import_module("culm.providers.nursery")
    with nursery.preloading():
        for module in ("culm.gnn.host", "culm.gnn.worker", "culm.gnn.running", "culm.cluster.prepare"):
            importlib.import_module(module)
        importlib.import_module("culm.providers.heard")  # of pages; culm.gnn.running has the rest of them
        importlib.import_module("culm.cli").command()
        nursery._preload()
        importlib.import_module("benchmarks.rank")
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Of each fork half of the time went into copying, and taking down, tables of 57,000 small pages. Where the kernel
    is older than 6.1 it refuses, and small they stay."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with Path("/proc/self/maps").open() as maps:
        fields = [line.split() for line in maps]
    for place, rights, *_ in (found for found in fields if len(found) == 5 or found[-1] == "[heap]"):
        first, end = (int(address, 16) for address in place.split("-"))
        first, end = -(-first // HUGE) * HUGE, end // HUGE * HUGE
        if rights == "rw-p" and first < end:
            madvise(first, end - first, MADV_COLLAPSE)


def main(descriptor: int) -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    _preload()
    _serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    # Run as a module this file is __main__; programs of programs need the importable one.
    importlib.import_module("tests.preloaded").main(int(sys.argv[1]))
