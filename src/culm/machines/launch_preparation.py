"""Prepare a launch: check what is asked for, and make the order that the supervisor of its run carries out."""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from culm.config import RunConfig, option_name
from culm.errors import RunError, UsageError
from culm.machines.launch_order import LaunchOrder
from culm.machines.machine_gpus import gpus_of_machines
from culm.machines.machine_provider import (
    EngineMissing,
    GpuCounter,
    MachineProvider,
    MachineRequest,
    Market,
    ProviderSettings,
)
from culm.machines.machine_provider_registry import open_machine_provider
from culm.machines.suitable_instances import suitable_instances
from culm.providers.fork_server import GRACE_S
from culm.providers.gpu_workers import workers_for_gpus

NOT_OFFERED = frozenset(
    ["etcd", "etcd_user", "etcd_ca", "etcd_cert", "etcd_key", "join", "job_name", "local_nodes", "address", "ports"]
) | frozenset(["kills", "trace", "speedup", "notice", "secret_file", "instance", "market", "node_price", "max_price"])
"""Fields of RunConfig that a launch decides itself."""
END_TIMEOUT_S = 120.0
"""Limit for ending the machines after a second Ctrl-C."""
ABANDON_AFTER_S = 900.0
_SAME_FILES = ("local", "slurm", "trace")
"""Providers whose machines usually see the files of this one: their agents run with this Python."""
_LABEL_LENGTH = 40
_SECRET_NAME = re.compile(r"(SECRET|TOKEN|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY)(_|$)", re.IGNORECASE)
"""Names of environment variables that usually hold secrets."""
_START_AFTER_S = 120.0
"""When a run begins without the machines that have not come yet."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """What a launch asks for besides the run itself: the options of `culm launch`."""

    on: str
    """NAME or MODULE:CLASS of the provider."""
    job: str
    """Name of the job in the store."""
    launch_name: str | None = None
    spot: bool = False
    instances: Sequence[str] = ()
    """Instance types to choose from; empty: whatever the provider has."""
    any_instance: bool = False
    zones: Sequence[str] = ()
    """Zones to choose from; empty: the provider decides."""
    max_price: float | None = None
    price: float | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the provider."""
    program: str | None = None
    image: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    machine_notice: str = "none"
    grace_s: float = GRACE_S
    abandon_after_s: float = ABANDON_AFTER_S
    address: str = ""
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class PreparedLaunch:
    """A launch that can be started."""

    config: RunConfig
    order: LaunchOrder
    provider: MachineProvider
    machines: int
    """How many machines the run needs."""
    unchecked: str
    """Why the engine could not be asked whether it has such machines; empty: it was asked."""


def launch_config(config: RunConfig) -> RunConfig:
    """The config of a launched run: when it begins, and what nodes of this machine cost. Raises UsageError for a field
    that the launch decides itself."""
    default = RunConfig()
    for name in sorted(NOT_OFFERED - {"join", "node_price"}):
        if getattr(config, name) != getattr(default, name):
            raise UsageError(f"{option_name(name)} is given in the config: a launch decides it itself, leave it out")
    changes: dict[str, float] = {}
    if config.start_after is None:
        changes["start_after"] = _START_AFTER_S
    if config.budget is not None:
        changes["node_price"] = 0.0  # of nodes of this machine; those of the provider report their own price
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def prepare_launch(
    settings: LaunchSettings,
    config: RunConfig,
    *,
    warn: Callable[[str], None],
    note: Callable[[str], None],
    dry_run: bool = False,
) -> PreparedLaunch:
    """Check a launch and make its order. Starts nothing. `warn` and `note` are called with sentences. A dry run needs
    neither programs nor credentials of the engine.

    Raises UsageError for what cannot work, and RunError if the engine does not answer.
    """
    config = with_all_gpus(config, settings, warn, note)
    markets: Sequence[Market] = _markets(config, spot=settings.spot)
    requests = _requests(_instances(settings, config), settings.zones, markets)
    order = LaunchOrder(
        launch=settings.launch_name or launch_name(settings.job),
        job=settings.job,
        provider=settings.on,
        options=dict(settings.options),
        requests=requests,
        max_price=_price_limit(settings.max_price),
        price=_known_price(settings.price, len(requests)),
        address=settings.address,
        port=settings.port,
        program=agent_program(settings.on, settings.program),
        image=settings.image,
        notice=settings.machine_notice,
        grace_s=settings.grace_s,
        abandon_after_s=settings.abandon_after_s,
        environment=_environment(settings.environment, warn),
    )
    provider = open_machine_provider(
        settings.on, ProviderSettings(launch=order.launch, options=order.options, price=order.price)
    )
    config = _with_reported_gpus(config, provider, warn, note)
    count = machine_count(config)
    requests, unchecked = check_requests(provider, order.requests, count, any_=settings.any_instance, dry_run=dry_run)
    order = msgspec.structs.replace(order, requests=requests)
    return PreparedLaunch(config=config, order=order, provider=provider, machines=count, unchecked=unchecked)


