"""Pipelines of unequal depth, so that no node idles."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from culm.plan.reshape import AHEAD, patience
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

    def __len__(self) -> int:
        """Nodes in rows."""
        return sum(map(len, self.rows))

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
    """`templates`: all nodes in pipelines of unequal depth, made anew after each loss; the open step is repeated. With
    newcomers they are made anew when it has been quiet for as long as a leader waits, or at once as published."""

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
            self._wait()
            return None
        before, self.watches = self.rate, 0
        held = self.rows.held_without(gone) or self.charges.handed_over(self.workload)
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
        if self.published:
            return self._grown()
        self._wait()
        return None

    def _wait(self) -> None:
        idle = len(self.members) > len(self.rows)
        self.watches = patience(self.workload.samples / self.rate) + AHEAD - 1 if idle and self.rate else 0

    def looked(self) -> Turn | None:
        self.watches = 0
        return self._grown()

    def _grown(self) -> Turn:
        more = Way("re-instantiate with more", self.coming(), self.again(0.0), self.arrange)
        return self.best([Way("go on", self.rate), more])

    def coming(self) -> float:
        """The rate with everybody."""
        step_s, depths = self.steps.uneven(len(self.members), published=self.published)
        return self.scene.rate(step_s) if depths else 0.0

    def arrange(self) -> None:
        self.rows.arrange(self.members.values(), self.steps.uneven(len(self.members), published=self.published)[1])
        self.rate = self.coming()

    def again(self, rate: float) -> dict[str, float]:
        """What was done of the open step was for nothing; then layers go to their new holders."""
        done = self.phase * self.workload.samples / rate if rate and not self.charges.notice_s else 0.0
        return {"redo": done, "move": self.charges.move_s(self.workload), "join": self.charges.join_s}
