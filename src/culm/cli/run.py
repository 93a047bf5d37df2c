"""`culm run`: train a job on local nodes, and show how it goes."""

from __future__ import annotations

import json
import sys
from typing import Annotated, cast

import typer

from culm.cli import values
from culm.cli.cluster import EtcdCa, EtcdCert, EtcdKey, EtcdUser, SecretFile, access_of, job_name, secret_of
from culm.cli.display import Display, console_on, display_on
from culm.cli.failing import failing
from culm.cli.launch import launch
from culm.cli.tables import ledger_table
from culm.cluster.setup import RESTARTS, STRATEGIES, Request, Restart, Setup
from culm.errors import UsageError
from culm.job import locate, parse
from culm.market import read_trace
from culm.market.trace import HOUR
from culm.observe.folder import claim, plain, vacant
from culm.providers.address import own_address
from culm.providers.local import Shared
from culm.providers.nursery import JobSource
from culm.providers.rental import Market, Rental
from culm.schedule import SCHEDULES

Number = int | None
Words = str | None


def run(
    file: Annotated[str, typer.Argument(metavar="FILE[:function]", help="A Python file with job() -> culm.Job.")],
    pipelines: Annotated[Number, typer.Option(help="D: how many pipelines.")] = None,
    stages: Annotated[Number, typer.Option(help="P: stages of a pipeline, one node each.")] = None,
    nodes: Annotated[Number, typer.Option(help="Choose D x P for so many nodes instead.")] = None,
    schedule: Annotated[str, typer.Option(help=f"One of {', '.join(SCHEDULES)}.")] = "1f1b",
    strategy: Annotated[str, typer.Option(help=f"What a preemption costs: {', '.join(STRATEGIES)}.")] = "auto",
    reconfigure: Annotated[
        str, typer.Option(help="When other pipelines are made of the nodes that are there: cost, bamboo or never.")
    ] = "cost",
    exact: Annotated[bool, typer.Option("--exact", help="Bit for bit the same for any number of pipelines.")] = False,
    steps: Annotated[Number, typer.Option(help="Replaces Job.steps.")] = None,
    seed: Annotated[Number, typer.Option(help="Replaces Job.seed.")] = None,
    out: Annotated[Words, typer.Option(metavar="DIR|URL", help="Folder for the run's files; must be empty.")] = None,
    resume: Annotated[Words, typer.Option(metavar="DIR|URL", help="Go on from the newest checkpoint there.")] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between two; 0: one at the end, or as the strategy needs.")
    ] = 0,
    keep_last: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 2,
    restart: Annotated[str, typer.Option(help=f"From a checkpoint: {' or '.join(RESTARTS)} processes.")] = "warm",
    replace_within: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="A restart waits so long for nodes in place of the lost.")
    ] = None,
    losses: Annotated[float, typer.Option(help="Share of nodes lost an hour: auto goes by it.")] = 0.1,
    memory: Annotated[Words, typer.Option(metavar="SIZE", help="What a stage may hold, as in 16GiB.")] = None,
    profile: Annotated[Words, typer.Option(metavar="FILE", help="Cut by this profile (culm profile --out).")] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option("--kill", metavar='"node=3 step=5 at=2B1"', help="SIGKILL a node at an action; repeatable."),
    ] = None,
    trace: Annotated[Words, typer.Option(metavar="FILE", help="Nodes come and go as in this trace.")] = None,
    speedup: Annotated[float, typer.Option(help="How much faster than it happened.")] = 1.0,
    notice: Annotated[float, typer.Option(help="Seconds of notice before the trace takes a node; 0: none.")] = 0.0,
    etcd: Annotated[Words, typer.Option(metavar="URL[,URL...]", help="Other machines join by culm agent.")] = None,
    job: Annotated[Words, typer.Option(help="Its name in etcd; default: that of the file.")] = None,
    local: Annotated[Number, typer.Option(help="With --etcd: nodes of this machine; default none.")] = None,
    address: Annotated[Words, typer.Option(metavar="IP|interface", help="Where others reach them.")] = None,
    etcd_user: EtcdUser = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    secret_file: SecretFile = None,
    suspect_after: Annotated[float, typer.Option(help="Seconds after which a silent machine is lost.")] = 5.0,
    ports: Annotated[Words, typer.Option(metavar="A-B", help="Ports that nodes may listen on.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Replaces Job.FIELD.")] = None,
    dash: Annotated[bool, typer.Option("--dash", help="Show the run to browsers on this machine.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show nothing but errors and what the job prints.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Train a job on local nodes: D pipelines of P stages, a process each."""
    with failing(debug=debug):
        _named(out=out, resume=resume, profile=profile, trace=trace)
        if trace is None:
            _only_with_trace(speedup=speedup != 1.0, notice=notice != 0.0)
        overrides = _overrides(set_ or [], steps=steps, seed=seed, exact=exact or None)
        locate(file)
        parse(overrides)
        request = Request(
            pipelines=pipelines,
            stages=stages,
            nodes=nodes,
            schedule=schedule,
            strategy=strategy,
            reconfigure=reconfigure,
            out=out or resume,
            resume=resume,
            checkpoint_every=checkpoint_every,
            keep_last=keep_last,
            restart=cast("Restart", restart),
            replace_within=replace_within,
            losses=losses,
            memory=values.size(memory),
            profile=profile,
            kills=tuple(kill or ()),
            suspect_after=suspect_after,
        )
        market = None if trace is None else Market(read_trace(trace), speedup, notice)
        shared = None
        if etcd is not None:
            access = access_of(etcd, etcd_user, etcd_ca, etcd_cert, etcd_key)
            host, name = own_address(address, access), job_name(job, file)
            shared = Shared(access=access, job=name, secret=secret_of(secret_file), local=local or 0, host=host)
        else:
            _only_with_etcd(job=job, local=local, address=address, secret_file=secret_file)
            _only_with_etcd(etcd_user=etcd_user, etcd_ca=etcd_ca, etcd_cert=etcd_cert, etcd_key=etcd_key)
        source = JobSource(reference=file, overrides=overrides, path=tuple(sys.path))
        console = console_on(stderr=json_)
        shown = display_on(console, quiet=quiet)
        summary = _run(
            source, request, shown, values.ports(ports), market, shared, prints_to=2 if json_ else 1, dash=dash
        )
        if not quiet:
            console.print(ledger_table(summary, request.out))
        if json_:
            print(json.dumps(plain(summary)))


def _run(
    source: JobSource,
    request: Request,
    shown: Display,
    ports: tuple[int, int] | None,
    market: Market | None,
    shared: Shared | None,
    *,
    prints_to: int,
    dash: bool,
) -> dict[str, object]:
    fresh = request.out if request.out != request.resume else None
    if fresh is not None:
        vacant(fresh)

    def prepared(setup: Setup) -> None:
        """All that can be refused has been looked at: now the folder may be made."""
        if shared is None:
            values.check_ports(ports, setup.nodes)
        else:
            _check_shared(shared, setup, traced=market is not None)
            values.check_ports(ports, shared.local, shared.host)
        if market is not None:
            shown.told(_beginning(market.rental(setup.nodes)), 0, 0)
        if fresh is not None:
            claim(fresh)
        shown.prepared(setup)

    return launch(
        source,
        request,
        shown,
        prepared=prepared,
        ports=ports,
        market=market,
        shared=shared,
        prints_to=prints_to,
        dash=dash,
    )


def _named(**options: str | None) -> None:
    """An empty name is a variable that was not set: nothing would be kept, and nobody would know."""
    for name, value in options.items():
        if value is not None and not value.strip():
            raise UsageError(f"--{name} is {value!r}: name a place, or leave it away")


def _only_with_trace(**given: bool) -> None:
    for name in (name for name, said in given.items() if said):
        raise UsageError(f"--{name} is for a run on a trace: add --trace FILE, or leave it away")


def _only_with_etcd(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for a run that other machines join: add --etcd URL")


def _check_shared(shared: Shared, setup: Setup, *, traced: bool) -> None:
    if not 0 <= shared.local <= setup.nodes:
        raise UsageError(f"--local {shared.local} does not fit {setup.nodes} nodes: use 0 to {setup.nodes}")
    option = "--kill" if setup.kills else "--trace" if traced else ""
    if option and shared.local < setup.nodes:
        raise UsageError(f"{option} strikes nodes of this machine: leave it away, or let all of them be --local")


def _beginning(rental: Rental) -> str:
    return f"the trace has {len(rental.first)} nodes {rental.begins_s / HOUR:.2f} h after its start: it begins there"


def _overrides(given: list[str], **options: int | None) -> dict[str, str]:
    """Fields of the job by --set, and by options of their own."""
    found = values.assignments(given)
    for name, value in options.items():
        if value is not None and name in found:
            raise UsageError(f"--{name} and --set {name}={found[name]} are both given: leave one out")
        found |= {name: str(value)} if value is not None else {}
    return found
