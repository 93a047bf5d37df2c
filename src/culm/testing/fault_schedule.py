"""Fault schedules: which faults a simulated cluster suffers, of which nodes, and when, as an immutable value.

    Faults().kill(node=2, at="1B3", step=5).pause(0, at="0F1", step=2, seconds=0.5).slow_disk(1, seconds=3)

`str(faults)` is code that creates the same schedule. Nodes count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from culm.cluster.node_faults import (
    ClusterFault,
    FailNode,
    JoinNodes,
    KillNode,
    NodeFault,
    NoticeToNode,
    PartitionNode,
    PauseNode,
    check_duration,
)
from culm.errors import UsageError

StorageErrorName: TypeAlias = Literal["unavailable", "full", "busy"]
STORAGE_ERRORS: tuple[StorageErrorName, ...] = ("unavailable", "full", "busy")
"""unavailable: a mount that is gone; every access fails. full: a full disk; only writes fail. busy: an object store
answers 503 to every access."""


@dataclass(frozen=True, kw_only=True)
class Outage(NodeFault):
    """The store does not answer for a while, starting when one of `node` has done an action. No session ends meanwhile:
    a silent node has a whole lease after the outage, as with etcd."""

    call_name: ClassVar[str] = "outage"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class StorePause(NodeFault):
    """The store stops for a while, as under SIGSTOP, starting when one of `node` has done an action. When it runs
    again, the sessions of the nodes `expired` have ended; None: of all nodes."""

    call_name: ClassVar[str] = "pause_store"
    seconds: float
    expired: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class StoreCutoff(NodeFault):
    """Nodes cannot reach the store for a while, but each other and all other nodes."""

    call_name: ClassVar[str] = "cut_off_store"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class StorageFault(NodeFault):
    """Storage fails for all nodes for a while, starting when one of `node` has done an action: checkpoints and lines
    can be neither written nor, unless the error is "full", read."""

    call_name: ClassVar[str] = "fail_storage"
    seconds: float
    error: StorageErrorName = "unavailable"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)
        if self.error not in STORAGE_ERRORS:
            raise UsageError(f"{self.call_name}: error is {self.error!r}: use {' or '.join(STORAGE_ERRORS)}")


@dataclass(frozen=True, kw_only=True)
class StorageStall(NodeFault):
    """Storage does not answer for a while, as a stalled NFS mount: every call to the outside that any node begins
    meanwhile returns when the stall is over."""

    call_name: ClassVar[str] = "stall_storage"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class LoopBlock(NodeFault):
    """The event loops of nodes are blocked, as by a long call of C code: they handle no message and send no heartbeat,
    but their sessions in the store are kept alive, for up to `blocked_after` seconds."""

    call_name: ClassVar[str] = "block_loop"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class SlowNode(NodeFault):
    """The actions of nodes take `factor` times as long from then on, for `seconds` (default: until the run ends)."""

    call_name: ClassVar[str] = "slow_node"
    factor: float
    seconds: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seconds != math.inf:
            check_duration(self.call_name, self.seconds)
        if not 0 < self.factor < math.inf:
            raise UsageError(f"{self.call_name}: factor is {self.factor}: use a number greater than 0, such as 3")


@dataclass(frozen=True, kw_only=True)
class MemoryFlip(NodeFault):
    """A bit of a weight flips in the memory of a node."""

    call_name: ClassVar[str] = "flip_memory"


@dataclass(frozen=True, kw_only=True)
class LayoutRequest(NodeFault):
    """A request from outside for another layout, such as 3+2, when one of `node` has done an action."""

    call_name: ClassVar[str] = "request_layout"
    layout: str


@dataclass(frozen=True, kw_only=True)
class LinkFault(ClusterFault):
    """A fault of the link from `source` to `target`; None: any node."""

    source: int | None = None
    target: int | None = None

    def affects(self, source: int, target: int) -> bool:
        return self.source in (None, source) and self.target in (None, target)


@dataclass(frozen=True, kw_only=True)
class MessageDrop(LinkFault):
    """The nth frame or control message of a link is lost without an error, as in a broken switch."""

    call_name: ClassVar[str] = "drop_message"
    nth: int = 1
    kind: Literal["frame", "message"] | None = None


@dataclass(frozen=True, kw_only=True)
class FrameFlip(LinkFault):
    """A bit of the nth frame of a link flips on its way."""

    call_name: ClassVar[str] = "flip_frame"
    nth: int = 1


@dataclass(frozen=True, kw_only=True)
class MessageDelay(LinkFault):
    """The nth frame or control message of a link is delayed, with everything after it; `nth` None: all of them."""

    call_name: ClassVar[str] = "delay_message"
    seconds: float
    nth: int | None = None

    def __post_init__(self) -> None:
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class MessageReorder(LinkFault):
    """Every message is delayed by up to `seconds`, and frames can overtake each other; messages keep their order."""

    call_name: ClassVar[str] = "reorder"
    seconds: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_duration(self.call_name, self.seconds)


@dataclass(frozen=True, kw_only=True)
class SlowLink(LinkFault):
    """Every message is delayed, by a constant and by its size."""

    call_name: ClassVar[str] = "slow_link"
    latency: float = 0.0
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        check_duration(self.call_name, self.latency)
        check_duration(self.call_name, self.seconds_per_byte)


@dataclass(frozen=True, kw_only=True)
class SlowDisk(ClusterFault):
    """Every call to the outside, such as a disk write, takes `seconds` on a node."""

    call_name: ClassVar[str] = "slow_disk"
    node: int
    seconds: float

    def __post_init__(self) -> None:
        check_duration(self.call_name, self.seconds)


NodeNumbers: TypeAlias = int | Sequence[int]


@dataclass(frozen=True)
class Faults:
    """A schedule of faults. Each method returns a new schedule with one more fault; `str` returns the code for it."""

    all: tuple[ClusterFault, ...] = ()

    def __str__(self) -> str:
        return "Faults()" + "".join(f".{fault}" for fault in self.all)

    def kill(
        self,
        node: NodeNumbers,
        *,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
        silence: bool = False,
    ) -> Faults:
        """Nodes vanish. See KillNode, and NodeFault for the moment."""
        return self + KillNode(node=_as_node_numbers(node), at=at, step=step, nth=nth, after_s=after_s, silence=silence)

    def pause(
        self,
        node: NodeNumbers,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Nodes stop running for a while. See PauseNode, and NodeFault for the moment."""
        return self + PauseNode(
            node=_as_node_numbers(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s
        )

    def partition(
        self,
        node: NodeNumbers,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Nodes are cut off for a while. See PartitionNode, and NodeFault for the moment."""
        return self + PartitionNode(
            node=_as_node_numbers(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s
        )

    def fail(
        self,
        node: NodeNumbers,
        *,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        error: str = "simulated error",
    ) -> Faults:
        """An exception is raised inside an action of a node. See FailNode, and NodeFault for the moment."""
        return self + FailNode(node=_as_node_numbers(node), at=at, step=step, nth=nth, error=error)

    def join(
        self,
        node: NodeNumbers = 0,
        *,
        count: int = 1,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Nodes join. See JoinNodes, and NodeFault for the moment, which is an action of `node`."""
        return self + JoinNodes(node=_as_node_numbers(node), count=count, at=at, step=step, nth=nth, after_s=after_s)

    def warn(
        self,
        node: NodeNumbers,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Nodes receive a preemption notice. See NoticeToNode, and NodeFault for the moment."""
        return self + NoticeToNode(
            node=_as_node_numbers(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s
        )

    def outage(
        self,
        node: NodeNumbers = 0,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """The store is unreachable. See Outage, and NodeFault for the moment, which is an action of `node`."""
        return self + Outage(node=_as_node_numbers(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s)

    def pause_store(
        self,
        node: NodeNumbers = 0,
        *,
        seconds: float,
        expired: NodeNumbers | None = None,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """The store stops for a while, and sessions expire. See StorePause, and NodeFault for the moment, which is an
        action of `node`."""
        numbers = None if expired is None else _as_node_numbers(expired)
        return self + StorePause(
            node=_as_node_numbers(node), seconds=seconds, expired=numbers, at=at, step=step, nth=nth, after_s=after_s
        )

    def cut_off_store(
        self,
        node: NodeNumbers,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Nodes cannot reach the store. See StoreCutoff, and NodeFault for the moment."""
        return self + StoreCutoff(
            node=_as_node_numbers(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s
        )

    def fail_storage(
        self,
        node: NodeNumbers = 0,
        *,
        seconds: float,
        error: StorageErrorName = "unavailable",
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Storage fails for all nodes. See StorageFault, and NodeFault for the moment, which is an action of
        `node`."""
        return self + StorageFault(
            node=_as_node_numbers(node), seconds=seconds, error=error, at=at, step=step, nth=nth, after_s=after_s
        )

    def stall_storage(
        self,
        node: NodeNumbers = 0,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Storage does not answer. See StorageStall, and NodeFault for the moment, which is an action of `node`."""
        return self + StorageStall(
            node=_as_node_numbers(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s
        )

    def block_loop(
        self,
        node: NodeNumbers,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Event loops are blocked. See LoopBlock, and NodeFault for the moment."""
        return self + LoopBlock(
            node=_as_node_numbers(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s
        )

    def slow_node(
        self,
        node: NodeNumbers,
        *,
        factor: float,
        seconds: float = math.inf,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Nodes become slow; without a moment, from the start of the run. See SlowNode, and NodeFault for the
        moment."""
        if at is None and step is None and after_s is None:
            after_s = 0.0
        return self + SlowNode(
            node=_as_node_numbers(node), factor=factor, seconds=seconds, at=at, step=step, nth=nth, after_s=after_s
        )

    def request_layout(
        self,
        layout: str,
        *,
        node: NodeNumbers = 0,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Another layout is requested. See LayoutRequest, and NodeFault for the moment, which is an action of
        `node`."""
        return self + LayoutRequest(
            node=_as_node_numbers(node), layout=layout, at=at, step=step, nth=nth, after_s=after_s
        )

    def flip_memory(
        self,
        node: NodeNumbers,
        step: int | None = None,
        *,
        at: str | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """A bit of a weight flips. See MemoryFlip, and NodeFault for the moment."""
        return self + MemoryFlip(node=_as_node_numbers(node), at=at, step=step, nth=nth, after_s=after_s)

    def drop_message(
        self,
        source: int | None = None,
        target: int | None = None,
        *,
        nth: int = 1,
        kind: Literal["frame", "message"] | None = None,
    ) -> Faults:
        """A message is lost. See MessageDrop."""
        return self + MessageDrop(source=source, target=target, nth=nth, kind=kind)

    def flip_frame(self, source: int | None = None, target: int | None = None, *, nth: int = 1) -> Faults:
        """A bit of a frame flips on its way. See FrameFlip."""
        return self + FrameFlip(source=source, target=target, nth=nth)

    def delay_message(
        self, source: int | None = None, target: int | None = None, *, seconds: float, nth: int | None = None
    ) -> Faults:
        """Messages are delayed. See MessageDelay."""
        return self + MessageDelay(source=source, target=target, seconds=seconds, nth=nth)

    def reorder(
        self, source: int | None = None, target: int | None = None, *, seconds: float = 0.01, seed: int = 0
    ) -> Faults:
        """Messages are delayed and reordered. See MessageReorder."""
        return self + MessageReorder(source=source, target=target, seconds=seconds, seed=seed)

    def slow_link(
        self,
        source: int | None = None,
        target: int | None = None,
        *,
        latency: float = 0.0,
        seconds_per_byte: float = 0.0,
    ) -> Faults:
        """A link is slow. See SlowLink."""
        return self + SlowLink(source=source, target=target, latency=latency, seconds_per_byte=seconds_per_byte)

    def slow_disk(self, node: int, *, seconds: float) -> Faults:
        """A disk is slow. See SlowDisk."""
        return self + SlowDisk(node=node, seconds=seconds)

    def __add__(self, more: ClusterFault | Faults) -> Faults:
        return Faults((*self.all, *(more.all if isinstance(more, Faults) else (more,))))


def _as_node_numbers(node: NodeNumbers) -> int | tuple[int, ...]:
    return node if isinstance(node, int) else tuple(node)
