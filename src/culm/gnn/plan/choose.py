"""A plan: how many servers, intervals and workers, what an epoch costs, and whether another way is worth more."""

from __future__ import annotations

from dataclasses import dataclass, replace

from culm.errors import PlanError, UsageError
from culm.gnn.plan.forecast import Forecast, Setting, best_elastic, cpu, elastic, gpu, sampling, servers_for
from culm.gnn.price import Elastic, Machine

MOST_SERVERS = 4096


@dataclass(frozen=True)
class Plan:
    """The elastic plan beside the other ways to train the same, and why the best is the best."""

    setting: Setting
    elastic: Forecast
    others: tuple[Forecast, ...]
    why: tuple[str, ...]

    @property
    def systems(self) -> dict[str, Forecast]:
        """By name, the elastic one first."""
        return {found.system: found for found in (self.elastic, *self.others)}

    @property
    def best(self) -> Forecast:
        """The one with the best value, out of those that train on the whole graph."""
        return best_of((self.elastic, *self.others))

    def gain(self, system: str) -> float:
        """How many times the value of that system the elastic one has."""
        return self.elastic.value / self.systems[system].value


def plan(
    setting: Setting,
    *,
    instance: str = "c5n.2xlarge",
    servers: int | None = None,
    workers: int | None = None,
    gpu_instance: str | None = None,
    gpu_servers: int | None = None,
) -> Plan:
    """The plan on that instance; numbers that are not given are chosen: as few servers as hold the graph, and as many
    workers as give the best value. Raises UsageError for unknown instances, PlanError where nothing holds the graph."""
    machine = _with_cpus(setting.prices.machine(instance))
    servers = _given("servers", servers) or _enough(setting, machine)
    asked = _given("workers", workers)
    found = elastic(setting, machine, servers, asked) if asked else best_elastic(setting, machine, servers)
    on_gpus = _best_gpu(setting, gpu_instance, _given("gpu_servers", gpu_servers))
    others = (
        cpu(setting, machine, servers),
        _for_the_same_money(setting, machine, found),
        *([on_gpus] if on_gpus else []),
        sampling(setting, machine, servers),
    )
    return Plan(setting, found, others, _why(setting, found, others))


def best_of(systems: tuple[Forecast, ...]) -> Forecast:
    """Sampling is left out: it is another training, and whether it gets as far is not this model's to say."""
    return max((one for one in systems if one.system != "sampling"), key=lambda one: one.value)


def on_instances(setting: Setting, machine: Machine) -> Setting:
    """The same with workers that are vCPUs of such machines (a Ray cluster) instead of Lambda: priced by the hour, as
    spot where a spot price is known, with their share of the machine's network."""
    hourly = machine.hourly(spot=machine.spot_usd_h is not None)
    per_second = Elastic(usd_gb_s=hourly / 3600 / machine.vcpus, usd_request=0.0)
    share = machine.gbps * 1e9 / 8 * setting.rates.network / machine.vcpus
    rates = replace(
        setting.rates, worker_bytes=share, worker_dense=setting.rates.dense, worker_gb=1.0, worker_life_s=900.0
    )
    return replace(setting, rates=rates, prices=replace(setting.prices, elastic=per_second))


def _with_cpus(machine: Machine) -> Machine:
    if machine.gpus:
        raise UsageError(f"instance is {machine.instance}, which has GPUs: graph servers are CPU machines")
    return machine


def _given(name: str, count: int | None) -> int | None:
    if count is not None and count < 1:
        raise UsageError(f"{name} is {count}: give a number of at least 1")
    return count


def _enough(setting: Setting, machine: Machine) -> int:
    servers = servers_for(setting, machine)
    if servers > MOST_SERVERS:
        raise PlanError(
            f"{setting.shape.name} needs {servers} of {machine.instance} to be held in memory: take a larger instance"
        )
    return servers


def _for_the_same_money(setting: Setting, machine: Machine, found: Forecast) -> Forecast:
    """More servers instead of workers: as many as cost the same an hour, at least."""
    hourly = found.epoch_usd / found.epoch_s
    servers = max(found.servers, round(hourly / setting.usd(machine, 1, 1.0)))
    return replace(cpu(setting, machine, servers), system="cpu-same-money")


def _best_gpu(setting: Setting, instance: str | None, servers: int | None) -> Forecast | None:
    """On that machine, or on the kind with the best value out of those with one GPU; None where there are none.

    Machines with several are left out unless named: value grows with their number, as it would with that of servers.
    """
    if instance:
        kinds = [setting.prices.machine(instance)]
    else:
        kinds = [m for m in setting.prices.machines.values() if m.gpus == 1 and _priced(setting, m)]
    usable = [machine for machine in kinds if machine.gpu in setting.rates.devices]
    if instance and not usable:
        raise UsageError(f"gpu is {instance}: no rates of a GPU in it are known; leave it out, or take another")
    found = [gpu(setting, machine, servers or servers_for(setting, machine)) for machine in usable]
    return max(found, key=lambda one: one.value, default=None)


def _priced(setting: Setting, machine: Machine) -> bool:
    return not setting.spot or machine.spot_usd_h is not None


def _why(setting: Setting, found: Forecast, others: tuple[Forecast, ...]) -> tuple[str, ...]:
    work, split = setting.work, found.split
    slowest = max(split, key=split.__getitem__)
    best = best_of((found, *others))
    plain = next(one for one in others if one.system == "cpu")
    ratio, dearer = plain.epoch_s / (found.epoch_s * found.epochs), found.epoch_usd * found.epochs / plain.epoch_usd
    return (
        f"tensor work is {work.ratio:.3g} times the graph work: {work.macs:.3g} multiply-adds, "
        f"{work.gather:.3g} gathered elements",
        f"the longest part of an elastic epoch is {slowest}, {split[slowest]:.3g} s of {found.epoch_s:.3g}",
        f"beside CPUs alone it is {ratio:.2f}x as fast to the same accuracy, for {dearer:.2f}x the money",
        f"best value on the whole graph: {best.system} on {best.servers} x {best.instance}",
    )
