"""`culm head`: the store of a cluster, and the tokens with which machines join."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from culm.cli.error_reporting import report_errors
from culm.cli.etcd_options import EtcdCa, EtcdUser, SecretFile
from culm.errors import UsageError
from culm.machines.head_store import DEFAULT_FOLDER, DEFAULT_PORT, ServedHead, read_head_token, serve_head

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

app = typer.Typer(invoke_without_command=True, help="Start a store that other machines can reach, and print its token.")

DataOption = Annotated[Path, typer.Option("--data", help="Folder of the head: certificate, secret and data.")]
AddressOption = Annotated[
    str | None, typer.Option(help="Address or host name at which other machines reach this one; default: found.")
]
PortOption = Annotated[int, typer.Option(help="Port of the store.")]
JobOption = Annotated[str, typer.Option("--job", help="Make a token for one job only.")]
ExpiresOption = Annotated[str | None, typer.Option(help="Time after which a token does not work, as in 12h or 7d.")]


@app.callback()
def head(
    context: typer.Context,
    data: DataOption = DEFAULT_FOLDER,
    address: AddressOption = None,
    port: PortOption = DEFAULT_PORT,
    job: JobOption = "",
    expires: ExpiresOption = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="Make a new secret first: old tokens stop working.")] = False,
) -> None:
    """Start an etcd with TLS and a password, print the token, and serve until Ctrl-C or SIGTERM."""
    if context.invoked_subcommand is not None:
        return
    with report_errors():
        asyncio.run(_serve(data.expanduser(), address, port, job, _expiry(expires), rotate))


@app.command("token")
def token(
    data: DataOption = DEFAULT_FOLDER,
    address: AddressOption = None,
    port: PortOption = DEFAULT_PORT,
    job: JobOption = "",
    expires: ExpiresOption = None,
    etcd: Annotated[
        str | None, typer.Option(metavar="URL,...", help="Make a token for this etcd of your own, with CULM_SECRET.")
    ] = None,
    etcd_user: EtcdUser = None,
    etcd_ca: EtcdCa = None,
    secret_file: SecretFile = None,
) -> None:
    """Print a token of the head whose folder is on this machine, or of an etcd of your own."""
    from culm.machines.join_token import encode_token, etcd_token
    from culm.providers.advertised_address import default_address
    from culm.providers.shared_run import etcd_access, job_secret

    with report_errors():
        if etcd is not None:
            access = etcd_access(etcd, etcd_user, etcd_ca, None, None)
            print(encode_token(etcd_token(access, job_secret(secret_file), job=job, expires_at=_expiry(expires))))
            return
        host = address or default_address()
        print(read_head_token(data.expanduser(), host, port, job=job, expires_at=_expiry(expires)))


@app.command("receive", hidden=True)
def receive() -> None:
    """Launch the job that culm launch --head of another machine sends on standard input."""
    from culm.cli import main
    from culm.machines.remote_head import received_job

    with report_errors(), received_job(sys.stdin.buffer.read()) as arguments:
        main(arguments)


async def _serve(data: Path, address: str | None, port: int, job: str, expires_at: int, rotate: bool) -> None:
    from culm.providers.advertised_address import default_address

    host = address or default_address()
    serving = asyncio.current_task()
    assert serving is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        async with serve_head(data, host, port, job=job, expires_at=expires_at, new_secret=rotate) as head:
            _warn_of_version(head.etcd.binary)
            _print_token(head, expires_at)
            await head.etcd.keep_running(lambda line: print(f"culm: {line}", flush=True))
    print("culm: the head has stopped; its data is kept", flush=True)


def _warn_of_version(binary: str) -> None:
    from culm.cluster.store.etcd.etcd_errors import loses_data
    from culm.providers.private_etcd import etcd_version

    if loses_data(version := etcd_version(binary)):
        print(
            f"culm: warning: etcd {version} can lose data when it is killed under load: install 3.5.3 or newer as etcd "
            "in PATH, which culm head then uses",
            file=sys.stderr,
        )


def _print_token(head: ServedHead, expires_at: int) -> None:
    until = time.strftime(" until %Y-%m-%d %H:%M UTC", time.gmtime(expires_at)) if expires_at else ""
    print(
        f"culm: the store is reachable at {head.url}{until}\n"
        f"culm: start a run with    culm run FILE --nodes N --join TOKEN\n"
        f"culm: add a machine with  culm agent --join TOKEN\n"
        f"{head.token}",
        flush=True,
    )


def _expiry(text: str | None) -> int:
    """The Unix time at which a duration from now ends; 0 for None. Raises UsageError."""
    if text is None:
        return 0
    found = re.fullmatch(r"(\d+)([smhd])", text)
    if found is None or not int(found[1]):
        raise UsageError(f"--expires is {text!r}: use a number above 0 with s, m, h or d, as in 12h")
    return int(time.time()) + int(found[1]) * _UNITS_S[found[2]]
