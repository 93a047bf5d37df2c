"""MachineProvider: where the machines of a run come from (`culm launch --on NAME`).

The unit is one agent on one machine that joins a run. A lost machine never restarts the others, so a provider starts N
machines one by one, not as a group. It does not decide how many machines there should be, and it does not replace lost
ones unless its engine does so by itself: `fleet_controller` decides, `machine_fleet` asks the provider.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from culm.errors import UsageError
from culm.machines.join_token import TOKEN_VARIABLE

Market: TypeAlias = Literal["spot", "on-demand"]
MachineState: TypeAlias = Literal["pending", "running", "ended"]
MACHINE_VARIABLE = "CULM_MACHINE"
"""Environment variable with the id of the machine, which its agent reports to the run (`culm agent --machine`)."""
LABEL = "culm-launch"
"""Name of the tag or label that everything of a launch carries; its value is the name of the launch."""


class EngineMissing(UsageError):
    """What the engine needs on this machine is missing: its programs, libraries, or credentials. The request itself may
    be right, so `--dry-run` can print it."""


class MachineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for machines of one kind."""

    count: int
    instance: str = ""
    """Instance type, in the words of the engine; empty: whatever the engine has."""
    market: Market = "on-demand"
    zone: str = ""
    """Empty: any."""
    labels: dict[str, str] = {}
    """Further labels for the machines, where the engine has labels."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a launch, as its engine describes it."""

    id: str
    """Unique in the launch and never used again; the agent on it has it in MACHINE_VARIABLE."""
    state: MachineState
    instance: str = ""
    zone: str = ""
    market: Market = "on-demand"
    price_per_h: float | None = None
    """Dollars per hour; None: not known, or it costs nothing."""
    started_at: float = 0.0
    """Unix time of the request or of the start."""
    reason: str = ""
    """Why it has ended, or what it waits for, in a few words; empty: not known."""
    failed: bool = False
    """Whether it ended by an error of its own that is likely to repeat, such as an agent that was refused."""


class MachineNotice(NamedTuple):
    """An engine has announced that it will take a machine away."""

    id: str
    deadline_s: float
    """Seconds from now."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """Everything that a machine needs to join the run of a launch."""

    launch: str
    """Name of the launch: a word of lower case letters, digits and dashes. The value of LABEL."""
    job: str
    """Name of the job in the store."""
    token: str = field(repr=False)
    """Join token: a secret. It reaches machines through `secret_environment`, never in arguments or logs."""
    program: tuple[str, ...] = ("culm",)
    """The command that runs culm on a machine, as in ("/opt/culm/bin/python", "-m", "culm")."""
    image: str = ""
    """Container image or machine image, where the engine needs one."""
    notice: str = "none"
    """Where the agent learns of preemptions besides SIGTERM: see `culm agent --notice`."""
    grace_s: float = 30.0
    """Seconds that the agent has after SIGTERM to hand over its state."""
    wait_s: float = 600.0
    """How long an agent waits for the job to be started."""
    abandon_after_s: float = 900.0
    """Dead-man's switch: an agent ends when it has not reached the store of the run for this long, and its machine with
    it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the agent; not secret."""
    prices: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    """Dollars per hour by (instance, market, zone) of a request: agents report them to the run, which adds them up."""

    @property
    def secret_environment(self) -> dict[str, str]:
        """Environment variables of the agent that must stay private: pass them by a secret file, by standard input
        or by the engine's own means for secrets."""
        return {TOKEN_VARIABLE: self.token}

    def agent_command(self, request: MachineRequest, *, zone: str = "") -> tuple[str, ...]:
        """The command that joins the run from a machine of a request. It holds no secret. `zone`: of the machine."""
        arguments = ["agent", "--join", "env", "--job", self.job, "--notice", self.notice]
        arguments += ["--grace", f"{self.grace_s:g}", "--wait", f"{self.wait_s:g}"]
        arguments += ["--abandon-after", f"{self.abandon_after_s:g}", "--idle-timeout", "0"]  # the launcher releases it
        price = self.prices.get((request.instance, request.market, request.zone))
        if price is not None:
            arguments += ["--market", request.market, "--price", f"{price:g}"]
            arguments += ["--instance", request.instance] if request.instance else []
        zone = zone or request.zone
        return (*self.program, *arguments, *(["--zone", zone] if zone else []))

    def agent_command_line(self, request: MachineRequest, *, zone: str = "") -> str:
        """The command as one line for a POSIX shell."""
        return shlex.join(self.agent_command(request, zone=zone))


def known_prices(
    offers: Iterable[tuple[MachineRequest, float | None]],
) -> dict[tuple[str, str, str], float]:
    """The prices of a LaunchSpec, from requests and what such a machine costs."""
    return {(request.instance, request.market, request.zone): price for request, price in offers if price is not None}


@dataclass(frozen=True, kw_only=True)
class ProviderSettings:
    """How to open a provider: all that is needed to find and remove the machines of a launch later."""

    launch: str
    """Name of the launch."""
    folder: str = ""
    """An existing folder of this launch on this machine, readable by its owner only, for files of the provider."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of this provider, as given with --option NAME=VALUE."""
    price: float | None = None
    """Dollars per hour of a machine, as the user says; None: as the provider says."""


@runtime_checkable
class GpuCounter(Protocol):
    """A provider that can say how many GPUs its machines have before they are started."""

    def gpus_of_machines(self) -> Mapping[str, int]:
        """GPUs that a machine has for its agent, by name of the machine, as far as they are known."""


class MachineProvider(Protocol):
    """Starts, lists and ends the machines of one launch. All calls may be repeated after a failure.

    Raises UsageError for a request that cannot work, and RunError if the engine refuses or does not answer.
    """

    name: ClassVar[str]
    """The NAME of `culm launch --on NAME`."""
    options: ClassVar[Mapping[str, str]]
    """The names of its options, each with a help text."""
    costs_money: ClassVar[bool]
    """Whether a launch asks the user before it starts machines."""

    def __init__(self, settings: ProviderSettings) -> None:
        """Open nothing yet. Raises UsageError for a wrong option."""

    def check(self, request: MachineRequest) -> None:
        """Raise UsageError if the engine does not have such machines, and EngineMissing if its programs, libraries or
        credentials are missing here. `request` has the number of machines that the run wants. Starts nothing."""

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        """What `--dry-run` prints: the manifest, script or request for these machines, complete but without secrets. It
        needs nothing of the engine."""

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        """Ask for machines; returns their ids without waiting until they run. Fewer than asked for: the engine has no
        more at the moment."""

    async def machines(self) -> list[Machine]:
        """All machines of the launch. A machine that has ended may be left out after it was listed as ended."""

    async def drain(self, ids: list[str], notice_s: float) -> None:
        """Give machines a notice: their agents hand over their state and end within `notice_s` seconds, when the
        machines end. Machines that have ended are no error. An agent takes the seconds from the file that
        CULM_NOTICE_FILE names, else from its option --grace."""

    async def release(self, ids: list[str]) -> None:
        """End machines at once. Machines that have ended are no error."""

    def notices(self) -> AsyncIterator[MachineNotice]:
        """Announcements of the engine about machines, as they come. Their agents may not know of them: the caller
        passes them on with `drain`."""

    def price(self, request: MachineRequest) -> float | None:
        """Dollars per hour of one such machine now; 0: it costs nothing; None: not known."""

    async def down(self) -> None:
        """End and remove everything that carries the label of the launch: machines, secrets, files. Idempotent."""


async def no_notices() -> AsyncIterator[MachineNotice]:
    """The notices of an engine that announces nothing to others than the machine itself."""
    return
    yield
