"""What befalls a simulated cluster, as a value: who is hurt, how, and when.

    Faults().kill(node=2, at="1B3", step=5).pause(0, at="0F1", step=2, seconds=0.5).slow_disk(1, seconds=3)

A schedule of faults is immutable and says itself: `str(faults)` is code that makes it again. Nodes count from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from culm.cluster.blows import Blow, Fault, Join, Kill, Partition, Pause, Warn, check_seconds


@dataclass(frozen=True, kw_only=True)
class Outage(Blow):
    """The store answers nobody for a while, from when one of `node` has done an action. Nobody's session ends then: a
    node that is silent has a whole lease afterwards, as etcd grants it."""

    word: ClassVar[str] = "outage"
    seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Wish(Blow):
    """Somebody outside asks for another layout, as in 3+2, when one of `node` has done an action."""

    word: ClassVar[str] = "wish"
    layout: str


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
        check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class Reorder(LinkFault):
    """Everything takes up to so many seconds longer, and frames overtake; letters keep their order."""

    word: ClassVar[str] = "reorder"
    seconds: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_seconds(self.word, self.seconds)


@dataclass(frozen=True, kw_only=True)
class SlowLink(LinkFault):
    """Everything takes longer, by a constant and by its size."""

    word: ClassVar[str] = "slow_link"
    latency: float = 0.0
    seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        check_seconds(self.word, self.latency)
        check_seconds(self.word, self.seconds_per_byte)


@dataclass(frozen=True, kw_only=True)
class SlowDisk(Fault):
    """Every call of the outside takes so long on a node."""

    word: ClassVar[str] = "slow_disk"
    node: int
    seconds: float

    def __post_init__(self) -> None:
        check_seconds(self.word, self.seconds)


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

    def join(
        self,
        node: Nodes = 0,
        *,
        count: int = 1,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Nodes come. See Join, and Blow for the moment, which is one of an action of `node`."""
        return self + Join(node=_nodes(node), count=count, at=at, step=step, nth=nth, after_s=after_s)

    def warn(
        self,
        node: Nodes,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """See Warn, and Blow for the moment."""
        return self + Warn(node=_nodes(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s)

    def outage(
        self,
        node: Nodes = 0,
        *,
        seconds: float,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """The store is out of reach. See Outage, and Blow for the moment, which is one of an action of `node`."""
        return self + Outage(node=_nodes(node), seconds=seconds, at=at, step=step, nth=nth, after_s=after_s)

    def wish(
        self,
        layout: str,
        *,
        node: Nodes = 0,
        at: str | None = None,
        step: int | None = None,
        nth: int = 1,
        after_s: float | None = None,
    ) -> Faults:
        """Another layout is asked for. See Wish, and Blow for the moment, which is one of an action of `node`."""
        return self + Wish(node=_nodes(node), layout=layout, at=at, step=step, nth=nth, after_s=after_s)

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
