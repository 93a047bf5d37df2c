"""Which instance types of a cloud fit a run, for `culm launch --any`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from culm.errors import UsageError
from culm.market import load_catalogue

_CLOUDS = {"ec2": "aws"}
_MOST_OFFERED = 12
"""More kinds than this are not worth asking for: they cost more."""


def suitable_instances(
    provider: str, options: Mapping[str, str], *, gpus: int, memory: int | None, spot: bool
) -> tuple[str, ...]:
    """The instance types with exactly `gpus` GPUs and enough memory on each, cheapest first.

    One worker computes on one GPU, so further GPUs of an instance would be paid for and not used. `memory`: of a
    worker, in bytes; None: any. Raises UsageError if the provider has no instance types of a known cloud, or none fits.
    """
    cloud = _CLOUDS.get(provider) or options.get("infra", "").partition("/")[0]
    if not cloud:
        raise UsageError(f"--any needs the instance types of a cloud, and --on {provider} has none: omit it")
    catalogue = load_catalogue()
    priced = []
    for name in catalogue.names:
        machine = catalogue.find(name)
        price = machine.spot_usd_h if spot else machine.on_demand_usd_h
        fits = machine.gpu_count == gpus and (memory is None or machine.gpu_mem_gib * 2**30 >= memory)
        if machine.cloud == cloud and fits and price is not None:
            priced.append((price, name))
    if not priced:
        raise UsageError(
            f"--any: the catalogue has no instance of {cloud} with {gpus} GPUs, enough memory and a known price: name "
            "types with --instance"
        )
    return tuple(name for _, name in sorted(priced)[:_MOST_OFFERED])
