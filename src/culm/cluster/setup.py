"""A run in three values: what is asked of it, what was decided before its first node came, how it ended. No torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from culm import errors
from culm.cluster.blows import Kill
from culm.cluster.timeouts import derive
from culm.errors import CulmError, RunError, UsageError
from culm.plan.profile import LayerCost
from culm.plan.reconfigure import POLICIES
from culm.schedule import SCHEDULES

STRATEGIES = ("auto", "none", "checkpoint", "drop", "shadow", "shadow-lazy", "reroute", "migrate", "templates")
"""What this version has. `auto` is the cheapest of the others that the shape allows."""

Gate: TypeAlias = Literal["open", "hook", "outside"]
"""Who lets the next step begin: nobody, the leader after the job's on_step hook, or the launcher (the key `permit`)."""

Restart: TypeAlias = Literal["warm", "cold"]
"""How everyone begins again from a checkpoint: processes stay and read the state anew, or new ones are started."""
RESTARTS: tuple[Restart, ...] = ("warm", "cold")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks of a run, beside the job. Raises UsageError for what is wrong whatever the job is."""

    pipelines: int | None = None
    stages: int | None = None
    nodes: int | None = None
    schedule: str = "1f1b"
    strategy: str = "auto"
    ranges: int = 2
    """Segments a worker holds under the interleaved schedule."""
    checkpoint_every: int = 0
    keep_last: int = 2
    out: str | None = None
    resume: str | None = None
    profile: str | None = None
    memory: int | None = None
    cuts: tuple[int, ...] | None = None
    """The layers at which segments 1, 2, ... begin; None: cut so that the slowest stage is as fast as possible."""
    gate: Gate | None = None
    suspect_after: float = 5.0
    losses: float = 0.1
    """The share of nodes that is expected to be lost an hour: what `auto` and the checkpoint interval go by."""
    restart: Restart = "warm"
    replace_within: float | None = None
    """Seconds that a restart from a checkpoint waits for nodes in place of the lost; None: as long as a silent one."""
    reconfigure: str = "cost"
    """When other shapes are made of the nodes: by what it gains (cost), by Bamboo's rule (bamboo), or never."""
    kills: tuple[str, ...] = ()
    """Nodes to strike down on purpose, as in "node=3 step=5 at=2B1"."""

    def __post_init__(self) -> None:
        _known("schedule", self.schedule, SCHEDULES)
        _known("strategy", self.strategy, STRATEGIES)
        _known("reconfigure", self.reconfigure, POLICIES)
        _known("restart", self.restart, RESTARTS)
        for field in ("pipelines", "stages", "nodes", "keep_last", "memory"):
            _at_least(1, field, getattr(self, field))
        _at_least(0, "checkpoint_every", self.checkpoint_every)
        derive(self.suspect_after)
        if not 0 <= self.losses < math.inf:
            raise UsageError(f"--losses is {self.losses:g}: use the share of nodes lost an hour, as in 0.1")
        if self.replace_within is not None and not 0 <= self.replace_within < math.inf:
            raise UsageError(f"--replace-within is {self.replace_within:g}: use a number of seconds, 0 or more")
        for kill in self.kills:
            Kill.parse(kill)
        if self.checkpoint_every and self.out is None:
            raise UsageError("--checkpoint-every needs a folder to write to: add --out, as in --out runs/a")


def _known(option: str, value: str, known: Iterable[str]) -> None:
    names = tuple(known)
    if value not in names:
        close = difflib.get_close_matches(str(value).lower(), names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {' or '.join(names)}"
        raise UsageError(f"this version has no --{option} {value!r}: {hint}")


def _at_least(least: int, field: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise UsageError(f"--{field.replace('_', '-')} is {value!r}: use a whole number of at least {least}")


class Setup(msgspec.Struct, frozen=True):
    """What the leader needs to make epochs of a job."""

    nodes: int
    pipelines: int
    stages: int
    schedule: str
    strategy: str
    segments: tuple[tuple[int, int], ...]
    plan: str
    evaluation: str | None
    evaluation_parts: int
    weighted: bool
    steps: int
    start: int = 0
    gate: Gate = "open"
    checkpoint_every: int = 0
    keep_last: int = 2
    out: str | None = None
    resume: int | None = None
    resume_from: str | None = None
    facts: dict[str, str | int | float | bool | list[list[str]] | None] = {}
    suspect_after: float = 5.0
    """Seconds after which a silent machine is taken for dead; every other timeout follows from it."""
    restart: Restart = "warm"
    replace_within: float = 5.0
    """Seconds that a restart from a checkpoint waits for nodes in place of the lost."""
    eager: bool = False
    """Whether shadows run forwards ahead."""
    joint: bool = False
    """Whether a step ends for all stages together."""
    costs: tuple[tuple[float, float, float], ...] = ()
    """Seconds of F, I and W by segment, measured or estimated: what recovery plans with."""
    activations: int | None = None
    """The most activations that a worker has room for at once; None: any number."""
    layers: tuple[LayerCost, ...] = ()
    """What each layer costs: other shapes are cut by it."""
    memory: int | None = None
    """Bytes of a worker; None: nobody said."""
    reconfigure: str = "cost"
    """By which policy other shapes are made of the nodes while the run goes on."""
    kills: tuple[str, ...] = ()
    """What the request asks to strike down, each with its action."""
    why: str = ""
    """Why this shape: one sentence."""
    name: str = ""
    """Where the job comes from, for people: FILE[:function]; empty: an object of Python."""

    @property
    def survives(self) -> bool:
        """Whether the run is to go on when a node is lost."""
        return self.strategy != "none"

    @property
    def renews(self) -> bool:
        """Whether workers may be ended and started anew."""
        return self.restart == "cold" and self.strategy in ("checkpoint", "migrate")

    @property
    def keeps(self) -> bool:
        """Whether workers keep what actions made until the step commits: nobody asks for it where every loss goes back
        to a checkpoint."""
        return self.strategy not in ("none", "checkpoint")


class JobReference(msgspec.Struct, frozen=True):
    """What a machine that wants to join needs to know of the job, under the key `job`."""

    reference: str
    """FILE[:function], as culm run was given it: on each machine relative to where culm agent is started."""
    overrides: dict[str, str]
    identity: dict[str, str]
    """What it must agree on: see culm.cluster.identity."""


class NodeRecord(msgspec.Struct, frozen=True):
    """What an agent says of its node under `nodes/<number>`."""

    node: int
    agent: str
    worker: str
    fingerprint: str
    leaves_in: float | None = None
    """Seconds of a spot notice: the machine goes."""
    life: int = 0
    """How often its worker was started anew."""
    zone: str = ""
    """Where the machine is: machines of a zone are often lost together. "": nobody said."""

    @property
    def host(self) -> str:
        return self.agent.rpartition(":")[0]


class Result(msgspec.Struct, frozen=True):
    """How a run ended, under the key `result`."""

    summary: dict[str, object] | None = None
    error: str | None = None
    message: str = ""
    trace: str = ""

    def failure(self) -> CulmError:
        """The error that ended the run, to be raised in this process."""
        kind: type[CulmError] = getattr(errors, self.error or "", RunError)
        error = kind(self.message)
        error.trace = self.trace
        return error


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_reference = msgspec.msgpack.Decoder(JobReference).decode
decode_node = msgspec.msgpack.Decoder(NodeRecord).decode
decode_result = msgspec.msgpack.Decoder(Result).decode
