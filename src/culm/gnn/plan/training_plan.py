"""A plan: servers, intervals, workers, the cost of a training epoch, and whether another system has a better value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from culm.errors import PlanError, UsageError
from culm.gnn.plan.epoch_forecast import (
    Forecast,
    ForecastInputs,
    best_elastic_forecast,
    fewest_servers,
    forecast_cpu,
    forecast_elastic,
    forecast_gpu,
    forecast_sampling,
)
from culm.gnn.plan.gnn_prices import InstancePrice, WorkerPrice

MAX_SERVERS = 4096


@dataclass(frozen=True)
class GnnPlan:
    """The elastic plan, the forecasts of other systems for the same training, and the reasons for the best one."""

    inputs: ForecastInputs
    elastic: Forecast
    others: tuple[Forecast, ...]
    reasons: tuple[str, ...]

    @property
    def systems(self) -> dict[str, Forecast]:
        """Forecasts by name, the elastic one first."""
        return {forecast.system: forecast for forecast in (self.elastic, *self.others)}

    @property
    def best(self) -> Forecast:
        """The forecast with the best value among systems that train on the whole graph."""
        return best_value((self.elastic, *self.others))

    def value_gain(self, system: str) -> float:
        """Return the value of the elastic system relative to that of `system`."""
        return self.elastic.value / self.systems[system].value


def choose_plan(
    inputs: ForecastInputs,
    *,
    instance: str = "c5n.2xlarge",
    servers: int | None = None,
    workers: int | None = None,
    gpu_instance: str | None = None,
    gpu_servers: int | None = None,
) -> GnnPlan:
    """Plan a training on that instance type. Missing numbers are chosen: the fewest servers that hold the graph, and
    the number of workers with the best value.

    Raises UsageError for an unknown instance type, PlanError if no number of machines holds the graph.
    """
    machine = _check_cpu_only(inputs.prices.machine(instance))
    servers = _check_count("servers", servers) or _fewest_servers(inputs, machine)
    given_workers = _check_count("workers", workers)
    forecast = (
        forecast_elastic(inputs, machine, servers, given_workers)
        if given_workers
        else best_elastic_forecast(inputs, machine, servers)
    )
    on_gpus = _best_gpu(inputs, gpu_instance, _check_count("gpu_servers", gpu_servers))
    others = (
        forecast_cpu(inputs, machine, servers),
        _cpu_at_equal_cost(inputs, machine, forecast),
        *([on_gpus] if on_gpus else []),
        forecast_sampling(inputs, machine, servers),
    )
    return GnnPlan(inputs, forecast, others, _explain(inputs, forecast, others))


def best_value(systems: tuple[Forecast, ...]) -> Forecast:
    """Return the forecast with the best value. Sampling is left out: it is a different training, and the model does
    not predict its accuracy."""
    return max(
        (candidate for candidate in systems if candidate.system != "sampling"), key=lambda candidate: candidate.value
    )


def with_instance_workers(inputs: ForecastInputs, machine: InstancePrice) -> ForecastInputs:
    """Return inputs whose workers are vCPUs of such machines (a Ray cluster) instead of Lambda: priced by the hour,
    as spot if a spot price is known, with their share of the machine's network."""
    hourly = machine.hourly_usd(spot=machine.spot_usd_h is not None)
    per_second = WorkerPrice(usd_gb_s=hourly / 3600 / machine.vcpus, usd_request=0.0)
    share = machine.gbps * 1e9 / 8 * inputs.rates.network / machine.vcpus
    rates = replace(
        inputs.rates, worker_bytes=share, worker_dense=inputs.rates.dense, worker_gb=1.0, worker_life_s=900.0
    )
    return replace(inputs, rates=rates, prices=replace(inputs.prices, elastic=per_second))


def _check_cpu_only(machine: InstancePrice) -> InstancePrice:
    if machine.gpus:
        raise UsageError(f"instance is {machine.instance}, which has GPUs: graph servers need a CPU instance")
    return machine


def _check_count(name: str, count: int | None) -> int | None:
    if count is not None and count < 1:
        raise UsageError(f"{name} is {count}: give a number of at least 1")
    return count


def _fewest_servers(inputs: ForecastInputs, machine: InstancePrice) -> int:
    servers = fewest_servers(inputs, machine)
    if servers > MAX_SERVERS:
        raise PlanError(
            f"{inputs.shape.name} needs {servers} of {machine.instance} to hold it in memory: use a larger instance"
        )
    return servers


def _cpu_at_equal_cost(inputs: ForecastInputs, machine: InstancePrice, forecast: Forecast) -> Forecast:
    """Forecast additional servers instead of workers: as many as cost the same per hour, but not fewer than in
    `forecast`."""
    hourly = forecast.epoch_usd / forecast.epoch_s
    servers = max(forecast.servers, round(hourly / inputs.server_cost_usd(machine, 1, 1.0)))
    return replace(forecast_cpu(inputs, machine, servers), system="cpu-same-money")


def _best_gpu(inputs: ForecastInputs, instance: str | None, servers: int | None) -> Forecast | None:
    """Forecast that instance type, or the one with the best value among those with one GPU; None if there is none.

    Machines with several GPUs are only considered by name: their value grows with the number of GPUs, as it would with
    the number of servers.
    """
    if instance:
        kinds = [inputs.prices.machine(instance)]
    else:
        kinds = [m for m in inputs.prices.machines.values() if m.gpus == 1 and _has_price(inputs, m)]
    usable = [machine for machine in kinds if machine.gpu in inputs.rates.devices]
    if instance and not usable:
        raise UsageError(f"gpu is {instance}: no rates of its GPU are known; omit it, or use another instance")
    forecast = [forecast_gpu(inputs, machine, servers or fewest_servers(inputs, machine)) for machine in usable]
    return max(forecast, key=lambda candidate: candidate.value, default=None)


def _has_price(inputs: ForecastInputs, machine: InstancePrice) -> bool:
    return not inputs.spot or machine.spot_usd_h is not None


def _explain(inputs: ForecastInputs, forecast: Forecast, others: tuple[Forecast, ...]) -> tuple[str, ...]:
    work, split = inputs.work, forecast.split
    slowest = max(split, key=split.__getitem__)
    best = best_value((forecast, *others))
    cpu = next(candidate for candidate in others if candidate.system == "cpu")
    ratio, cost_ratio = (
        cpu.epoch_s / (forecast.epoch_s * forecast.epochs),
        forecast.epoch_usd * forecast.epochs / cpu.epoch_usd,
    )
    return (
        f"tensor work is {work.ratio:.3g} times the graph work: {work.macs:.3g} multiply-adds, "
        f"{work.gather:.3g} gathered elements",
        f"the longest part of an elastic epoch is {slowest}, {split[slowest]:.3g} s of {forecast.epoch_s:.3g}",
        f"compared with CPUs alone it is {ratio:.2f}x as fast to the same accuracy, for {cost_ratio:.2f}x the cost",
        f"best value on the whole graph: {best.system} on {best.servers} x {best.instance}",
    )
