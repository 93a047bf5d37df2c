"""Node faults: kill, pause, partition, join and notice, and the text in which users give their moment. No torch."""

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

NON_ACTION_MOMENTS = ("commit", "inventory", "adopt", "copy", "layers_sent", "layers_received")
"""Moments other than actions. commit: the leader is about to publish that a step is committed. inventory: a worker is
about to report its inventory after a loss. adopt: a worker is about to enter a new epoch. copy: a joining node has
received its first copy. layers_sent: in a new shape, a worker has sent the layers that others hold from now on.
layers_received: it has received the layers that it holds from now on itself."""
LAUNCH = "launch "
"""Before an action: it was launched on a device and is not complete."""
_KEY_VALUE = re.compile(r"\s*([a-z_]+)\s*=\s*(\S+)")


@dataclass(frozen=True, kw_only=True)
class ClusterFault:
    """A fault of a cluster. Its text is the call of `Faults` that creates it."""

    call_name: ClassVar[str]

    def __str__(self) -> str:
        arguments = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{self.call_name}({', '.join(arguments)})"


@dataclass(frozen=True, kw_only=True)
class NodeFault(ClusterFault):
    """A fault of one or more nodes at a moment: the `nth` time that one of them has done an action, or after `after_s`.

    `at` is an action as the schedule writes it (2F0, 1R, 1S; 1S+ is the moment after the step), "evaluate 1F0",
    "launch 1F0" (on a device the moment at which the action is launched and not complete), or one of
    NON_ACTION_MOMENTS; without it any action that is done counts. B stands for W where backward is split. At that
    moment the action is done and counted, and its output has not been sent.
    """

    node: int | tuple[int, ...]
    at: str | None = None
    step: int | None = None
    nth: int = 1
    after_s: float | None = None

    def __post_init__(self) -> None:
        if not self.nodes or any(node < 0 for node in self.nodes):
            raise UsageError(f"{self.call_name}: node is {self.node!r}: use a number from 0 on, or several of them")
        if self.at is None and self.step is None and self.after_s is None:
            raise UsageError(f"{self.call_name} of node {self.node} has no moment: give at=, step= or after_s=")
        if self.after_s is not None and (self.at is not None or self.step is not None):
            raise UsageError(f"{self.call_name} of node {self.node} has two moments: give after_s=, or at= and step=")
        if self.nth < 1:
            raise UsageError(f"{self.call_name}: nth is {self.nth}: the first time is 1")
        if self.at is not None:
            _check_action(self.call_name, self.at)

    @property
    def nodes(self) -> tuple[int, ...]:
        return (self.node,) if isinstance(self.node, int) else tuple(self.node)

    def matches(self, node: int, step: int, action: str) -> bool:
        """Whether this event is a candidate for the fault's moment. The caller counts the occurrences."""
        if self.after_s is not None or node not in self.nodes or self.step not in (None, step):
            return False
        if self.at is None:
            return not action.startswith(LAUNCH)
        return action in (self.at, _weight_gradient_action(self.at))


@dataclass(frozen=True, kw_only=True)
class KillNode(NodeFault):
    """Nodes vanish together. Messages they have sent still arrive; with `silence` those are lost too."""

    call_name: ClassVar[str] = "kill"
    silence: bool = False
    drawn: bool = False
    """Whether a seed has drawn `at`. A node that does not run it, because the shape has changed, is killed later."""

    @classmethod
    def parse(cls, text: str) -> KillNode:
        """Parse "node=3 step=5 at=2B1"; several nodes: "node=1,2". Raises UsageError."""
        given: dict[str, Any] = {}
        for word in text.split():
            match = _KEY_VALUE.fullmatch(word)
            if match is None or match[1] not in ("node", "step", "at", "nth", "drawn"):
                raise UsageError(f'--kill {text!r} has {word!r}: write it as in "node=3 step=5 at=2B1"')
            if match[1] in given:
                raise UsageError(f"--kill {text!r} says {match[1]} twice: say it once")
            given[match[1]] = match[2] if match[1] == "at" else _parse_numbers(text, match[1], match[2])
        if "node" not in given:
            raise UsageError(f'--kill {text!r} names no node: write it as in "node=3 step=5 at=2B1"')
        if "step" not in given and "at" not in given:
            raise UsageError(f"--kill {text!r} does not say when: add step=5, at=2B1, or both")
        try:
            return cls(**given | {"drawn": bool(given.get("drawn"))})
        except UsageError as error:
            raise UsageError(f"--kill {text!r}: {error}") from None

    @property
    def spec_text(self) -> str:
        """The text that `parse` reads."""
        node = ",".join(map(str, self.nodes))
        given = {"node": node, "step": self.step, "at": self.at, "nth": self.nth if self.nth > 1 else None}
        given["drawn"] = 1 if self.drawn else None
        return " ".join(f"{name}={value}" for name, value in given.items() if value is not None)

    def resolve_action(
        self, plan: Plan, *, steps: int, start: int = 0, seed: int = 0, workers_per_node: int = 1
    ) -> KillNode:
        """The kill with an action: without `at`, one that the seed picks among those that the nodes run in a step.

        Node n fills slot n of the plan or, with K workers per node, the slots n * K to n * K + K - 1. Raises UsageError
        for a node, step or action that does not exist.
        """
        last, K = max(self.nodes), workers_per_node
        if last >= len(plan.workers) // K:
            raise UsageError(
                f"--kill {self.spec_text!r}: there is no node {last}: the last one is {len(plan.workers) // K - 1}"
            )
        if self.step is not None and not start <= self.step < steps:
            known = f"the last one is {steps - 1}" if self.step >= steps else f"the first one is {start}"
            raise UsageError(f"--kill {self.spec_text!r}: there is no step {self.step}: {known}")
        slots = [node * K + index for node in self.nodes for index in range(K)]
        listed = [str(action) for slot in slots for action in plan.workers[slot]]
        if self.at is None and self.after_s is None:
            return replace(self, at=random.Random(f"{seed} {self}").choice(listed), drawn=True)
        if self.at is not None and not _is_outside_plan(self.at):
            self._check_node_runs(self.at.removesuffix("+"), listed)
        return self

    def is_overdue(self, node: int, step: int, action: str) -> bool:
        """Whether the node has not run the drawn action and never will: two steps later no worker of its pipeline is in
        the step any more."""
        return (
            self.drawn
            and node in self.nodes
            and self.step is not None
            and step >= self.step + 2
            and action[0].isdigit()
        )

    def _check_node_runs(self, action: str, listed: Sequence[str]) -> None:
        if action not in listed and _weight_gradient_action(action) not in listed:
            some = " ".join(listed[:8]) + (" ..." if len(listed) > 8 else "")
            raise UsageError(
                f"--kill {self.spec_text!r}: node {self.nodes[0]} never runs {self.at}: name one of its actions, {some}"
            )


