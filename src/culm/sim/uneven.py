"""Pipelines of unequal depth, so that no node idles; and the choice between them and re-routing."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from culm.sim.ours import Reroute
from culm.sim.slots import by_zone
from culm.sim.strategy import Saving, Scene, Way

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from culm.sim.engine import Node, Turn


class Rows:
    """Pipelines as rows of nodes; a node at i of n holds the i-th of n parts of the model."""

    def __init__(self) -> None:
        self.rows: list[list[Node]] = []

    def arrange(self, nodes: Iterable[Node], depths: Sequence[int]) -> None:
        """A row out of one zone as far as possible."""
        order = iter(by_zone(nodes))
        self.rows = [[next(order) for _ in range(depth)] for depth in depths]

    def __contains__(self, node: Node) -> bool:
        return any(node in row for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def held_without(self, gone: Iterable[Node]) -> bool:
        """Whether every part of the model has a holder left: no part is gone from all rows."""
        without = set(gone)
        lost = [
            [(i / len(row), (i + 1) / len(row)) for i, node in enumerate(row) if node in without] for row in self.rows
        ]
        edges = sorted({edge for parts in lost for part in parts for edge in part})
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        return not any(all(any(a < x < b for a, b in parts) for parts in lost) for x in middles)


class Templates(Saving):
    """`templates`: all nodes in pipelines of unequal depth, made anew after each change; the open step is repeated."""

    name = "templates"
    published: ClassVar[bool] = False

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.members: dict[str, Node] = {}
        self.rows = Rows()
        self.rate = 0.0

    def lost(self, gone: Sequence[Node]) -> Turn | None:
        for node in gone:
            self.members.pop(node.name, None)
        if not any(node in self.rows for node in gone):
            return None
        held, before = self.rows.held_without(gone), self.rate
        self.arrange()
        if not held or not self.rate:
            return self.reload(self.rate)
        return self.best([Way("re-instantiate", self.rate, {**self.charges.alarm, **self.again(before)})])

    def joined(self, new: Sequence[Node]) -> Turn | None:
        self.members.update((node.name, node) for node in new)
        rate = self.coming()
        if not rate:
            return None
        if not self.rows:
            return self.best([Way("start", rate, {"start": self.charges.restart_s}, self.arrange)])
        more = Way("re-instantiate with more", rate, self.again(0.0), self.arrange)
        return self.best([Way("go on", self.rate), more])

    def coming(self) -> float:
        """The rate with everybody."""
        step_s, depths = self.steps.uneven(len(self.members), published=self.published)
        return self.scene.rate(step_s) if depths else 0.0

    def arrange(self) -> None:
        self.rows.arrange(self.members.values(), self.steps.uneven(len(self.members), published=self.published)[1])
        self.rate = self.coming()

    def again(self, rate: float) -> dict[str, float]:
        """The open step, on average half of it, for nothing; then layers go to their new holders."""
        half = self.workload.samples / rate / 2 if rate and not self.charges.notice_s else 0.0
        return {"redo": half, "move": self.charges.move_s(self.workload), "join": self.charges.join_s}


class Auto(Reroute):
    """`auto`: after each loss whatever is expected to have trained most by the next one.

    Peers take over first; holes move, hurt pipelines are given up or all nodes are arranged anew if that pays.
    """

    name = "auto"

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.rows = Rows()

    def rate(self) -> float:
        return self._uneven_rate(sum(map(len, self.rows.rows))) if self.rows else super().rate()

    def _uneven_rate(self, nodes: int) -> float:
        step_s, depths = self.steps.uneven(nodes)
        return self.scene.rate(step_s) if depths else 0.0

    def lost(self, gone: Sequence[Node]) -> Turn | None:
        if not self.rows:
            return super().lost(gone)
        self.slots.remove(gone)
        if not any(node in self.rows for node in gone):
            return None
        held, half = self.rows.held_without(gone), self.workload.samples / self.rate() / 2
        self.rows.arrange((), ())
        if not held:
            return self.restart()
        redo = 0.0 if self.charges.notice_s else half
        pauses = {**self.charges.alarm, "redo": redo, "move": self._move_s(), "join": self.charges.join_s}
        return self.best(self._anew(pauses))

    def ways(self, pauses: dict[str, float]) -> list[Way]:
        if not self.slots.holes:
            return super().ways(pauses)
        moving = {**pauses, "move": self._move_s(), "join": self.charges.join_s}
        nodes = self.slots.members
        return [*super().ways(pauses), Way("re-partition", self._uneven_rate(nodes), moving, self._repartition)]

    def _anew(self, pauses: dict[str, float]) -> list[Way]:
        """From nothing: even or uneven."""
        nodes, whole = self.slots.members, self.slots.whole
        even = [Way("even again", self.scene.rate(self.steps.healthy(whole)), pauses, self._even)] if whole else []
        return [*even, Way("re-partition", self._uneven_rate(nodes), pauses, self._repartition)]

    def joined(self, new: Sequence[Node]) -> Turn | None:
        self.slots.add(new)
        pauses = {"move": self._move_s(), "join": self.charges.join_s}
        if self.rows:
            return self.best([Way("go on", self.rate()), *self._anew(pauses)])
        if not self.slots.pipelines:
            return self._started()
        filled = self.after_join()
        stay = Way(filled.why if filled else "go on", self.rate(), filled.pauses if filled else {})
        if not self.slots.standby and not self.slots.holes:
            return filled
        anew = Way("re-partition", self._uneven_rate(self.slots.members), pauses, self._repartition)
        return self.best([stay, anew])

    def _started(self) -> Turn | None:
        """Even or uneven, from nothing or from the checkpoint."""
        ways = [way for way in self._anew({"start": self.charges.restart_s}) if way.rate]
        if not ways:
            return None
        turn = self.best(ways)
        again, self.began = self.began, True
        return self.reload(turn.rate) if again else turn

    def _even(self) -> None:
        self.rows.arrange((), ())
        self.slots.reform()

    def _repartition(self) -> None:
        """Everybody stands by, as far as slots are concerned, and has a place in a row."""
        self.slots.reform(0)
        depths = self.steps.uneven(self.slots.members)[1]
        self.rows.arrange(self.slots.standby.values(), depths)

    def _move_s(self) -> float:
        return self.charges.move_s(self.workload)
