"""The command of an agent whose machine finds out its zone by itself."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from culm.machines.machine_provider import LaunchSpec, MachineRequest


def zoned_command_line(spec: LaunchSpec, request: MachineRequest, zone: str) -> str:
    """The command that joins the run, as a line for a shell. `zone`: a word of the shell that gives the zone."""
    *command, option, _ = spec.agent_command(request, zone="of the machine")
    assert option == "--zone"
    return f"{shlex.join([*command, option])} {zone}"
