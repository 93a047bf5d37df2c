"""`culm dash`: a live page of a run in a browser."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.etcd_options import EtcdCa, EtcdCert, EtcdInsecure, EtcdKey, EtcdUser, SecretFile
from culm.cli.signal_handling import run_until_signal
from culm.errors import UsageError
from culm.observe.report.load_run import RunFolderReader

if TYPE_CHECKING:
    from culm.observe.report.page_server import CachedView
    from culm.providers.run_store import StoreLocation

Words = str | None


def dash(
    folder: Annotated[Words, typer.Argument(metavar="DIR", help="Folder of a run, or a URL.")] = None,
    etcd: Annotated[Words, typer.Option(metavar="URL[,URL...]", help="Show what the store of a run says.")] = None,
    job: Annotated[Words, typer.Option(help="With --etcd: the name of the job there.")] = None,
    port: Annotated[int, typer.Option(help="Default: one that is free.")] = 0,
    host: Annotated[
        str, typer.Option(metavar="IP", help="Where to listen; default: this machine alone.")
    ] = "127.0.0.1",
    etcd_user: EtcdUser = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    etcd_insecure: EtcdInsecure = False,
    secret_file: SecretFile = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Serve a live page of a run to browsers on this machine, and its figures to Prometheus under /metrics."""
    with report_errors(debug=debug):
        if (folder is None) == (etcd is None):
            raise UsageError("give the folder of a run, or --etcd URL --job NAME: one of the two")
        if not 0 <= port < 1 << 16:
            raise UsageError(f"--port is {port}: use a number from 0 (any that is free) to {(1 << 16) - 1}")
        if folder is not None:
            if job is not None:
                raise UsageError("--job is the name of a run in etcd: add --etcd URL instead of a folder")
            opened = _open_folder(RunFolderReader(folder, allow_empty=True))
        else:
            from culm.providers.run_store import StoreLocation
            from culm.providers.shared_run import etcd_access, job_name, job_secret

            assert etcd is not None
            if job is None:
                raise UsageError("--etcd keeps many jobs: say which with --job NAME")
            access = etcd_access(etcd, etcd_user, etcd_ca, etcd_cert, etcd_key, insecure=etcd_insecure)
            opened = _open_store(StoreLocation(access, job_name(job), secret=job_secret(secret_file)))
        run_until_signal(_serve_until_signal(opened, host, port), lambda _: "the page is no longer served")


@contextlib.asynccontextmanager
async def _open_folder(folder: RunFolderReader) -> AsyncIterator[CachedView]:
    from culm.observe.report.page_server import CachedView

    yield CachedView(folder.read, in_thread=True)


@contextlib.asynccontextmanager
async def _open_store(place: StoreLocation) -> AsyncIterator[CachedView]:
    """The contents of the store of a run."""
    from culm.observe.report.page_server import CachedView
    from culm.providers.store_view import watch_run_store

    async with watch_run_store(place, _print_line) as view:
        yield CachedView(view.read)


async def _serve_until_signal(opened: contextlib.AbstractAsyncContextManager[CachedView], host: str, port: int) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    from culm.observe.report.page_server import is_loopback, serve_page

    async with opened as window, serve_page(window, host=host, port=port) as address:
        if not is_loopback(host):
            _print_line(f"anyone who can reach {host} can read this page")
        _print_line(f"the run is shown at {address}")
        await asyncio.Event().wait()


def _print_line(sentence: str) -> None:
    print(f"culm: {sentence}", flush=True)
