"""A run as its launcher sees it: the nursery, the signals that end it, and what user code prints on the way."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from culm.cli.interrupt import interruptible
from culm.cli.tables import listed
from culm.cluster.blows import Kill
from culm.observe.folder import RunFolder, local, saved
from culm.plan.partition import count
from culm.providers.local import LocalNursery, LocalRun, Shared, local_run
from culm.providers.nursery import GRACE_S
from culm.providers.run import Came, Lost, News
from culm.providers.trace import beside_ideal, replay
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from culm.cli.display import Display
    from culm.cluster.setup import Request, Setup
    from culm.providers.nursery import JobSource
    from culm.providers.rental import Market


def launch(
    source: JobSource,
    request: Request,
    display: Display,
    *,
    prepared: Callable[[Setup], None],
    ports: tuple[int, int] | None = None,
    market: Market | None = None,
    shared: Shared | None = None,
    prints_to: int = 1,
    dash: bool = False,
    nursery: LocalNursery | None = None,
) -> dict[str, Any]:
    """Run a job to its end and return the summary. Nothing is left running, whatever happens.

    Raises what was wrong with the request or the run, and Interrupted after Ctrl-C or SIGTERM. What user code prints
    goes through a live display, else to the descriptor `prints_to`. `dash`: browsers on this machine may look, and are
    told where. A `nursery` that is passed in is left open.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(display.close)
        display.told("importing torch and the job", 0, 0)
        prints = stack.enter_context(contextlib.closing(Prints(display.line))) if display.live else None

        async def main() -> dict[str, Any]:
            stdout, stderr = (prints_to, 2) if prints is None else (prints.entrance, prints.entrance)
            own = LocalNursery(stdout=stdout, stderr=stderr) if nursery is None else contextlib.nullcontext(nursery)
            with _taken(prints), own as used:
                return await _run(used, source, request, display, prepared, ports, market, shared, dash)

        return interruptible(main(), lambda _: _how_to_resume(request.out))


async def _run(
    nursery: LocalNursery,
    source: JobSource,
    request: Request,
    display: Display,
    prepared: Callable[[Setup], None],
    ports: tuple[int, int] | None,
    market: Market | None,
    shared: Shared | None,
    dash: bool,
) -> dict[str, Any]:
    grace_s = (market.notice_s if market is not None else 0.0) or GRACE_S
    ways: dict[str, Any] = {"told": display.told, "prepared": prepared, "ports": ports, "shared": shared}
    if market is not None:
        ways["zones"] = lambda nodes: [event.zone for event in market.rental(nodes).first]
    async with contextlib.AsyncExitStack() as stack:
        run = await stack.enter_async_context(local_run(nursery, source, request, grace_s=grace_s, **ways))
        if dash:
            display.address(await stack.enter_async_context(_shown(run, source.reference, shared is None)))
        watching = [asyncio.create_task(watch(run, display)) for watch in (_watch_nodes, _watch_losses)]
        rental = None if market is None else market.rental(run.setup.nodes)
        if rental is not None:
            watching.append(asyncio.create_task(replay(rental, run, RealClock())))
        try:
            while (metrics := await run.step()) is not None:
                display.step(metrics)
            result = await run.result()
        except asyncio.CancelledError:
            nursery.kill()  # before connections are closed, which would wait for nodes to read
            raise
        finally:
            for task in watching:
                task.cancel()
            for news in run.rest():
                display.news(told_of(news))
    if result.summary is None:
        raise result.failure()
    if rental is not None:
        result.summary.update(beside_ideal(rental, run, result.summary))
        RunFolder(request.out).write("summary.json", result.summary)
    for kill in missed(run):
        display.news(f"--kill {kill!r} struck nobody: that moment did not come")
    return result.summary


@contextlib.asynccontextmanager
async def _shown(run: LocalRun, name: str, alone: bool) -> AsyncIterator[str]:
    """The page of a run: out of its folder where that is on this machine, else out of the store. Yields its address."""
    from culm.observe.reading import Folder
    from culm.observe.serving import Window, served
    from culm.providers.heard import hearing

    async with contextlib.AsyncExitStack() as stack:
        if run.setup.out is not None and local(run.setup.out) is not None and alone:
            window = Window(Folder(run.setup.out, empty=True).look, aside=True)
        else:
            window = Window((await stack.enter_async_context(hearing(run.store, name))).look)
        yield await stack.enter_async_context(served(window))


async def _watch_nodes(run: LocalRun, display: Display) -> None:
    """Show how many nodes are up: those whose worker is."""
    verb = "starting" if run.alone else "waiting for"
    display.told(f"{verb} {run.setup.nodes} nodes", 0, 0)
    up: set[int] = set()
    while len(up) < run.setup.nodes:
        up.add(await run.node_up())
        display.told("nodes up", len(up), run.setup.nodes)


async def _watch_losses(run: LocalRun, display: Display) -> None:
    """Show who vanishes, and what it took to go on."""
    while True:
        display.news(told_of(await run.news()))


def told_of(news: News) -> str:
    """A loss, a newcomer, or a recovery, as a line."""
    if isinstance(news, Lost):
        return f"node {news.node} is gone" + (f": its worker {news.how}" if news.how else "")
    if isinstance(news, Came):
        return f"node {news.node} has come: it gets a copy of a stage and then its place"
    milliseconds = news.detect_ms + news.decide_ms + news.move_ms + news.redo_ms
    nodes = listed(news.lost, "node")
    again = "nothing" if not news.redone_actions else count(news.redone_actions, "action")
    changed = " (its samples are left out: training changes)" if news.source == "drop" else ""
    return (
        f"step {news.step} went on without {nodes}, by {news.source}{changed}: {again} run again, {milliseconds:.0f} ms"
    )


def missed(run: LocalRun) -> list[str]:
    """The kills that were asked for and struck nobody: other losses had changed who does what."""
    return [kill for kill in run.setup.kills if not set(Kill.parse(kill).nodes) <= set(run.lost)]


def _how_to_resume(out: str | None) -> str:
    steps = saved(out) if out is not None else []
    if steps:
        return f"interrupted; {steps[-1]} steps are saved: continue with --resume {out}"
    return "interrupted before the first checkpoint: --checkpoint-every N with --out saves one every N steps"


class Prints:
    """What user code prints, line by line: a pipe, because a live display redraws the lines it stands on."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.exit, self.entrance = os.pipe()
        os.set_blocking(self.exit, False)
        self._show = show
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def take(self) -> bool:
        """Show the lines that are there. True while there may be more."""
        try:
            data = os.read(self.exit, 65536)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._show(line)
        return bool(data)

    def close(self) -> None:
        """Show what is left, once nobody writes any more."""
        os.close(self.entrance)
        while self.take():
            pass
        if self._rest:
            self._show(self._rest)
        os.close(self.exit)


@contextlib.contextmanager
def _taken(prints: Prints | None) -> Iterator[None]:
    """Lines are taken as they come, by the loop that runs."""
    if prints is None:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(prints.exit, prints.take)
    try:
        yield
    finally:
        loop.remove_reader(prints.exit)
