"""Blows: what strikes nodes on purpose, kill, pause and partition, and how their moment is written. No torch."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from culm.errors import ScheduleError, UsageError
from culm.schedule.action import Action, Kind

if TYPE_CHECKING:
    from culm.schedule import Plan

MOMENTS = ("commit", "standing", "adopt", "copy", "given", "moved")
"""What nodes do beside actions: the leader is about to say that a step is committed; a worker is about to report what
it has after a loss; a worker is about to take over a new epoch; a newcomer has the copy that it begins with; a worker
has sent the layers that others have in a new shape; a worker has those that it has itself."""
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
        if self.after_s is not None or node not in self.nodes or self.step not in (None, step):
            return False
        return self.at is None or action in (self.at, _weight_half(self.at))


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

    @property
    def text(self) -> str:
        """What `parse` reads."""
        node = ",".join(map(str, self.nodes))
        given = {"node": node, "step": self.step, "at": self.at, "nth": self.nth if self.nth > 1 else None}
        return " ".join(f"{name}={value}" for name, value in given.items() if value is not None)

    def settled(self, plan: Plan, *, steps: int, start: int = 0, seed: int = 0) -> Kill:
        """The kill with an action: without `at`, one that the seed picks among those that the nodes run in a step.

        Node n fills slot n of the plan. Raises UsageError for a node, a step or an action that there is not.
        """
        last = max(self.nodes)
        if last >= len(plan.workers):
            raise UsageError(f"--kill {self.text!r}: there is no node {last}: the last one is {len(plan.workers) - 1}")
        if self.step is not None and not start <= self.step < steps:
            known = f"the last one is {steps - 1}" if self.step >= steps else f"the first one is {start}"
            raise UsageError(f"--kill {self.text!r}: there is no step {self.step}: {known}")
        listed = [str(action) for node in self.nodes for action in plan.workers[node]]
        if self.at is None and self.after_s is None:
            return replace(self, at=random.Random(f"{seed} {self}").choice(listed))
        if self.at is not None and not _is_extra(self.at):
            self._check_run(self.at.removesuffix("+"), listed)
        return self

    def _check_run(self, action: str, listed: Sequence[str]) -> None:
        if action not in listed and _weight_half(action) not in listed:
            some = " ".join(listed[:8]) + (" ..." if len(listed) > 8 else "")
            raise UsageError(
                f"--kill {self.text!r}: node {self.nodes[0]} never runs {self.at}: name one of its actions, {some}"
            )


@dataclass(frozen=True, kw_only=True)
class Pause(Blow):
    """Nodes stand still, as under SIGSTOP: what comes for them waits, and nobody sees anything but silence."""

    word: ClassVar[str] = "pause"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Partition(Blow):
    """Nodes are cut off from all others and from the store: what is sent vanishes, both ways, and nobody is told.

    When it heals, connections across turn out to be broken, on both sides.
    """

    word: ClassVar[str] = "partition"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Join(Blow):
    """So many nodes come, with the next numbers: when one of `node` has done an action, or after a while."""

    word: ClassVar[str] = "join"
    count: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise UsageError(f"{self.word}: count is {self.count}: let at least 1 node come")


@dataclass(frozen=True, kw_only=True)
class Warn(Blow):
    """Nodes have notice: so many seconds later they vanish, if they have not gone by then."""

    word: ClassVar[str] = "warn"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds(self.word, self.seconds)


def _weight_half(action: str | None) -> str | None:
    """1W3 for 1B3: what the node runs in its place where backward is split."""
    return None if action is None else re.sub(r"^(\d+)B(\d+)$", r"\1W\2", action)


def _is_extra(at: str) -> bool:
    """Whether this is a moment outside of the plan of a step."""
    return at in MOMENTS or at.startswith("evaluate ")


def _check_action(word: str, at: str) -> None:
    if at in MOMENTS:
        return
    try:
        action = Action.parse(at.removeprefix("evaluate ").removesuffix("+"))
    except ScheduleError as error:
        raise UsageError(f"{word}: at is {at!r}: {error}; or one of {', '.join(MOMENTS)}") from None
    if at.endswith("+") and action.kind is not Kind.S:
        raise UsageError(f"{word}: at is {at!r}: only the optimizer step has a moment after it, as in 1S+")
    if at.startswith("evaluate ") and action.kind is not Kind.F:
        raise UsageError(f"{word}: at is {at!r}: an evaluation has forward passes only, as in evaluate 1F0")


def check_seconds(word: str, seconds: float) -> None:
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{word}: {seconds!r} is no duration: use seconds, 0 or more")


def _numbers(text: str, field: str, value: str) -> int | tuple[int, ...]:
    """A whole number; for nodes also several."""
    parts: Sequence[str] = value.split(",") if field == "node" else (value,)
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise UsageError(f"--kill {text!r} has {field}={value}: use a whole number from 0 on")
    found = tuple(map(int, parts))
    return found if len(found) > 1 else found[0]
