"""`culm agent`: this machine takes part in a run that was started elsewhere."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Annotated

import typer

from culm.cli import values
from culm.cli.cluster import EtcdCa, EtcdCert, EtcdKey, EtcdUser, SecretFile, access_of, job_name, secret_of
from culm.cli.failing import failing
from culm.cluster.notice import NAMES
from culm.cluster.sealed import wire_secret
from culm.errors import UsageError
from culm.providers.address import own_address
from culm.providers.attend import Attendance
from culm.providers.local import LocalNursery
from culm.providers.nursery import GRACE_S, Start
from culm.providers.stores import Place

Words = str | None


def agent(
    etcd: Annotated[str, typer.Option(metavar="URL[,URL...]", help="The etcd that the run is kept in.")],
    job: Annotated[str, typer.Option(help="The name of the job: that of its file, or culm run --job.")],
    zone: Annotated[str, typer.Option(help="Where this machine stands: layers are spread over zones.")] = "",
    notice: Annotated[str, typer.Option(help=f"Who tells of a spot notice: {', '.join(NAMES)}.")] = "none",
    grace: Annotated[float, typer.Option(help="Seconds that a SIGTERM leaves to hand over.")] = GRACE_S,
    address: Annotated[Words, typer.Option(metavar="IP|interface", help="Where others reach this machine.")] = None,
    ports: Annotated[Words, typer.Option(metavar="A-B", help="Ports that its node may listen on.")] = None,
    etcd_user: EtcdUser = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    secret_file: SecretFile = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Join the run of a job from this machine, and come back after every loss, until the run has ended."""
    with failing(debug=debug):
        if notice not in NAMES:
            raise UsageError(f"--notice is {notice!r}: choose one of {', '.join(NAMES)}")
        access = access_of(etcd, etcd_user, etcd_ca, etcd_cert, etcd_key)
        place = Place(access, job_name(job), secret=secret_of(secret_file))
        host, span = own_address(address, access), values.ports(ports)
        values.check_ports(span, 1, host)
        order = Start(
            0,
            place,
            wire_secret(place.secret, place.job),
            host=host,
            ports=span,
            zone=zone,
            notice=notice,
            grace_s=grace,
        )
        asyncio.run(_attend(place, order, grace))


async def _attend(place: Place, order: Start, grace_s: float) -> None:
    """SIGTERM is a notice, and a second one the end, as is Ctrl-C."""
    loop = asyncio.get_running_loop()
    with LocalNursery() as nursery:
        attendance = Attendance(nursery, place, order, _say)
        running = asyncio.ensure_future(attendance.run(tuple(sys.path)))

        def leave() -> None:
            loop.add_signal_handler(signal.SIGTERM, running.cancel)
            if not attendance.leave(grace_s):
                running.cancel()

        loop.add_signal_handler(signal.SIGTERM, leave)
        loop.add_signal_handler(signal.SIGINT, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _say(sentence: str) -> None:
    print(f"culm: {sentence}", flush=True)
