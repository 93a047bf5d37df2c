"""`culm.train` and `culm.start`: run a job from Python. `culm.join`: provide a node of this machine to a run."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack

from culm.cluster.agent.preemption_notice import NOTICE_SOURCES, announced_s
from culm.cluster.store.encrypted_store import connection_secret
from culm.config import JoinOptions, RunConfig, RunOptions, merge_options
from culm.errors import RunError, UsageError, message_suffix
from culm.job import JOB_MODULE_PREFIX, Job, call_job_function, override_texts, replace_fields
from culm.machines.job_discovery import find_job
from culm.machines.store_watchdog import StoredRunSigns, wait_until_abandoned
from culm.market.rental_cost import rental_terms
from culm.providers.advertised_address import check_free_ports
from culm.providers.execute_run import HookAnswer, RunObserver, call_step_hook, execute_run, find_resources
from culm.providers.fork_server import GRACE_S, JobSource, StartNode
from culm.providers.graceful_stop import GracefulStop, interrupted_message
from culm.providers.join_run import RunParticipant
from culm.providers.local_provider import ForkServerClient, run_numbers
from culm.providers.run_store import StoreLocation
from culm.providers.shared_run import find_shared_run
from culm.providers.supervisor.run_registry import registry_name
from culm.providers.supervisor.run_window import END_TIMEOUT_S, RunStopped, SupervisorClient
from culm.providers.supervisor.window_messages import StartRun
from culm.runtime.clock import RealClock
from culm.summary import Summary

if TYPE_CHECKING:
    from culm.cluster.run_setup import RunSetup
    from culm.job import StepHook
    from culm.observe.step_metrics import StepMetrics
    from culm.providers.execute_run import RunResources

T = TypeVar("T")
_log = logging.getLogger("culm")


def train(
    job: Job | Callable[[], Job] | str,
    config: RunConfig | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    fork_server: ForkServerClient | None = None,
    progress: bool | None = None,
    **options: Unpack[RunOptions],
) -> Summary:
    """Train a job, wait for its end and return its summary.

    `job`: a Job, a function that returns one, or "FILE:function". `config` and the keyword arguments, which are fields
    of RunConfig, say how the job is run; keyword arguments override the config. A run that other machines join
    (`etcd=`) needs a job in a file, given as "FILE:function", because the machines import it. `overrides` replaces
    fields of the job, as `culm run --set` does: `overrides={"steps": 20}`.

    The first Ctrl-C ends the run at the next step boundary, with a checkpoint if the run has a folder, and raises
    KeyboardInterrupt. The second Ctrl-C ends the run at once. Both require that `train` is called in the main thread,
    without a running event loop and without a SIGINT handler of your own; otherwise the first Ctrl-C ends the run at
    once.

    `Job.on_step` is called in this process; the hooks for events are called in the process of the leader. `progress`:
    True shows the run on stderr as `culm run` does, False logs it to the logger "culm", None shows it if stderr is a
    terminal. `fork_server`: use this one and leave it open.

    Raises UsageError if the job or the config is wrong, before anything is started, and RunError if the run fails. No
    process is left running in either case.
    """
    resources, source, on_step = _prepare(job, config, overrides or {}, options)
    observer = make_observer(progress)
    try:
        if fork_server is not None:
            fields = _train_in_process(fork_server, source, resources, observer, on_step)
        else:
            name = _run_name(resources, source)
            start_run = StartRun(source, resources.config, name, calls_hook=on_step is not None)
            fields = execute_supervised(start_run, observer, on_step)
    finally:
        observer.close()
    return Summary.from_fields(fields, resources.config.out)


def start(
    job: Job | Callable[[], Job] | str,
    config: RunConfig | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    **options: Unpack[RunOptions],
) -> str:
    """Start a run that continues when this process has ended, as `culm run --detach` does. Returns its name, which
    `culm attach`, `culm logs` and `culm stop` take.

    The arguments are those of `train`. Returns when the job was checked and the nodes are about to start. `Job.on_step`
    is called on a node. Raises UsageError if the job or the config is wrong, and RunError if the run cannot start.
    """
    resources, source, _ = _prepare(job, config, overrides or {}, options, keep_hook=True)
    start_run = StartRun(source, resources.config, _run_name(resources, source), detached=True)
    none = subprocess.DEVNULL  # the streams of this process may be closed while the run continues
    with SupervisorClient(stdout=none, stderr=none, captures_output=True) as supervisor:
        return run_blocking(supervisor.start_detached(start_run, _LogObserver()))


def _prepare(
    job: Job | Callable[[], Job] | str,
    config: RunConfig | None,
    overrides: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    keep_hook: bool = False,
) -> tuple[RunResources, JobSource, StepHook | None]:
    """Check the arguments of `train`: what the run uses, where its processes find the job, and its on_step hook."""
    merged = merge_options(config, options, stacklevel=4)
    described = call_job_function(job) if isinstance(job, str) else job() if callable(job) else job
    if not isinstance(described, Job):
        raise UsageError(f"job is of type {type(described).__name__}: pass a culm.Job or a function that returns one")
    if merged.is_shared and not isinstance(job, str):
        raise UsageError(
            "other machines cannot import this job: put it into a file and pass its name, as in "
            "culm.train('my_job.py:job', etcd=...)"
        )
    texts = override_texts(overrides) if isinstance(job, str) else {}
    described = replace_fields(described, overrides)
    resources = find_resources(merged, job if isinstance(job, str) else "")
    if isinstance(job, str):
        source = JobSource(reference=job, overrides=texts, path=tuple(sys.path))
    else:
        source = pickle_job(described, keep_hook=keep_hook)
    return resources, source, described.on_step


def _run_name(resources: RunResources, source: JobSource) -> str:
    return registry_name(resources.config.job_name, source.reference)


def execute_supervised(
    start_run: StartRun, observer: ShownObserver, on_step: StepHook | None, *, end_timeout_s: float = END_TIMEOUT_S
) -> dict[str, Any]:
    """Execute a run in a supervisor process, call the hook in this one, and return the fields of summary.json."""
    raises_on_ctrl_c = _ctrl_c_raises()
    with SupervisorClient(end_timeout_s=end_timeout_s) as supervisor:

        async def main() -> dict[str, Any]:
            with _end_gracefully_on_ctrl_c(supervisor.interrupt, enabled=raises_on_ctrl_c):
                return await supervisor.execute_run(start_run, observer, on_step=on_step, on_notice=print_line)

        try:
            return run_blocking(main())
        except RunStopped as stopped:
            if not supervisor.interrupted:
                raise
            raise KeyboardInterrupt(str(stopped)) from None


def _train_in_process(
    fork_server: ForkServerClient,
    source: JobSource,
    resources: RunResources,
    observer: ShownObserver,
    on_step: StepHook | None,
) -> dict[str, Any]:
    """Execute a run in this process, with a fork server that is left open."""
    graceful_stop = GracefulStop(print_line)
    raises_on_ctrl_c = _ctrl_c_raises()

    async def call_hook(metrics: StepMetrics) -> HookAnswer:
        assert on_step is not None
        return call_step_hook(on_step, metrics)

    async def main() -> dict[str, Any]:
        with _end_gracefully_on_ctrl_c(graceful_stop.request, enabled=raises_on_ctrl_c):
            return await execute_run(
                fork_server,
                source,
                resources,
                observer,
                on_step=None if on_step is None else call_hook,
                graceful_stop=graceful_stop,
            )

    fields = run_blocking(main())
    if graceful_stop.requested:
        raise KeyboardInterrupt(interrupted_message(resources.config.out))
    return fields


def _ctrl_c_raises() -> bool:
    """Whether the caller has no SIGINT handler of its own."""
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def _end_gracefully_on_ctrl_c(request: Callable[[], bool], *, enabled: bool) -> Iterator[None]:
    """Call `request` at every Ctrl-C. If it returns False, cancel the current task and raise KeyboardInterrupt.

    Does nothing unless `enabled` and in the main thread.
    """
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield
        return
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    cancelled = False

    def interrupt() -> None:
        nonlocal cancelled
        if not cancelled and not request():
            cancelled = True
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if not cancelled:
            raise
        raise KeyboardInterrupt from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def print_line(text: str) -> None:
    """Print a notice on stderr."""
    print(f"culm: {text}", file=sys.stderr, flush=True)


def join(
    config: RunConfig | None = None,
    *,
    zone: str = "",
    notice_source: str = "none",
    grace: float = GRACE_S,
    wait_s: float | None = None,
    machine: str = "",
    rented_at: float | None = None,
    abandon_after_s: float | None = None,
    idle_timeout_s: float = 0.0,
    fork_server: ForkServerClient | None = None,
    on_line: Callable[[str], None] | None = None,
    on_job: Callable[[str], None] = lambda _: None,
    **options: Unpack[JoinOptions],
) -> None:
    """Provide a node of this machine to a run on several machines, as `culm agent` does.

    Waits for the run, joins it, rejoins as a new node after every loss, and returns when the run has ended. Raises
    UsageError if this machine cannot join, and RunError if its node fails repeatedly.

    Which run: the field `join` of the config (a token of `culm head`), or `etcd` and `job_name`. Of the other fields
    only `address`, `ports`, `secret_file` and `etcd_*` are used, and those about the price; the machine that started
    the run has decided the rest. With a token, the files of the job come from the store. Without one, they must be at
    the same place on this machine.

    The node: `zone` is the zone of this machine; holders of a layer are spread over zones. `instance`, `market` and
    `node_price` of the config say what the machine costs, and `rented_at` since when (seconds since 1970; default: when
    the node registers). `machine` is the id that the provider gave the machine.

    When to give up: `wait_s` is how long to wait for the job to be started. By default that is ten minutes if the store
    has no job at all, while a name that is missing among other jobs is an error at once. `abandon_after_s` (default:
    never) is how long to wait without a sign of the run before RunError is raised: its store does not answer, or there
    is neither a launcher nor a new step. `idle_timeout_s` (0: never) is how long a node without a slot stays.

    Notices: `notice_source` (aws, gcp, azure or none) is asked for preemption notices. SIGTERM is a notice as well: the
    node then has `grace` seconds to hand over its state. A second SIGTERM, or Ctrl-C, ends the node at once and raises
    KeyboardInterrupt. Signals are handled only if `join` is called in the main thread.

    `on_line` is called with sentences about what happens; by default they are logged to the logger "culm". `on_job` is
    called with the name of the job when it is known.
    """
    merged = merge_options(config, options, stacklevel=3)
    if notice_source not in NOTICE_SOURCES:
        raise UsageError(f"--notice is {notice_source!r}: choose one of {', '.join(NOTICE_SOURCES)}")
    shared = find_shared_run(merged)
    check_free_ports(merged.ports, 1, shared.host)
    report = on_line or _log.info

    async def main() -> None:
        job = await find_job(shared.access, shared.job, wait_s, report)
        on_job(job)
        location = StoreLocation(shared.access, job, secret=shared.secret)
        command = StartNode(
            0,
            location,
            connection_secret(shared.secret, job),
            host=shared.host,
            ports=merged.ports,
            run=next(run_numbers),
            zone=zone,
            notice=notice_source,
            grace_s=grace,
            rental=rental_terms(
                instance=merged.instance,
                market=merged.market,
                usd_h=merged.node_price,
                zone=zone,
                machine=machine or f"{socket.gethostname()}-{os.getpid()}",  # it may rejoin as another node
                rented_at=rented_at,
            ),
        )
        with ForkServerClient() if fork_server is None else nullcontext(fork_server) as used:
            participant = RunParticipant(
                used,
                location,
                command,
                report,
                uses_archive=merged.join is not None,
                machine=machine,
                idle_timeout_s=idle_timeout_s,
            )
            async with _giving_up(location, abandon_after_s) as given_up:
                await _join_until_ended(participant, grace, given_up)

    run_blocking(main())


@asynccontextmanager
async def _giving_up(location: StoreLocation, abandon_after_s: float | None) -> AsyncIterator[asyncio.Future[str]]:
    """A future that completes with a reason when the run shows no sign of life for that long."""
    if abandon_after_s is None:
        yield asyncio.get_running_loop().create_future()
        return
    assert location.etcd is not None
    clock = RealClock()
    signs = StoredRunSigns(location.etcd, location.job, clock)
    watching = asyncio.ensure_future(wait_until_abandoned(signs, abandon_after_s, clock))
    try:
        yield watching
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await signs.close()


async def _join_until_ended(participant: RunParticipant, grace_s: float, given_up: asyncio.Future[str]) -> None:
    """Run the participant until the run has ended, a signal comes, or `given_up` has a reason: then raise RunError."""
    running = asyncio.ensure_future(participant.run(tuple(sys.path)))
    loop = asyncio.get_running_loop()
    interrupted = False

    def stop() -> None:
        nonlocal interrupted
        interrupted = True
        running.cancel()

    def leave() -> None:
        loop.add_signal_handler(signal.SIGTERM, stop)
        if not participant.leave(announced_s(grace_s)):
            stop()

    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGTERM, leave)
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        ends: list[asyncio.Future[Any]] = [running, given_up]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise RunError(given_up.result())
        await running
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if not interrupted:
            raise
        raise KeyboardInterrupt from None


class ShownObserver(RunObserver, Protocol):
    """Shows the progress of a run until it is closed."""

    def print_line(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_observer(progress: bool | None) -> ShownObserver:
    """Show the progress as `culm run` does, or log it; None: show it if stderr is a terminal."""
    if not (sys.stderr.isatty() if progress is None else progress):
        return _LogObserver()
    from culm.cli.progress_display import make_console, make_display

    return make_display(make_console(stderr=True), quiet=False)


class _LogObserver:
    """Logs the progress of a run."""

    def close(self) -> None:
        """Nothing is open."""

    def show_progress(self, text: str, done: int, total: int) -> None:
        _log.debug("%s %s", text, f"{done}/{total}" if total else "")

    def show_setup(self, setup: RunSetup) -> None:
        _log.info("%s x %s (pipelines x stages), %s: %s", setup.pipelines, setup.stages, setup.strategy, setup.reason)

    def show_step(self, metrics: StepMetrics) -> None:
        _log.debug("step %s: loss %s", metrics.step, metrics.loss)

    def show_event(self, text: str) -> None:
        _log.info(text)

    def print_line(self, text: str) -> None:
        _log.info(text)

    def show_url(self, url: str) -> None:
        """Printed, because the caller asked for the page."""
        print_line(f"the run is shown at {url}")


def pickle_job(job: Job, *, keep_hook: bool = False) -> JobSource:
    """The job as data for the fork server. Its on_step hook stays in this process unless `keep_hook`.

    Raises UsageError if the job cannot be pickled.
    """
    import cloudpickle

    for module in [module for name, module in sys.modules.items() if name.startswith(JOB_MODULE_PREFIX)]:
        cloudpickle.register_pickle_by_value(module)  # other processes cannot import a job file under that name
    try:
        data = cloudpickle.dumps(job if keep_hook else dataclasses.replace(job, on_step=None))
    except Exception as error:
        raise UsageError(
            f"the job cannot be sent to another process ({type(error).__name__}{message_suffix(error)}): "
            "put it into a file and pass its name, as in culm.train('my_job.py:job')"
        ) from error
    return JobSource(pickled=data, path=tuple(sys.path))


def run_blocking(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. If an event loop is running already (a notebook), use a thread with its own loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(main))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="culm-train")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def iterate_blocking(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """The items of an async generator, which runs in a thread with its own loop. It is closed when the iteration ends,
    also when it is left early."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="culm-iterate", daemon=True)
    thread.start()
    end = object()
    taking: asyncio.Task[None] | None = None

    async def take() -> Any:
        nonlocal taking
        taking = asyncio.current_task()
        return await anext(items, end)

    async def close() -> None:
        if taking is not None:
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
        await items.aclose()

    try:
        while (item := asyncio.run_coroutine_threadsafe(take(), loop).result()) is not end:
            yield item
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
