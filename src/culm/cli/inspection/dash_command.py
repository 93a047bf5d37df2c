"""`culm dash`: a live page of a run in a browser."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Annotated

import typer

from culm.background_services import find_run_source, serve_run_page
from culm.cli.error_reporting import report_errors
from culm.cli.etcd_options import EtcdCa, EtcdCert, EtcdInsecure, EtcdKey, EtcdUser, SecretFile
from culm.cli.signal_handling import run_until_signal

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
        source = find_run_source(
            folder,
            etcd=etcd,
            job_name=job,
            etcd_user=etcd_user,
            etcd_ca=etcd_ca,
            etcd_cert=etcd_cert,
            etcd_key=etcd_key,
            etcd_insecure=etcd_insecure,
            secret_file=secret_file,
        )
        serving = serve_run_page(source, host, port, _print_line)
        run_until_signal(_serve_until_signal(serving, host), lambda _: "the page is no longer served")


async def _serve_until_signal(serving: AbstractAsyncContextManager[str], host: str) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    from culm.observe.report.page_server import is_loopback

    async with serving as address:
        if not is_loopback(host):
            _print_line(f"anyone who can reach {host} can read this page")
        _print_line(f"the run is shown at {address}")
        await asyncio.Event().wait()


def _print_line(sentence: str) -> None:
    print(f"culm: {sentence}", flush=True)
