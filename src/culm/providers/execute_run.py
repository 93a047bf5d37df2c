"""Execute one run as its RunConfig says: nodes, market trace, other machines, page for browsers. Shared by `culm.train`
and `culm run`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from culm.cluster.node_faults import KillNode
from culm.errors import RunError, UsageError
from culm.market import read_trace
from culm.market.market_trace import HOUR
from culm.observe.step_metrics import StepMetrics, read_hook_result
from culm.observe.writers.run_folder import RunFolder, check_folder_empty, create_run_folder, local_path
from culm.providers.advertised_address import check_free_ports
from culm.providers.fork_server import GRACE_S
from culm.providers.graceful_stop import GracefulStop
from culm.providers.local_provider import ForkServerClient, RunHandle, local_run
from culm.providers.run_events import event_line
from culm.providers.shared_run import SharedRun, find_shared_run
from culm.providers.trace_market import RentalSchedule, TraceMarket
from culm.providers.trace_replay import compare_with_ideal, replay_rental
from culm.runtime.clock import RealClock
from culm.runtime.storage_retry import retry_storage

if TYPE_CHECKING:
    from culm.cluster.run_setup import RunSetup
    from culm.config import RunConfig
    from culm.job import StepHook
    from culm.providers.fork_server import JobSource


class HookAnswer(NamedTuple):
    """What Job.on_step asked for: named values for the step, and whether the run goes on."""

    values: dict[str, float]
    goes_on: bool


StepGateCall: TypeAlias = "Callable[[StepMetrics], Awaitable[HookAnswer]]"
"""Called after a step, before the next one begins."""
_REMIND_S = 30.0
"""Time between two sentences about nodes that are waited for."""
_SUMMARY_RETRY_S = 60.0
"""How long the summary of a run on a market trace is retried. The leader has written all but the market's figures."""


class RunObserver(Protocol):
    """Receives the progress of a run."""

    def show_progress(self, text: str, done: int, total: int) -> None:
        """Progress before the first step. A total of 0: the length is not known."""

    def show_setup(self, setup: RunSetup) -> None:
        """Everything is decided and nothing has been started."""

    def show_step(self, metrics: StepMetrics) -> None:
        """A step was committed."""

    def show_event(self, text: str) -> None:
        """A node was lost or joined, the run recovered, or a kill found no node."""

    def show_url(self, url: str) -> None:
        """The address of the page that shows the run."""


def call_step_hook(on_step: StepHook, metrics: StepMetrics) -> HookAnswer:
    """Call Job.on_step in this process. The run does not go on after culm.STOP."""
    values, stopped = read_hook_result(on_step(metrics), metrics)
    return HookAnswer(values, not stopped)


@dataclass(frozen=True, kw_only=True)
class RunResources:
    """A RunConfig with everything that it names outside of this process: read, checked, and nothing started yet."""

    config: RunConfig
    """`config.out` is the folder that the run writes to, also if the run is resumed."""
    market: TraceMarket | None = None
    shared: SharedRun | None = None

    @property
    def new_folder(self) -> str | None:
        """The folder to create for the run; None: there is none, or the run continues in the folder it resumes."""
        return None if self.config.out == self.config.resume else self.config.out


def find_resources(config: RunConfig, job_file: str = "") -> RunResources:
    """Read the trace, the secret and the certificates that a config names. `job_file`: FILE[:function] of the job.

    Raises UsageError if one of them cannot be used, or if the folder of the run is not empty.
    """
    market = None if config.trace is None else TraceMarket(read_trace(config.trace), config.speedup, config.notice)
    shared = find_shared_run(config, job_file) if config.is_shared else None
    config = dataclasses.replace(config, out=config.folder)
    if shared is not None:  # machines that join have other working folders
        config = dataclasses.replace(config, out=_absolute(config.out), resume=_absolute(config.resume))
    found = RunResources(config=config, market=market, shared=shared)
    if found.new_folder is not None:
        check_folder_empty(found.new_folder)
    return found


def _absolute(place: str | None) -> str | None:
    """A local folder with its whole path; URLs stay as they are."""
    path = None if place is None else local_path(place)
    return place if path is None else str(path.absolute())