def check_prepared(prepared: PreparedLaunch, warn: Callable[[str], None]) -> None:
    """Raise UsageError if no machine can ever be had for the highest price; warn of what would be regretted later."""
    _check_affordable(prepared.provider, prepared.order, warn)
    _warn_of_own_disks(prepared.provider, prepared.config.out, warn)


def with_all_gpus(
    config: RunConfig, settings: LaunchSettings, warn: Callable[[str], None], note: Callable[[str], None]
) -> RunConfig:
    """The config with a worker for each GPU of a machine, if the request says how many it has and the user does not say
    how many workers there are. Raises UsageError if the named instance types differ."""
    given = config.workers_per_node
    try:
        gpus = gpus_of_machines(settings.options, settings.instances)
    except UsageError:
        if given is None:
            raise
        return config
    if given is not None and gpus is not None and gpus > given:
        warn(f"machines have {gpus} GPUs, and --workers-per-node {given} uses {given}")
    return config if gpus is None else _with_workers_for(config, gpus, note)


def _with_reported_gpus(
    config: RunConfig, provider: MachineProvider, warn: Callable[[str], None], note: Callable[[str], None]
) -> RunConfig:
    """The config with a worker for each GPU that the machines of the provider report; 1 where nobody knows it."""
    if config.workers_per_node is not None or not isinstance(provider, GpuCounter):
        return _with_workers_for(config, 1, note)
    counts = provider.gpus_of_machines()
    if len(set(counts.values())) > 1:
        words = ", ".join(f"{name} has {count}" for name, count in counts.items())
        warn(f"machines have different numbers of GPUs ({words}): all nodes have as many workers as the fewest")
    return _with_workers_for(config, min(counts.values(), default=1), note)


def _with_workers_for(config: RunConfig, gpus: int, note: Callable[[str], None]) -> RunConfig:
    """The config with a worker for each GPU, unless it says how many there are."""
    if config.workers_per_node is not None:
        return config
    workers = workers_for_gpus(config, gpus)
    if workers > 1:
        note(
            f"a node has a worker for each of its {gpus} GPUs: --workers-per-node changes that"
            if workers == gpus
            else f"a node has {workers} workers, on {gpus} GPUs: --workers-per-node changes that"
        )
    return dataclasses.replace(config, workers_per_node=workers)


def machine_count(config: RunConfig) -> int:
    """How many machines the run needs. Raises UsageError if the options do not say it."""
    if config.nodes is not None:
        return config.nodes
    if config.pipelines is not None and config.stages is not None:
        return config.pipelines * config.stages // config.node_workers
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


def _environment(given: Mapping[str, str], warn: Callable[[str], None]) -> dict[str, str]:
    """The values of --env. Raises UsageError for a name that is none; warns of what looks like a secret."""
    for name in given:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--env names {name!r}, which is no environment variable: use letters, digits and _")
        if _SECRET_NAME.search(name):
            warn(
                f"--env {name} is not kept secret: manifests, user data and scripts show it; let the machines get it "
                "from their image, role or service account"
            )
    return dict(given)


def _check_affordable(provider: MachineProvider, order: LaunchOrder, warn: Callable[[str], None]) -> None:
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
    warn(f"{words} now: none is started before a price falls")


def _warn_of_own_disks(provider: MachineProvider, out: str | None, warn: Callable[[str], None]) -> None:
    """Warn before money is spent for a run that cannot save: machines of clouds rarely share a folder."""
    if provider.costs_money and out is not None and "://" not in out:
        warn(
            f"--out is {out!r}, a folder that all machines on {provider.name} must share at this path: name a bucket, "
            "as in s3://bucket/runs/a, if they share none"
        )


def _instances(settings: LaunchSettings, config: RunConfig) -> Sequence[str]:
    """The instance types to choose from. Raises UsageError."""
    if not settings.any_instance:
        return settings.instances
    if settings.instances:
        raise UsageError(f"--any and --instance {','.join(settings.instances)} are both given: leave one out")
    return suitable_instances(
        settings.on, settings.options, gpus=config.node_workers, memory=config.memory, spot=settings.spot
    )


def check_requests(
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


def _requests(instances: Sequence[str], zones: Sequence[str], markets: Sequence[Market]) -> tuple[MachineRequest, ...]:
    """A request for one machine of each kind that may be used."""
    return tuple(
        MachineRequest(count=1, instance=instance, zone=zone, market=market)
        for market in markets
        for instance in instances or ("",)
        for zone in zones or ("",)
    )


def agent_program(provider: str, given: str | None) -> tuple[str, ...]:
    """The command that runs culm on a machine. Raises UsageError."""
    if given is not None:
        try:
            words = tuple(shlex.split(given))
        except ValueError as error:
            raise UsageError(f"--program is {given!r}: {error}") from None
        if not words:
            raise UsageError("--program is empty: name the command that runs culm, as in /opt/culm/bin/culm")
        return words
    return (sys.executable, "-m", "culm") if provider in _SAME_FILES else ("culm",)


def launch_name(job: str) -> str:
    """A name that engines accept as a label, and that no other launch has."""
    label = re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")[:_LABEL_LENGTH].strip("-")
    return f"{label or 'job'}-{secrets.token_hex(3)}"
