"""`culm launch`: start machines, train a job on them, replace lost ones, and end all of them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import typer

from culm.cli.config_options import build_config, with_config_options
from culm.cli.error_reporting import report_errors
from culm.cli.launching.head_launch import (
    arguments_for_head,
    launch_on_head,
    open_head,
    print_dry_run,
    show_launched,
)
from culm.cli.launching.offer_table import offer_table
from culm.cli.option_values import parse_assignments
from culm.cli.progress_display import make_console, make_display
from culm.cli.run_tables import summary_table
from culm.cli.running.run_command import detached_words, job_overrides
from culm.cli.running.run_launcher import launch_detached, launch_run
from culm.cluster.store.etcd.etcd_access import check_job_name
from culm.config import RunConfig
from culm.errors import RunError, UsageError
from culm.job import Job, find_job_file, import_root, load_job, parse_overrides
from culm.machines.launch_order import LaunchOrder
from culm.machines.machine_gpus import gpus_of_machines
from culm.machines.machine_provider import (
    EngineMissing,
    LaunchSpec,
    MachineProvider,
    MachineRequest,
    Market,
    ProviderSettings,
    known_prices,
)
from culm.machines.machine_provider_registry import (
    known_machine_providers,
    machine_provider_class,
    open_machine_provider,
)
from culm.machines.suitable_instances import suitable_instances
from culm.observe.writers.run_folder import to_plain_json
from culm.providers.execute_run import find_resources
from culm.providers.fork_server import GRACE_S, JobSource
from culm.strategies.registry import add_search_folders

_NOT_OFFERED = frozenset(
    ["etcd", "etcd_user", "etcd_ca", "etcd_cert", "etcd_key", "join", "job_name", "local_nodes", "address", "ports"]
) | frozenset(["kills", "trace", "speedup", "notice", "secret_file", "instance", "market", "node_price", "max_price"])
"""Fields of RunConfig that a launch decides itself."""
_FIELDS = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name not in _NOT_OFFERED)
_SAME_FILES = ("local", "slurm", "trace")
"""Providers whose machines usually see the files of this one: their agents run with this Python."""
_END_TIMEOUT_S = 120.0
"""Limit for ending the machines after a second Ctrl-C."""
_LABEL_LENGTH = 40
_SECRET_NAME = re.compile(r"(SECRET|TOKEN|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)(_|$)", re.IGNORECASE)
"""Names of environment variables that usually hold secrets."""
_START_AFTER_S = 120.0
"""When a run begins without the machines that have not come yet."""

Number = int | None


@with_config_options(_FIELDS)
def launch(
    file: Annotated[str, typer.Argument(metavar="FILE[:function]", help="A Python file with job() -> culm.Job.")],
    on: Annotated[
        str, typer.Option("--on", metavar="NAME", help=f"Where: {', '.join(known_machine_providers())}, MODULE:CLASS.")
    ],
    context: typer.Context,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="[USER@]HOST|pod/NAME", help="Keep the store and the supervisor on this machine, by ssh or kubectl."
        ),
    ] = None,
    head_ssh: Annotated[
        str | None, typer.Option(help="The command that reaches --head, with options: ssh, or kubectl for a Pod.")
    ] = None,
    launch_name: Annotated[str | None, typer.Option(hidden=True)] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Use spot machines, where the provider has them.")] = False,
    instance: Annotated[str, typer.Option(help="Instance types to choose from, as in g5.xlarge,g6.xlarge.")] = "",
    any_: Annotated[bool, typer.Option("--any", help="Choose among all instance types that fit, by price.")] = False,
    zone: Annotated[str, typer.Option(help="Zones to choose from; default: the provider decides.")] = "",
    max_price: Annotated[float | None, typer.Option(help="Most dollars per hour for a machine.")] = None,
    price: Annotated[
        float | None,
        typer.Option(metavar="USD_PER_HOUR", help="What a machine costs, where culm cannot know it or you pay less."),
    ] = None,
    hosts: Annotated[str | None, typer.Option(help="For --on hosts: HOST,HOST,... or @FILE.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Option of the provider; repeatable.")
    ] = None,
    program: Annotated[str | None, typer.Option(help="Command that runs culm on a machine; default: culm.")] = None,
    image: Annotated[str, typer.Option(help="Container or machine image, where the provider needs one.")] = "",
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Environment variable of the agents.")
    ] = None,
    machine_notice: Annotated[str, typer.Option(help="Where agents learn of preemptions: see culm agent.")] = "none",
    grace: Annotated[float, typer.Option(help="Seconds that an agent has after SIGTERM to hand over.")] = GRACE_S,
    abandon_after: Annotated[
        float, typer.Option(help="A machine ends itself after this many seconds without a sign of the run.")
    ] = 900.0,
    address: Annotated[str, typer.Option(help="Address at which machines reach this one; default: found.")] = "",
    port: Annotated[int, typer.Option(help="Port of the store on this machine; default: a free one.")] = 0,
    join: Annotated[
        str | None, typer.Option(metavar="TOKEN|@FILE|env", help="Use this store instead of starting one here.")
    ] = None,
    job_name: Annotated[str | None, typer.Option("--job", help="Name of the job; default: of its file.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Bit for bit the same for any number of pipelines.")] = False,
    steps: Annotated[Number, typer.Option(help="Replaces Job.steps.")] = None,
    seed: Annotated[Number, typer.Option(help="Replaces Job.seed.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Replaces Job.FIELD.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be requested, and its price.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before money is spent.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the run has started: see culm attach.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only errors and the output of the job.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    **options: Any,
) -> None:
    """Train a job on machines of a provider: start them, replace lost ones, and end all of them afterwards."""
    with report_errors(debug=debug):
        if options.get("budget") is not None:
            options["node_price"] = 0.0  # of nodes of this machine; those of the provider report their own price
        options["start_after"] = _START_AFTER_S if options["start_after"] is None else options["start_after"]
        given = parse_assignments(option or [], "--option", "region=us-east-1") | (
            {} if hosts is None else {"hosts": hosts}
        )
        config = build_config({**options, **({} if join is None else {"join": join})})
        config = _with_all_gpus(config, context, given, _names(instance))
        count = _machine_count(config)
        job_file = find_job_file(file)
        add_search_folders(import_root(job_file), job_file.parent)
        overrides = job_overrides(set_ or [], steps=steps, seed=seed, exact=exact or None)
        parse_overrides(overrides)
        job = check_job_name(job_name or job_file.stem)
        if head is not None:
            if join is not None:
                raise UsageError("--head and --join are both given: the store is on the head, leave one out")
            place = open_head(head, head_ssh, _program("", program), _launch_name(job), job)
            arguments = arguments_for_head(context, hosts)
            asks = machine_provider_class(on).costs_money and not yes
            if dry_run or asks:
                print_dry_run(place, file, arguments)
            if dry_run:
                return
            _ask(count, on, answered=not asks)
            place = launch_on_head(place, file, arguments)
            show_launched(place, detach=detach, quiet=quiet, json_=json_)
            return
        requests = _requests(
            _instances(instance, on, given, config, spot=spot, any_=any_), zone, _markets(config, spot=spot)
        )
        order = LaunchOrder(
            launch=launch_name or _launch_name(job),
            job=job,
            provider=on,
            options=given,
            requests=requests,
            max_price=_price_limit(max_price),
            price=_known_price(price, len(requests)),
            address=address,
            port=port,
            program=_program(on, program),
            image=image,
            notice=machine_notice,
            grace_s=grace,
            abandon_after_s=abandon_after,
            environment=_environment(env or []),
        )
        provider = open_machine_provider(on, ProviderSettings(launch=order.launch, options=given, price=order.price))
        console = make_console(stderr=json_ or dry_run)
        requests, unchecked = _checked(provider, order.requests, count, any_=any_, dry_run=dry_run)
        order = msgspec.structs.replace(order, requests=requests)
        if not quiet or dry_run:
            console.print(offer_table(provider, order.requests, count))
        _check_affordable(provider, order)
        _warn_of_own_disks(provider, config.out)
        if dry_run:
            _print_dry_run(
                provider, order, count, unchecked, config=config, load=partial(load_job, file, overrides), json_=json_
            )
            return
        _ask(count, on, answered=yes or not provider.costs_money)
        resources = find_resources(config, file)
        source = JobSource(reference=file, overrides=overrides, path=tuple(sys.path))
        display = make_display(console, quiet=quiet)
        if detach:
            name = launch_detached(source, resources, display, launch=order)
            print(json.dumps({"job": name}) if json_ else detached_words(name))
            return
        summary = launch_run(
            source, resources, display, stdout_fd=2 if json_ else 1, launch=order, end_timeout_s=_END_TIMEOUT_S
        )
        if not quiet:
            console.print(summary_table(summary, resources.config.out))
        if json_:
            print(json.dumps(to_plain_json(summary)))


def _with_all_gpus(
    config: RunConfig, context: typer.Context, options: Mapping[str, str], instances: Sequence[str]
) -> RunConfig:
    """The config with a worker for each GPU of a machine, if their number is known and the user does not say how many
    there are. Raises UsageError if it differs between machines."""
    source = context.get_parameter_source("workers_per_node")
    is_given, used = source is not None and source.name == "COMMANDLINE", config.workers_per_node
    try:
        gpus = gpus_of_machines(options, instances) or 1
    except UsageError:
        if not is_given:
            raise
        return config
    if is_given and gpus > used:
        print(f"culm: warning: machines have {gpus} GPUs, and --workers-per-node {used} uses {used}", file=sys.stderr)
    if is_given or gpus == used:
        return config
    print(f"culm: a node has a worker for each of its {gpus} GPUs: --workers-per-node changes that", file=sys.stderr)
    return dataclasses.replace(config, workers_per_node=gpus)


def _machine_count(config: RunConfig) -> int:
    """How many machines the run needs. Raises UsageError if the options do not say it."""
    if config.nodes is not None:
        return config.nodes
    if config.pipelines is not None and config.stages is not None:
        return config.pipelines * config.stages // config.workers_per_node
    raise UsageError("--nodes is missing: say how many machines to start, as in --nodes 4")


def _price_limit(max_price: float | None) -> float | None:
    """The value of --max-price. Raises UsageError unless it can be a price."""
    if max_price is not None and not 0 < max_price < math.inf:
        raise UsageError(f"--max-price is {max_price:g}: use dollars per hour above 0")
    return max_price


def _known_price(price: float | None, kinds: int) -> float | None:
    """The value of --price. Raises UsageError unless it can be the price of one kind of machine."""
    if price is None:
        return None
    if not 0 <= price < math.inf:
        raise UsageError(f"--price is {price:g}: use dollars per hour of a machine, 0 or more")
    if kinds > 1:
        raise UsageError(
            f"--price is {price:g}, and {kinds} kinds of machines may be used: leave it out, or name one --instance "
            "and --zone, and --deadline without --spot"
        )
    return price


def _environment(given: Sequence[str]) -> dict[str, str]:
    """The values of --env. Raises UsageError for a name that is none; warns of what looks like a secret."""
    found = parse_assignments(given, "--env", "NCCL_DEBUG=INFO")
    for name in found:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env names {name!r}, which is no environment variable: use letters, digits and _")
        if _SECRET_NAME.search(name):
            print(
                f"culm: warning: --env {name} is not kept secret: manifests, user data and scripts show it; let the "
                "machines get it from their image, role or service account",
                file=sys.stderr,
            )
    return found


def _check_affordable(provider: MachineProvider, order: LaunchOrder) -> None:
    """Raise UsageError if no machine can ever be had for --max-price; warn if spot prices would have to fall first."""
    max_price = math.inf if order.max_price is None else order.max_price
    known = [price for request in order.requests if (price := provider.price(request)) is not None]
    if max_price == math.inf or any(price <= max_price for price in known):
        return
    if not known:
        raise UsageError(
            f"--max-price is {max_price:g}, and no price of these machines is known: leave it out, or name another "
            "--instance" + (" or --option price" if "price" in provider.options else "")
        )
    words = f"--max-price is {max_price:g}, and the cheapest of these machines costs ${min(known):.3f}/h"
    if all(request.market == "on-demand" for request in order.requests):
        raise UsageError(f"{words}: allow more, or use --spot")
    print(f"culm: warning: {words} now: none is started before a price falls", file=sys.stderr)


def _warn_of_own_disks(provider: MachineProvider, out: str | None) -> None:
    """Warn before money is spent for a run that cannot save: machines of clouds rarely share a folder."""
    if provider.costs_money and out is not None and "://" not in out:
        print(
            f"culm: warning: --out is {out!r}, a folder that all machines on {provider.name} must share at this path: "
            "name a bucket, as in s3://bucket/runs/a, if they share none",
            file=sys.stderr,
        )


def _instances(
    names: str, provider: str, options: Mapping[str, str], config: RunConfig, *, spot: bool, any_: bool
) -> Sequence[str]:
    """The instance types to choose from. Raises UsageError."""
    if not any_:
        return _names(names)
    if names:
        raise UsageError(f"--any and --instance {names} are both given: leave one out")
    return suitable_instances(provider, options, gpus=config.workers_per_node, memory=config.memory, spot=spot)


def _checked(
    provider: MachineProvider, requests: Sequence[MachineRequest], count: int, *, any_: bool, dry_run: bool
) -> tuple[tuple[MachineRequest, ...], str]:
    """The requests that the provider can serve, and why they could not be checked (empty: they were).

    Raises its UsageError for the first one that it refuses, unless the user leaves the choice to culm and it serves
    another one. A dry run needs neither programs nor credentials of the engine.
    """
    served: list[MachineRequest] = []
    refusals: list[UsageError] = []
    for request in requests:
        try:
            provider.check(msgspec.structs.replace(request, count=count))
            served.append(request)
        except (EngineMissing, RunError) as missing:
            if not dry_run:
                raise
            return tuple(requests), str(missing)
        except UsageError as refusal:
            refusals.append(refusal)
    if refusals and not (any_ and served):
        raise refusals[0]
    return tuple(served), ""


def _markets(config: RunConfig, *, spot: bool) -> Sequence[Market]:
    """The markets to rent from, the usual one first. A deadline may need on-demand machines."""
    if not spot:
        return ("on-demand",)
    return ("spot",) if config.deadline is None else ("spot", "on-demand")


def _requests(instances: Sequence[str], zones: str, markets: Sequence[Market]) -> tuple[MachineRequest, ...]:
    """A request for one machine of each kind that may be used."""
    return tuple(
        MachineRequest(count=1, instance=instance, zone=zone, market=market)
        for market in markets
        for instance in instances
        for zone in _names(zones)
    )


def _names(text: str) -> Sequence[str]:
    return [name.strip() for name in text.split(",") if name.strip()] or [""]


def _program(provider: str, given: str | None) -> tuple[str, ...]:
    if given is not None:
        try:
            words = tuple(shlex.split(given))
        except ValueError as error:
            raise UsageError(f"--program is {given!r}: {error}") from None
        if not words:
            raise UsageError("--program is empty: name the command that runs culm, as in /opt/culm/bin/culm")
        return words
    return (sys.executable, "-m", "culm") if provider in _SAME_FILES else ("culm",)


def _launch_name(job: str) -> str:
    """A name that engines accept as a label, and that no other launch has."""
    label = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:_LABEL_LENGTH].strip("-")
    return f"{label or 'job'}-{secrets.token_hex(3)}"


def _lowest_prices(provider: MachineProvider, order: LaunchOrder) -> dict[Market, float]:
    """Dollars per hour of the cheapest machine of each market whose price is known."""
    found: dict[Market, float] = {}
    for request in order.requests:
        price = provider.price(request)
        if price is not None:
            found[request.market] = min(price, found.get(request.market, math.inf))
    return found


def _print_dry_run(
    provider: MachineProvider,
    order: LaunchOrder,
    count: int,
    unchecked: str,
    *,
    config: RunConfig,
    load: Callable[[], Job],
    json_: bool,
) -> None:
    """Print what would be requested first, all machines of the cheapest kind, and the odds of the limits."""
    odds: dict[str, object] = {}
    if config.deadline is not None or config.budget is not None:
        from culm.cli.launching.launch_odds import odds_or_reason

        odds, words = odds_or_reason(load, config, order, count, _lowest_prices(provider, order))
        print(f"culm: {words}", file=sys.stderr)
    prices = [provider.price(request) for request in order.requests]
    best = min(range(len(prices)), key=lambda index: math.inf if prices[index] is None else prices[index] or 0.0)
    text = _manifest(provider, order, order.requests[best], count)
    if unchecked:
        print(f"culm: warning: this is not checked: {unchecked}", file=sys.stderr)
    if not json_:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    offers = [
        {**msgspec.structs.asdict(request), "count": count, "usd_per_h": price}
        for request, price in zip(order.requests, prices, strict=True)
    ]
    price = prices[best]
    cost = None if price is None else price * count
    shown = {"provider": provider.name, "cost_per_h": cost, "offers": offers, "manifest": text}
    print(json.dumps(shown | ({"odds": odds} if odds else {})))


def _manifest(provider: MachineProvider, order: LaunchOrder, one: MachineRequest, count: int) -> str:
    """The manifest for so many machines of a kind, without the token."""
    spec = LaunchSpec(
        launch=order.launch,
        job=order.job,
        token="***",
        program=order.program,
        image=order.image,
        notice=order.notice,
        grace_s=order.grace_s,
        abandon_after_s=order.abandon_after_s,
        environment=order.environment,
        prices=known_prices((each, provider.price(each)) for each in order.requests),
    )
    return provider.manifest(spec, msgspec.structs.replace(one, count=count))


def _ask(count: int, on: str, *, answered: bool) -> None:
    """Ask whether to spend money. Raises UsageError if the answer is not yes."""
    if answered:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"--on {on} costs money, and there is no terminal to ask on: add --yes")
    if not typer.confirm(f"start {count} machines on {on}?", default=False):
        raise UsageError("nothing was started")
