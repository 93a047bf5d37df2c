"""`culm.head`, `culm.head_token` and `culm.dash`: what serves others while a program goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from culm.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from culm.machines.head_store import ServedHead
    from culm.providers.run_store import StoreLocation

T = TypeVar("T")
S = TypeVar("S", bound="_BackgroundService")
_log = logging.getLogger("culm")


class _ServiceThread(Generic[T]):
    """Keeps an async context manager open in a thread with its own event loop. Raises what opening it raises."""

    def __init__(self, service: contextlib.AbstractAsyncContextManager[T], name: str) -> None:
        self._service = service
        self._opened = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._opened.set()

    async def _serve(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        async with self._service as self.value:
            self._opened.set()
            await self._closing.wait()

    def close(self) -> None:
        """Close it, and wait until it is closed. Raises what closing it raises."""
        assert self._loop is not None
        assert self._closing is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        if self._error is not None:
            raise self._error


class _BackgroundService:
    """Something that is served until `close`, the end of a `with` block or the end of the program."""

    def __init__(self, close: Callable[[], None], url: str) -> None:
        self._close, self.url = close, url

    def close(self) -> None:
        """Stop serving."""
        self._close()

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class RunningHead(_BackgroundService):
    """A head that `culm.head` has started. `url`: where its store is reached; `token`: with which machines join."""

    def __init__(self, close: Callable[[], None], url: str, token: str) -> None:
        super().__init__(close, url)
        self.token = token


class RunPage(_BackgroundService):
    """The live page of a run that `culm.dash` serves at `url`."""


def head(
    *,
    data: str | os.PathLike[str] | None = None,
    address: str | None = None,
    port: int | None = None,
    job_name: str = "",
    valid_s: float | None = None,
    new_secret: bool = False,
) -> RunningHead:
    """Start a store that other machines can reach, as `culm head` does, and serve it in the background.

    Pass its `token` to `culm.train(join=token)` or `culm.launch(join=token)` here, and to `culm.join(join=token)` or
    `culm agent` on other machines. The head ends with `close`, with its `with` block or with this program; its data
    is kept, and the same folder has the same token again.

    `data`: its folder; default: ~/.culm/head. `address` and `port`: where machines reach it; default: an address of
    this machine, 2379. `job_name`: the only job that the token is for; default: any. `valid_s`: seconds after which no
    machine joins with it; default: never. `new_secret`: make a new secret first, so that old tokens stop working. If
    its etcd ends, it is restarted, which is logged to the logger "culm". Raises UsageError if folder or port cannot be
    used.
    """
    from culm.machines.head_store import serve_head

    served = serve_head(
        _head_folder(data),
        *_head_place(address, port),
        job=job_name,
        expires_at=_expiry(valid_s),
        new_secret=new_secret,
    )
    thread = _ServiceThread(_kept_running(served), "culm-head")
    return RunningHead(thread.close, thread.value.url, thread.value.token)


def head_token(
    *,
    data: str | os.PathLike[str] | None = None,
    address: str | None = None,
    port: int | None = None,
    job_name: str = "",
    valid_s: float | None = None,
) -> str:
    """A token of a head whose folder is on this machine, as `culm head token` prints it. The arguments are those of
    `culm.head`. Raises UsageError if there is no head."""
    from culm.machines.head_store import read_head_token

    place = _head_place(address, port)
    return read_head_token(_head_folder(data), *place, job=job_name, expires_at=_expiry(valid_s))


def _head_folder(data: str | os.PathLike[str] | None) -> Path:
    from culm.machines.head_store import DEFAULT_FOLDER

    return (DEFAULT_FOLDER if data is None else Path(data)).expanduser()


def _head_place(address: str | None, port: int | None) -> tuple[str, int]:
    from culm.machines.head_store import DEFAULT_PORT
    from culm.providers.advertised_address import default_address

    return address or default_address(), DEFAULT_PORT if port is None else port


def _expiry(valid_s: float | None) -> int:
    """The Unix time at which a token ends; 0: never. Raises UsageError."""
    if valid_s is None:
        return 0
    if not valid_s >= 1:
        raise UsageError(f"valid_s is {valid_s:g}: use seconds, 1 or more")
    return int(time.time() + valid_s)


@contextlib.asynccontextmanager
async def _kept_running(service: contextlib.AbstractAsyncContextManager[ServedHead]) -> AsyncIterator[ServedHead]:
    async with service as served:
        watching = asyncio.create_task(served.etcd.keep_running(_log.info))
        try:
            yield served
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


def dash(
    run: str | os.PathLike[str] | None = None,
    *,
    etcd: str | None = None,
    job_name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    etcd_user: str | None = None,
    etcd_ca: str | None = None,
    etcd_cert: str | None = None,
    etcd_key: str | None = None,
    etcd_insecure: bool = False,
    secret_file: str | None = None,
) -> RunPage:
    """Serve a live page of a run to browsers, and its figures to Prometheus under /metrics, as `culm dash` does, in the
    background.

    `run`: folder or URL of a run that has ended, is running or will be written there; or `etcd` and `job_name`: the
    store of a run on several machines. `host` and `port`: where to listen; default: this machine alone, a free port.
    `etcd_*` and `secret_file` are those of RunConfig. The page ends with `close`, with its `with` block or with this
    program. Raises UsageError if the run, the store or the port cannot be used.
    """
    source = find_run_source(
        None if run is None else os.fspath(run),
        etcd=etcd,
        job_name=job_name,
        etcd_user=etcd_user,
        etcd_ca=etcd_ca,
        etcd_cert=etcd_cert,
        etcd_key=etcd_key,
        etcd_insecure=etcd_insecure,
        secret_file=secret_file,
    )
    thread = _ServiceThread(serve_run_page(source, host, port, _log.info), "culm-dash")
    return RunPage(thread.close, thread.value)


def find_run_source(
    run: str | None,
    *,
    etcd: str | None,
    job_name: str | None,
    etcd_user: str | None,
    etcd_ca: str | None,
    etcd_cert: str | None,
    etcd_key: str | None,
    etcd_insecure: bool,
    secret_file: str | None,
) -> str | StoreLocation:
    """What a page is read from: the folder of a run, or its place in etcd. Raises UsageError unless it is one of the
    two."""
    if (run is None) == (etcd is None):
        raise UsageError("give the folder of a run, or --etcd URL --job NAME: one of the two")
    if etcd is None:
        assert run is not None
        if job_name is not None:
            raise UsageError("--job is the name of a run in etcd: add --etcd URL instead of a folder")
        return run
    from culm.providers import shared_run
    from culm.providers.run_store import StoreLocation

    if job_name is None:
        raise UsageError("--etcd keeps many jobs: say which with --job NAME")
    access = shared_run.etcd_access(etcd, etcd_user, etcd_ca, etcd_cert, etcd_key, insecure=etcd_insecure)
    return StoreLocation(access, shared_run.job_name(job_name), secret=shared_run.job_secret(secret_file))


@contextlib.asynccontextmanager
async def serve_run_page(
    source: str | StoreLocation, host: str, port: int, on_note: Callable[[str], None]
) -> AsyncIterator[str]:
    """Serve the page of a run and yield its address. `on_note` gets sentences about the connection to its store. Raises
    UsageError if it cannot be served."""
    from culm.observe.report.load_run import RunFolderReader
    from culm.observe.report.page_server import CachedView, serve_page

    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port is {port}: use a number from 0 (any that is free) to {(1 << 16) - 1}")
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(source, str):
            view = CachedView(RunFolderReader(source, allow_empty=True).read, in_thread=True)
        else:
            from culm.providers.store_view import watch_run_store

            view = CachedView((await stack.enter_async_context(watch_run_store(source, on_note))).read)
        yield await stack.enter_async_context(serve_page(view, host=host, port=port))
