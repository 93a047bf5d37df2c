"""What befalls a simulated cluster, as a value: who is hurt, how, and when.

    Faults().kill(node=2, at="1B3", step=5).pause(0, at="0F1", step=2, seconds=0.5).slow_disk(1, seconds=3)

A schedule of faults is immutable and says itself: `str(faults)` is code that makes it again. Nodes count from 0.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from culm.errors import ScheduleError, UsageError
from culm.schedule.action import WHOLE, Action, Kind

if TYPE_CHECKING:
    from culm.schedule import Plan

MOMENTS = ("commit", "standing", "adopt")
"""What nodes do beside actions: the leader is about to say that a step is committed; a worker is about to report what
it has after a loss; a worker is about to take over a new epoch."""
_WORD = re.compile(r"\s*([a-z_]+)\s*=\s*(\S+)")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that befalls the cluster. Printed as the call of `Faults` that makes it."""

    word: ClassVar[str]

    def __str__(self) -> str:
        told = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{self.word}({', '.join(told)})"


@dataclass(frozen=True, kw_only=True)
class Blow(Fault):
    """A fault that strikes nodes at a moment: the `nth` time that one of them has done an action, or after a while.

    `at` is an action as the schedule writes it (2F0, 1R, 1S; 1S+ is the moment after the step), "evaluate 1F0", or one
    of MOMENTS; without it any action counts. B stands for the W where backward is split. At that moment the action is
    done and counted, and its output has gone nowhere.
    """

    node: int | tuple[int, ...]
    at: str | None = None
    step: int | None = None
    nth: int = 1
    after_s: float | None = None

    def __post_init__(self) -> None:
        if not self.nodes or any(node < 0 for node in self.nodes):
            raise UsageError(f"{self.word}: node is {self.node!r}: use a number from 0 on, or several of them")
        if self.at is None and self.step is None and self.after_s is None:
            raise UsageError(f"{self.word} of node {self.node} has no moment: give at=, step= or after_s=")
        if self.after_s is not None and (self.at is not None or self.step is not None):
            raise UsageError(f"{self.word} of node {self.node} has two moments: give after_s=, or at= and step=")
        if self.nth < 1:
            raise UsageError(f"{self.word}: nth is {self.nth}: the first time is 1")
        if self.at is not None:
            _check_action(self.word, self.at)

    @property
    def nodes(self) -> tuple[int, ...]:
        return (self.node,) if isinstance(self.node, int) else tuple(self.node)

    def matches(self, node: int, step: int, action: str) -> bool:
        """Whether this may be its moment; which time it is, the caller counts."""
        wanted = (self.at, _weight_half(self.at)) if self.at is not None else (action,)
        return self.after_s is None and node in self.nodes and self.step in (None, step) and action in wanted


@dataclass(frozen=True, kw_only=True)
class Kill(Blow):
    """Nodes vanish together. What they had sent still arrives; with `silence` it goes with them."""

    word: ClassVar[str] = "kill"
    silence: bool = False

    @classmethod
    def parse(cls, text: str) -> Kill:
        """Read "node=3 step=5 at=2B1". Several nodes: "node=1,2". Raises UsageError."""
        given: dict[str, Any] = {}
        for word in text.split():
            match = _WORD.fullmatch(word)
            if match is None or match[1] not in ("node", "step", "at", "nth"):
                raise UsageError(f'--kill {text!r} has {word!r}: write it as in "node=3 step=5 at=2B1"')
            if match[1] in given:
                raise UsageError(f"--kill {text!r} says {match[1]} twice: say it once")
            given[match[1]] = match[2] if match[1] == "at" else _numbers(text, match[1], match[2])
        if "node" not in given:
            raise UsageError(f'--kill {text!r} names no node: write it as in "node=3 step=5 at=2B1"')
        if "step" not in given and "at" not in given:
            raise UsageError(f"--kill {text!r} does not say when: add step=5, at=2B1, or both")
        try:
            return cls(**given)
        except UsageError as error:
            raise UsageError(f"--kill {text!r}: {error}") from None

    def settled(self, plan: Plan, *, steps: int, seed: int = 0) -> Kill:
        """The kill with an action: without `at`, one that the seed picks among those that the node runs in a step.

        Node n fills slot n of the plan. Raises UsageError for an action that the nodes never run.
        """
        for node in self.nodes:
            if node >= len(plan.workers):
                raise UsageError(f"{self}: there is no node {node}: the last one is {len(plan.workers) - 1}")
        if self.step is not None and not 0 <= self.step < steps:
            raise UsageError(f"{self}: there is no step {self.step}: the last one is {steps - 1}")
        listed = [str(action) for node in self.nodes for action in plan.workers[node]]
        if self.after_s is not None or self.at in MOMENTS or (self.at or "").startswith("evaluate "):
            return self
        if self.at is None:
            return replace(self, at=random.Random(f"{seed} {self}").choice(listed))
        base = self.at.removesuffix("+")
        if not {base, _weight_half(base)} & set(listed):
            raise UsageError(f"{self}: node {self.node} never runs {self.at}: it runs {' '.join(listed)}")
        return self


@dataclass(frozen=True, kw_only=True)
class Pause(Blow):
    """Nodes stand still, as under SIGSTOP: what comes for them waits, and nobody sees anything but silence."""

    word: ClassVar[str] = "pause"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Partition(Blow):
    """Nodes are cut off from all others and from the store: what is sent vanishes, both ways, and nobody is told.

    When it heals, connections across turn out to be broken, on both sides.
    """

    word: ClassVar[str] = "partition"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class LinkFault(Fault):
    """A fault of all that a node sends to another one; None: whoever it is."""

    source: int | None = None
    target: int | None = None

    def concerns(self, source: int, target: int) -> bool:
        return self.source in (None, source) and self.target in (None, target)