async def execute_run(
    fork_server: ForkServerClient,
    source: JobSource,
    resources: RunResources,
    observer: RunObserver,
    *,
    on_step: StepGateCall | None = None,
    on_cancelled: Callable[[], None] = lambda: None,
    graceful_stop: GracefulStop | None = None,
    companion: Callable[[RunHandle], Coroutine[Any, Any, None]] | None = None,
) -> dict[str, Any]:
    """Run a job to its end and return the fields of summary.json. No node of this machine is left afterwards.

    `on_step` is awaited after every step, before the next one begins; it may end the run there. Without
    it the job's own hook runs in the leader. `on_cancelled` is called first if this coroutine is
    cancelled, before connections are closed. `graceful_stop` ends the run early on request.
    `companion` runs beside the run, from before its first step until its end.
    Raises the error that ended the run.
    """
    market, shared = resources.market, resources.shared
    async with contextlib.AsyncExitStack() as stack:
        opened = local_run(
            fork_server,
            source,
            resources.config,
            on_progress=observer.show_progress,
            on_prepared=lambda setup: _prepare_machine(resources, setup, observer),
            on_changed=observer.show_setup,
            shared=shared,
            zones=lambda nodes: () if market is None else _initial_zones(market, nodes),
            grace_s=(market.notice_s if market is not None else 0.0) or GRACE_S,
            gate=None if on_step is None else "caller",
        )
        run = await stack.enter_async_context(opened)
        if graceful_stop is not None:
            graceful_stop.attach(run)
        if resources.config.dash:
            observer.show_url(await stack.enter_async_context(_serve_run_page(run, source.reference, shared is None)))
        timeout_s, reminds = resources.config.start_timeout, companion is None
        watchers = [
            asyncio.create_task(_watch_nodes(run, observer, timeout_s, reminds=reminds)),
            asyncio.create_task(_watch_events(run, observer)),
        ]
        rental = None if market is None else market.rental_schedule(run.setup.nodes)
        if rental is not None:
            watchers.append(asyncio.create_task(replay_rental(rental, run, RealClock())))
        if companion is not None:
            watchers.append(asyncio.create_task(companion(run)))
        try:
            await _follow_steps(run, observer, on_step)
            result = await run.wait_for_result()
        except asyncio.CancelledError:
            on_cancelled()
            raise
        finally:
            for task in watchers:
                task.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            for event in run.pending_events():
                observer.show_event(event_line(event))
    if result.summary is None:
        raise result.to_error()
    if rental is not None:
        result.summary.update(compare_with_ideal(rental, run, result.summary))
        await _rewrite_summary(resources.config.out, result.summary)
    for kill in unused_kills(run):
        observer.show_event(f"--kill {kill!r} killed no node: its action was not run by that node")
    return result.summary


async def _rewrite_summary(out: str | None, summary: dict[str, Any]) -> None:
    """Replace summary.json, with retries. Raises RunError if that fails for a minute."""
    reasons = ["it does not answer"]
    try:
        async with asyncio.timeout(_SUMMARY_RETRY_S):
            await retry_storage(
                RealClock(),
                lambda: RunFolder(out).write_json("summary.json", summary),
                lambda why, _: reasons.append(why),
            )
    except TimeoutError:
        raise RunError(f"{out}/summary.json could not be completed: {reasons[-1]}") from None


def _prepare_machine(resources: RunResources, setup: RunSetup, observer: RunObserver) -> None:
    """The last checks, for which the number of nodes is needed; then the folder is created."""
    config, shared = resources.config, resources.shared
    if shared is None:
        check_free_ports(config.ports, setup.nodes, workers_per_node=setup.workers_per_node)
    else:
        check_local_nodes(shared, setup, has_trace=resources.market is not None)
        check_free_ports(config.ports, shared.local_nodes, shared.host, workers_per_node=setup.workers_per_node)
    if resources.market is not None:
        observer.show_progress(_trace_start_words(resources.market.rental_schedule(setup.nodes)), 0, 0)
    if resources.new_folder is not None:
        create_run_folder(resources.new_folder)
    observer.show_setup(setup)


