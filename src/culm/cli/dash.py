"""`culm dash`: a run while it goes, in a browser."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from culm.cli.cluster import EtcdCa, EtcdCert, EtcdKey, EtcdUser, SecretFile, access_of, job_name, secret_of
from culm.cli.failing import failing
from culm.cli.interrupt import interruptible
from culm.errors import UsageError
from culm.observe.reading import Folder

if TYPE_CHECKING:
    from culm.observe.serving import Window
    from culm.providers.stores import Place

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
    secret_file: SecretFile = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Show a run to browsers on this machine while it goes, and to Prometheus under /metrics."""
    with failing(debug=debug):
        if (folder is None) == (etcd is None):
            raise UsageError("give the folder of a run, or --etcd URL --job NAME: one of the two")
        if not 0 <= port < 1 << 16:
            raise UsageError(f"--port is {port}: use a number from 0 (any that is free) to {(1 << 16) - 1}")
        if folder is not None:
            if job is not None:
                raise UsageError("--job is the name of a run in etcd: add --etcd URL instead of a folder")
            opened = _followed(Folder(folder, empty=True))
        else:
            from culm.providers.stores import Place

            assert etcd is not None
            if job is None:
                raise UsageError("--etcd keeps many jobs: say which with --job NAME")
            access = access_of(etcd, etcd_user, etcd_ca, etcd_cert, etcd_key)
            opened = _heard(Place(access, job_name(job), secret=secret_of(secret_file)))
        interruptible(_serve(opened, host, port), lambda _: "the page is no longer served")


@contextlib.asynccontextmanager
async def _followed(folder: Folder) -> AsyncIterator[Window]:
    from culm.observe.serving import Window

    yield Window(folder.look, aside=True)


@contextlib.asynccontextmanager
async def _heard(place: Place) -> AsyncIterator[Window]:
    """What the store of a run says."""
    from culm.observe.serving import Window
    from culm.providers.heard import listening

    async with listening(place, _say) as heard:
        yield Window(heard.look)


async def _serve(opened: contextlib.AbstractAsyncContextManager[Window], host: str, port: int) -> None:
    """Until Ctrl-C or SIGTERM."""
    from culm.observe.serving import local, served

    async with opened as window, served(window, host=host, port=port) as address:
        if not local(host):
            _say(f"everybody who reaches {host} can read this page: nothing on it is secret to them")
        _say(f"the run is shown at {address}")
        await asyncio.Event().wait()


def _say(sentence: str) -> None:
    print(f"culm: {sentence}", flush=True)
