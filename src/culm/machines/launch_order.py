"""LaunchOrder: what `culm launch` asks the supervisor of a run to do besides the run itself."""

from __future__ import annotations

import msgspec

from culm.machines.machine_provider import MachineRequest


class LaunchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Start machines for a run, keep them while it lasts, and end them afterwards."""

    launch: str
    """Name of the launch."""
    job: str
    """Name of the job in the store."""
    provider: str
    """NAME or MODULE:CLASS."""
    options: dict[str, str] = {}
    """Options of the provider."""
    requests: tuple[MachineRequest, ...]
    """The kinds of machines that may be used, each as a request for one machine."""
    max_price: float | None = None
    """Most dollars per hour of one machine; None: no limit."""
    price: float | None = None
    """Dollars per hour of a machine, as the user says; None: as the provider says."""
    address: str = ""
    """Where machines reach the store that is started for the launch; empty: it is found."""
    port: int = 0
    """Port of that store; 0: a free one."""
    program: tuple[str, ...] = ("culm",)
    image: str = ""
    notice: str = "none"
    grace_s: float = 30.0
    abandon_after_s: float = 900.0
    join_within_s: float = 900.0
    environment: dict[str, str] = {}