def check_local_nodes(shared: SharedRun, setup: RunSetup, *, has_trace: bool) -> None:
    """Raise UsageError if this machine has more nodes than the run, or would have to kill nodes of other machines."""
    if not 0 <= shared.local_nodes <= setup.nodes:
        raise UsageError(f"--local {shared.local_nodes} does not fit {setup.nodes} nodes: use 0 to {setup.nodes}")
    option = "--kill" if setup.kills else "--trace" if has_trace else ""
    if option and shared.local_nodes < setup.nodes:
        raise UsageError(f"{option} kills nodes of this machine only: omit it, or use --local {setup.nodes}")


def unused_kills(run: RunHandle) -> list[str]:
    """Kills of the config that killed no node: earlier losses had changed which node runs which action."""
    kills = [KillNode.parse(kill) for kill in run.setup.kills]
    lost = set(run.lost_nodes)
    return [dataclasses.replace(kill, drawn=False).spec_text for kill in kills if not lost.issuperset(kill.nodes)]


def _trace_start_words(rental: RentalSchedule) -> str:
    nodes, hours = len(rental.initial_nodes), rental.trace_start_s / HOUR
    return f"the market trace has {nodes} nodes {hours:.2f} h after its start: the run begins there"


def _initial_zones(market: TraceMarket, nodes: int) -> list[str]:
    return [event.zone for event in market.rental_schedule(nodes).initial_nodes]


async def _follow_steps(run: RunHandle, observer: RunObserver, on_step: StepGateCall | None) -> None:
    """Show every step until the run ends. With a hook, a step begins when the hook has returned for the one before."""
    if on_step is not None:
        run.permit_steps_below(run.setup.start + 1)
    while (metrics := await run.next_step()) is not None:
        observer.show_step(metrics)
        if on_step is None:
            continue
        answer = HookAnswer({}, goes_on=False)
        try:
            answer = await on_step(metrics)
        finally:
            run.send_hook_values(metrics.step, answer.values)  # the step is complete, whatever the hook did
        if not answer.goes_on:
            run.finish_before(metrics.step + 1)
            return
        run.permit_steps_below(metrics.step + 2)


@contextlib.asynccontextmanager
async def _serve_run_page(run: RunHandle, name: str, owns_all_nodes: bool) -> AsyncIterator[str]:
    """Serve the page of a run and yield its address. Its data comes from the run folder if only this machine writes to
    it, else from the store."""
    from culm.observe.report.load_run import RunFolderReader
    from culm.observe.report.page_server import CachedView, serve_page
    from culm.providers.store_view import watch_open_store

    async with contextlib.AsyncExitStack() as stack:
        if run.setup.out is not None and local_path(run.setup.out) is not None and owns_all_nodes:
            view = CachedView(RunFolderReader(run.setup.out, allow_empty=True).read, in_thread=True)
        else:
            view = CachedView((await stack.enter_async_context(watch_open_store(run.store, name))).read)
        yield await stack.enter_async_context(serve_page(view))


async def _watch_nodes(run: RunHandle, observer: RunObserver, start_timeout_s: float, *, reminds: bool) -> None:
    """Show how many nodes have a running worker, until all have. If other machines provide them, the run fails when
    they have not come within `start_timeout_s`; with `reminds`, a sentence says now and then what is waited for."""
    verb = "starting" if run.owns_all_nodes else "waiting for"
    observer.show_progress(f"{verb} {run.setup.nodes} nodes", 0, 0)
    up: set[int] = set()
    waited_s = 0.0
    while len(up) < run.setup.nodes:
        pause_s = None if run.owns_all_nodes else min(_REMIND_S, start_timeout_s - waited_s)
        try:
            async with asyncio.timeout(pause_s):
                up.add(await run.next_node_up())
        except TimeoutError:
            if run.epoch is not None:
                return  # it has begun without the others (--start-after)
            waited_s += pause_s or 0.0
            missing = f"{len(up)} of {run.setup.nodes} nodes have joined after {waited_s:.0f} s"
            if waited_s >= start_timeout_s:
                run.fail(f"{missing} (--start-timeout): start culm agent on more machines, or use fewer --nodes")
                return
            if reminds:
                observer.show_event(f"{missing}: start culm agent on {run.setup.nodes - len(up)} more machines")
            continue
        if run.epoch is not None:
            return
        observer.show_progress("nodes up", len(up), run.setup.nodes)


async def _watch_events(run: RunHandle, observer: RunObserver) -> None:
    while True:
        observer.show_event(event_line(await run.next_event()))