@dataclass(frozen=True, kw_only=True)
class PauseNode(NodeFault):
    """Nodes stop running, as under SIGSTOP: messages to them wait, and other nodes see only silence."""

    call_name: ClassVar[str] = "pause"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class PartitionNode(NodeFault):
    """Nodes are cut off from all others and from the store: messages are lost in both directions without an error.

    When the partition heals, connections across it are broken on both sides.
    """

    call_name: ClassVar[str] = "partition"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class FailNode(NodeFault):
    """An exception is raised inside an action of a node, after its computation and before anything of it is counted.
    With "out of memory" in its text, the exception is torch.OutOfMemoryError. `after_s` is not possible."""

    call_name: ClassVar[str] = "fail"
    error: str = "simulated error"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after_s is not None:
            raise UsageError(
                f"{self.call_name} of node {self.node}: exceptions are raised in actions: give at= or step="
            )
        if self.at is not None and (self.at.endswith(("R", "+")) or self.at in NON_ACTION_MOMENTS):
            raise UsageError(f"{self.call_name}: at is {self.at!r}: use 1F0, 1B0, 1S or evaluate 1F0, for example")


@dataclass(frozen=True, kw_only=True)
class JoinNodes(NodeFault):
    """`count` nodes join, with the next node numbers, when one of `node` has done an action or after `after_s`."""

    call_name: ClassVar[str] = "join"
    count: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count < 1:
            raise UsageError(f"{self.call_name}: count is {self.count}: use at least 1 node")


@dataclass(frozen=True, kw_only=True)
class NoticeToNode(NodeFault):
    """Nodes receive a preemption notice; `seconds` later they vanish unless they have left by then."""

    call_name: ClassVar[str] = "warn"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)


def _weight_gradient_action(action: str | None) -> str | None:
    """1W3 for 1B3: the action that the node runs instead where backward is split."""
    return None if action is None else re.sub(r"^(\d+)B(\d+)$", r"\1W\2", action)


def _is_outside_plan(at: str) -> bool:
    """Whether this moment is not part of a step's plan."""
    return at in NON_ACTION_MOMENTS or at.startswith(("evaluate ", LAUNCH))


def _check_action(call_name: str, at: str) -> None:
    if at in NON_ACTION_MOMENTS:
        return
    try:
        action = Action.parse(at.removeprefix("evaluate ").removeprefix(LAUNCH).removesuffix("+"))
    except ScheduleError as error:
        raise UsageError(f"{call_name}: at is {at!r}: {error}; or one of {', '.join(NON_ACTION_MOMENTS)}") from None
    if at.endswith("+") and action.kind is not Kind.S:
        raise UsageError(f"{call_name}: at is {at!r}: only the optimizer step has a moment after it, as in 1S+")
    if at.startswith("evaluate ") and action.kind is not Kind.F:
        raise UsageError(f"{call_name}: at is {at!r}: an evaluation has forward passes only, as in evaluate 1F0")


def check_duration(call_name: str, seconds: float) -> None:
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{call_name}: {seconds!r} is not a duration: use seconds, 0 or more")


def _parse_numbers(text: str, field: str, value: str) -> int | tuple[int, ...]:
    """Parse a whole number; for `node` also several, separated by commas."""
    parts: Sequence[str] = value.split(",") if field == "node" else (value,)
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise UsageError(f"--kill {text!r} has {field}={value}: use a whole number from 0 on")
    numbers = tuple(map(int, parts))
    return numbers if len(numbers) > 1 else numbers[0]
