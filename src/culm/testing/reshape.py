"""Schedules of faults, out of a seed, for a run whose shape changes on the way.

Other layouts are asked for, and nodes come and go, so that a policy finds others by itself. Faults strike in the midst
of it: while layers are on their way, while the open steps drain, when the new shape has just begun.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from culm.plan.relayout import uneven, written
from culm.testing.faults import Faults

SHAPES = ((1, 4), (2, 2), (2, 3), (3, 2))
_LAYERS = 6
_LETHAL = {"kill": 10, "notice": 6, "long pause": 3, "partition": 3}
_HARMLESS = {"pause": 2, "outage": 4, "late": 2, "slow link": 2, "lose": 2}
"""What is drawn, and how often beside the others."""
_MOMENTS = (("given", 1), ("given", 2), ("moved", 1), ("moved", 2), ("adopt", 2), ("adopt", 3), ("standing", 1))
"""What nodes do when the shape changes, and which time; the first epoch is adopted, too."""


@dataclass
class _Drawing:
    """A schedule in the making. Runs with checkpoints may lose whom they like, but for a few, from step `since` on.
    Without, one node is lost at the most, and nobody is left without a post: whatever the shape is by then, each of its
    layers has another holder in it."""

    dice: random.Random
    pipelines: int
    nodes: int
    steps: int
    lease_s: float
    since: int | None
    """From this step on there is a checkpoint; None: there never is."""
    came: int = 0
    lost: set[int] = field(default_factory=set)
    wished: list[int] = field(default_factory=list)
    """The steps in which a layout is asked for."""

    @property
    def first(self) -> int:
        """The first step in which anything may happen."""
        return self.since or 0

    def soon(self) -> dict[str, Any]:
        """A moment early in the run: there are steps left for what it leads to."""
        step = self.dice.randint(self.first, max(self.first, self.steps // 2))
        return {"step": step, "nth": self.nth()}

    def nth(self) -> int:
        """Of the actions of a step: a node has five at the least, and many more in long pipelines."""
        return self.dice.randint(1, self.dice.choice((5, 5, 12)))

    def midst(self) -> dict[str, Any]:
        """A moment when the shape changes, or when it is about to, or has just changed."""
        if self.dice.random() < 0.6:
            at, nth = self.dice.choice(_MOMENTS)
            return {"at": at, "nth": nth}
        if not self.wished:
            return self.soon()
        step = min(self.dice.choice(self.wished) + self.dice.randint(1, 4), self.steps - 1)
        return {"step": step, "nth": self.nth()}

    def wish(self, faults: Faults) -> Faults:
        """A layout more is asked for; now and then one for which there are too few nodes."""
        moment = self.soon()
        there = self.nodes + self.dice.choice((0, 0, 0, 0, 5) if self.since is None else (self.came, -1, 0, 0, 0, 5))
        fewest = 2 if self.since is None else 1  # alone a pipeline has nobody to lose
        pipelines = self.dice.choice([D for D in range(fewest, min(4, there) + 1) if self.pipelines != D])
        depths = tuple(min(depth, _LAYERS) for depth in uneven(there, pipelines))
        self.wished.append(moment["step"])
        return faults.wish(written(depths), node=self.dice.randrange(self.nodes), **moment)

    def join(self, faults: Faults) -> Faults:
        count = self.dice.choice((1, 1, 2, 3))
        self.came += count
        return faults.join(self.dice.randrange(self.nodes), count=count, **self.soon())

    def victims(self) -> tuple[int, ...]:
        """Whom to lose, newcomers included; whoever has the least number leads, most likely."""
        alive = [node for node in range(self.nodes + self.came) if node not in self.lost]
        spare = (1 if self.since is None else self.nodes - 2) - len(self.lost)
        first = 0 if self.dice.random() < 0.25 else self.dice.randrange(len(alive))
        return tuple(alive[first : first + min(spare, self.dice.choice((1, 1, 1, 2)))])

    def strike(self, faults: Faults) -> Faults:
        """A fault more."""
        kinds = _LETHAL if self.dice.random() < 0.7 else _HARMLESS
        kind = self.dice.choices(list(kinds), list(kinds.values()))[0]
        nodes = self.victims() if kinds is _LETHAL else ()
        return self.lose(faults, kind, nodes) if nodes else self.hinder(faults, kind)

    def lose(self, faults: Faults, kind: str, nodes: tuple[int, ...]) -> Faults:
        moment = self.midst() if self.wished or self.lost else self.soon()
        self.lost.update(nodes)
        node = nodes if len(nodes) > 1 else nodes[0]
        longer = round(self.lease_s * self.dice.uniform(1.1, 4.0), 3)
        match kind:
            case "notice":
                span = self.dice.choice(((0.0, 0.0), (0.01, 0.1), (0.1, 0.5), (1.0, 10.0)))
                return faults.warn(node, seconds=round(self.dice.uniform(*span), 3), **moment)
            case "long pause":
                return faults.pause(node, seconds=longer, **moment)
            case "partition":
                return faults.partition(node, seconds=longer, **moment)
        return faults.kill(node, silence=self.dice.random() < 0.5, **moment)

    def hinder(self, faults: Faults, kind: str) -> Faults:
        """A fault more that nobody is lost by. What vanishes on its way begins an epoch at any time, also before there
        is a checkpoint, and others may be lost in that: so only where nothing depends on one."""
        node, other = self.dice.sample(range(self.nodes), 2)
        seconds = round(self.dice.uniform(0.01, 0.5 * self.lease_s), 3)
        match kind:
            case "outage":
                return faults.outage(node, seconds=round(4 * seconds, 3), **self.midst())
            case "lose" if self.since is None:
                return faults.lose(node, other, nth=self.dice.randint(1, 80))
            case "late":
                return faults.late(node, other, seconds=seconds, nth=self.dice.randint(1, 80))
            case "slow link":
                return faults.slow_link(node, other, latency=round(seconds / 20, 4))
        return faults.pause(node, seconds=seconds, **self.midst())


def draw_changes(
    dice: random.Random, pipelines: int, nodes: int, *, steps: int, lease_s: float, saved_from: int | None = None
) -> Faults:
    """Wishes, newcomers and one to four faults for a run whose shape may change. `saved_from`: from this step on there
    is a checkpoint to go back to; None: there is none, and one node is lost at the most."""
    drawing = _Drawing(dice, pipelines, nodes, steps, lease_s, saved_from)
    faults = Faults()
    if saved_from is not None and dice.random() < 0.6:
        faults = drawing.join(faults)
    for _ in range(dice.choice((0, 1, 2, 2, 3))):
        faults = drawing.wish(faults)
    for _ in range(dice.choice((1, 2, 3, 3, 4))):
        faults = drawing.strike(faults)
    return faults
