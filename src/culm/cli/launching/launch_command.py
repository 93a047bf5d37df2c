"""`culm launch`: start machines, train a job on them, replace lost ones, and end all of them."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
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
from culm.errors import UsageError
from culm.job import Job, find_job_file, import_root, load_job, parse_overrides
from culm.machines.launch_order import LaunchOrder
from culm.machines.launch_preparation import (
    ABANDON_AFTER_S,
    END_TIMEOUT_S,
    NOT_OFFERED,
    LaunchSettings,
    PreparedLaunch,
    agent_program,
    check_prepared,
    launch_config,
    machine_count,
    prepare_launch,
    with_all_gpus,
)
from culm.machines.launch_preparation import launch_name as new_launch_name
from culm.machines.machine_provider import LaunchSpec, MachineProvider, MachineRequest, Market, known_prices
from culm.machines.machine_provider_registry import known_machine_providers, machine_provider_class
from culm.observe.writers.run_folder import to_plain_json
from culm.providers.execute_run import find_resources
from culm.providers.fork_server import GRACE_S, JobSource
from culm.strategies.registry import add_search_folders

_FIELDS = tuple(field.name for field in dataclasses.fields(RunConfig) if field.name not in NOT_OFFERED)
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
    ] = ABANDON_AFTER_S,
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
        config = launch_config(build_config({**options, **({} if join is None else {"join": join})}))
        job_file = find_job_file(file)
        add_search_folders(import_root(job_file), job_file.parent)
        overrides = job_overrides(set_ or [], steps=steps, seed=seed, exact=exact or None)
        parse_overrides(overrides)
        settings = LaunchSettings(
            on=on,
            job=check_job_name(job_name or job_file.stem),
            launch_name=launch_name,
            spot=spot,
            instances=_names(instance),
            any_instance=any_,
            zones=_names(zone),
            max_price=max_price,
            price=price,
            options=parse_assignments(option or [], "--option", "region=us-east-1")
            | ({} if hosts is None else {"hosts": hosts}),
            program=program,
            image=image,
            environment=parse_assignments(env or [], "--env", "NCCL_DEBUG=INFO"),
            machine_notice=machine_notice,
            grace_s=grace,
            abandon_after_s=abandon_after,
            address=address,
            port=port,
        )
        if head is not None:
            if join is not None:
                raise UsageError("--head and --join are both given: the store is on the head, leave one out")
            count = machine_count(with_all_gpus(config, settings, _print_warning, _print_note))
            place = open_head(head, head_ssh, agent_program("", program), new_launch_name(settings.job), settings.job)
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
        prepared = prepare_launch(settings, config, warn=_print_warning, note=_print_note, dry_run=dry_run)
        order, provider, count, config = prepared.order, prepared.provider, prepared.machines, prepared.config
        console = make_console(stderr=json_ or dry_run)
        if not quiet or dry_run:
            console.print(offer_table(provider, order.requests, count))
        check_prepared(prepared, _print_warning)
        if dry_run:
            _print_dry_run(prepared, load=partial(load_job, file, overrides), json_=json_)
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
            source, resources, display, stdout_fd=2 if json_ else 1, launch=order, end_timeout_s=END_TIMEOUT_S
        )
        if not quiet:
            console.print(summary_table(summary, resources.config.out))
        if json_:
            print(json.dumps(to_plain_json(summary)))


def _lowest_prices(provider: MachineProvider, order: LaunchOrder) -> dict[Market, float]:
    """Dollars per hour of the cheapest machine of each market whose price is known."""
    found: dict[Market, float] = {}
    for request in order.requests:
        price = provider.price(request)
        if price is not None:
            found[request.market] = min(price, found.get(request.market, math.inf))
    return found


def _names(text: str) -> Sequence[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _print_warning(text: str) -> None:
    _print_note(f"warning: {text}")


def _print_note(text: str) -> None:
    print(f"culm: {text}", file=sys.stderr)


def _print_dry_run(prepared: PreparedLaunch, *, load: Callable[[], Job], json_: bool) -> None:
    """Print what would be requested first, all machines of the cheapest kind, and the odds of the limits."""
    config, order, provider, count = prepared.config, prepared.order, prepared.provider, prepared.machines
    odds: dict[str, object] = {}
    if config.deadline is not None or config.budget is not None:
        from culm.cli.launching.launch_odds import odds_or_reason

        odds, words = odds_or_reason(load, config, order, count, _lowest_prices(provider, order))
        print(f"culm: {words}", file=sys.stderr)
    prices = [provider.price(request) for request in order.requests]
    best = min(range(len(prices)), key=lambda index: math.inf if prices[index] is None else prices[index] or 0.0)
    text = _manifest(provider, order, order.requests[best], count)
    if prepared.unchecked:
        _print_warning(f"this is not checked: {prepared.unchecked}")
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