@dataclass(frozen=True, kw_only=True)
class Lose(LinkFault):
    """The nth frame or letter of a link vanishes and nobody is told: TCP would not do that, a broken switch does."""

    word: ClassVar[str] = "lose"
    nth: int = 1
    kind: Literal["frame", "letter"] | None = None


@dataclass(frozen=True, kw_only=True)
class Late(LinkFault):
    """The nth frame or letter of a link takes so much longer, and holds up what follows; nth None: all of them."""

    word: ClassVar[str] = "late"
    seconds: float
    nth: int | None = None

    def __post_init__(self) -> None:
        _check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Reorder(LinkFault):
    """Everything takes up to so many seconds longer, and frames overtake; letters keep their order."""

    word: ClassVar[str] = "reorder"
    seconds: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        _check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class SlowLink(LinkFault):
    """Everything takes longer, by a constant and by its size."""

    word: ClassVar[str] = "slow_link"
    latency: float = 0.0
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(self.word, self.latency)
        _check_seconds(self.word, self.seconds_per_byte)


@dataclass(frozen=True, kw_only=True)
class SlowDisk(Fault):
    """Every call of the outside takes so long on a node."""

    word: ClassVar[str] = "slow_disk"
    node: int
    seconds: float

    def __post_init__(self) -> None:
        _check_seconds(self.word, self.seconds)


Nodes: TypeAlias = int | Sequence[int]


@dataclass(frozen=True)
class Faults:
    """A schedule of faults. Each method gives a new one with a fault more; `str` gives the code that makes it."""

    all: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return "Faults()" + "".join(f".{fault}" for fault in self.all)

    def kill(
        self,
        node: Nodes,
        *,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
        silence: bool = False,
    ) -> Faults:
        """See Kill, and Blow for the moment."""
        return self + Kill(node=_nodes(node), at=at, step=step, nth=nth, after_s=after_s, silence=silence)

    def pause(
        self,
        node: Nodes,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """See Pause, and Blow for the moment."""
        return self + Pause(node=_nodes(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s)

    def partition(
        self,
        node: Nodes,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """See Partition, and Blow for the moment."""
        return self + Partition(node=_nodes(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s)

    def lose(
        self,
        source: int | None = None,
        target: int | None = None,
        *,
        nth: int = 1,
        kind: Literal["frame", "letter"] | None = None,
    ) -> Faults:
        """See Lose."""
        return self + Lose(source=source, target=target, nth=nth, kind=kind)

    def late(
        self, source: int | None = None, target: int | None = None, *, seconds: float, nth: int | None = None
    ) -> Faults:
        """See Late."""
        return self + Late(source=source, target=target, seconds=seconds, nth=nth)

    def reorder(
        self, source: int | None = None, target: int | None = None, *, seconds: float = 0.01, seed: int = 0
    ) -> Faults:
        """See Reorder."""
        return self + Reorder(source=source, target=target, seconds=seconds, seed=seed)

    def slow_link(
        self,
        source: int | None = None,
        target: int | None = None,
        *,
        latency: float = 0.0,
        seconds_per_byte: float = 0.0,
    ) -> Faults:
        """See SlowLink."""
        return self + SlowLink(source=source, target=target, latency=latency, seconds_per_byte=seconds_per_byte)

    def slow_disk(self, node: int, *, seconds: float) -> Faults:
        """See SlowDisk."""
        return self + SlowDisk(node=node, seconds=seconds)

    def __add__(self, more: Fault | Faults) -> Faults:
        return Faults((*self.all, *(more.all if isinstance(more, Faults) else (more,))))


def _nodes(node: Nodes) -> int | tuple[int, ...]:
    return node if isinstance(node, int) else tuple(node)


def _weight_half(action: str | None) -> str | None:
    """1W3 for 1B3: what the node runs in its place where backward is split."""
    return None if action is None else re.sub(r"^(\d+)B(\d+)$", r"\1W\2", action)


def _check_action(word: str, at: str) -> None:
    if at in MOMENTS:
        return
    try:
        action = Action.parse(at.removeprefix("evaluate ").removesuffix("+"))
    except ScheduleError as error:
        raise UsageError(f"{word}: at is {at!r}: {error}; or one of {', '.join(MOMENTS)}") from None
    if at.endswith("+") and action.kind is not Kind.S:
        raise UsageError(f"{word}: at is {at!r}: only the optimizer step has a moment after it, as in 1S+")
    if at.startswith("evaluate ") and (action.kind is not Kind.F or action.kind in WHOLE):
        raise UsageError(f"{word}: at is {at!r}: an evaluation has forward passes only, as in evaluate 1F0")


def _check_seconds(word: str, seconds: float) -> None:
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{word}: {seconds!r} is no duration: use seconds, 0 or more")


def _numbers(text: str, field: str, value: str) -> int | tuple[int, ...]:
    """A whole number; for nodes also several."""
    parts: Iterable[str] = value.split(",") if field == "node" else (value,)
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise UsageError(f"--kill {text!r} has {field}={value}: use a whole number from 0 on")
    found = tuple(map(int, parts))
    return found if len(found) > 1 else found[0]
