"""Machine providers by name, or as MODULE:CLASS of the user. Modules are imported when they are used."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import cast

import msgspec

from culm.errors import USER_EXCEPTIONS, UsageError, message_suffix
from culm.machines.machine_provider import Machine, MachineProvider, MachineRequest, ProviderSettings

_PROVIDERS = {
    "local": "culm.machines.engines.local_machines:LocalMachines",
    "hosts": "culm.machines.engines.ssh_hosts:SshHosts",
    "slurm": "culm.machines.engines.slurm_machines:SlurmMachines",
    "ray": "culm.machines.engines.ray_machines:RayMachines",
    "trace": "culm.machines.engines.trace_machines:TraceMachines",
    "kubernetes": "culm.machines.engines.kubernetes_machines:KubernetesMachines",
    "ec2": "culm.machines.engines.ec2_machines:Ec2Machines",
    "skypilot": "culm.machines.engines.skypilot_machines:SkyPilotMachines",
}


def known_machine_providers() -> tuple[str, ...]:
    """The names that need no MODULE:CLASS."""
    return tuple(_PROVIDERS)


def machine_provider_class(name: str) -> type[MachineProvider]:
    """The class of a name or of MODULE:CLASS. Raises UsageError in one sentence if there is none."""
    reference = _PROVIDERS.get(name, name)
    module, colon, attribute = reference.rpartition(":")
    if not colon:
        close = difflib.get_close_matches(name.lower(), _PROVIDERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(_PROVIDERS)} or MODULE:CLASS"
        raise UsageError(f"there is no --on {name!r}: {hint}")
    if "" not in sys.path:
        sys.path.append("")  # a module of the user in the current folder
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        missing = error.name or module
        raise UsageError(f"--on {name} cannot be used, because the Python module {missing} is missing") from None
    except USER_EXCEPTIONS as error:
        raise UsageError(f"--on {name} cannot be imported{message_suffix(error)}") from error
    if not isinstance(found, type) or not callable(getattr(found, "request", None)):
        raise UsageError(
            f"--on {name} is not a class with the methods of culm.machines.machine_provider.MachineProvider"
        )
    return cast("type[MachineProvider]", found)


def open_machine_provider(name: str, settings: ProviderSettings) -> MachineProvider:
    """A provider for one launch. Raises UsageError for an unknown name or a wrong option."""
    found = machine_provider_class(name)
    for option in settings.options:
        if option not in found.options:
            known = ", ".join(found.options) or "none"
            raise UsageError(f"--option {option}: {name} has no such option, the known ones are {known}")
    return (found if settings.price is None else _at_price(found, settings.price))(settings)


def _at_price(provider: type[MachineProvider], usd_per_h: float) -> type[MachineProvider]:
    """The provider whose machines all cost so much."""

    class PricedMachines(provider):  # type: ignore[valid-type, misc]
        """Machines at a price that the user knows."""

        def price(self, request: MachineRequest) -> float | None:
            del request
            return usd_per_h

        async def machines(self) -> list[Machine]:
            return [msgspec.structs.replace(each, price_per_h=usd_per_h) for each in await super().machines()]

    return PricedMachines
