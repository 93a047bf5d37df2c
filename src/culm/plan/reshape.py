"""When a run changes its shape, and into which: asked by the leader of a real run and by the simulator alike. Pure.

    Quiet     nodes have come or gone: when it is time to decide what to make of them
    offers    what could be made of them, under the strategy and within the bounds of the model
    Pace      what a run knows of its speed; `outlook` says what the offers are worth by that
    judge     what the policy makes of it

Strategies, shapes and times are the callers' business: a leader has measured them, a simulator works them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from culm.plan.choose import BANDWIDTH, NEAR
from culm.plan.layout import SHADOWING
from culm.plan.reconfigure import Decision, Kind, Layout, Outlook, State, bamboo, decide, layouts

QUIET = 5
"""So many steps after nodes have come or gone it is decided what to make of them: most changes do not come alone ..."""
QUIET_S = 60.0
"""... but so many seconds are enough: where steps take minutes the next change would come before the fifth."""
AHEAD = 2
"""What is decided while a step is being committed holds from so many steps later: the next one may be open already."""
RESHAPING = (*SHADOWING, "reroute", "templates")
"""Strategies that live on what peers and shadows hold: the others have reasons of their own to change."""
_DEPTHS = 6
"""About so many depths are looked at, where a model can be cut into many."""


class Quiet:
    """Who was there when that was last looked at, since which step, and whether it has been judged."""

    def __init__(self) -> None:
        self.judged = False
        self._known: Hashable = None
        self._since = (0, 0.0)

    def look(self, there: Hashable, step: int, now: float) -> None:
        """Who is there while a step is being committed, and in which shape: where that is new, the wait begins."""
        if there != self._known:
            self.judged, self._known, self._since = False, there, (step, now)

    def due(self, step: int, now: float) -> bool:
        """Whether it is time to judge what has not been judged."""
        since, then = self._since
        return not self.judged and (step >= since + QUIET or (step > since and now - then >= QUIET_S))


def patience(step_s: float) -> int:
    """How many steps that is, where a step takes so long."""
    return max(1, min(QUIET, math.ceil(QUIET_S / step_s))) if step_s > 0 else QUIET


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What shapes of a model there can be."""

    strategy: str
    shallowest: int
    deepest: int
    even: bool = False
    """Whether all pipelines have to have one depth."""

    def allow(self, layout: Layout, state: State) -> bool:
        """Whether the model fits so and, where peers are what protects, there are any."""
        alone = len(layout.depths) == 1 < len(state.depths) and self.strategy not in SHADOWING
        fits = self.shallowest <= min(layout.depths) and max(layout.depths) <= self.deepest
        return fits and not alone and (not self.even or len(set(layout.depths)) == 1)


def offers(state: State, bounds: Bounds) -> dict[Layout, Kind]:
    """What could be made of the nodes that are there, each with what it would be."""
    least, most = bounds.shallowest, min(bounds.deepest, len(state.alive))
    depths = {*range(least, most + 1, max(1, (most - least) // _DEPTHS)), *state.depths}
    return {layout: kind for layout, kind in layouts(state, sorted(depths)).items() if bounds.allow(layout, state)}


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What a run knows of its speed, in seconds."""

    lately_s: float
    """A step as things stand, measured ..."""
    running_s: float
    """... and predicted: what is predicted for others is as far off."""
    left_s: float
    """Until the last step is done, at this speed."""
    calm_s: float
    """Between two losses so far; infinite before the first."""
    state_bytes: float
    moved_s: float | None = None
    """What it took to go over to another shape, lately; None: that has not been done."""

    @property
    def move_s(self) -> float:
        """What a change would take: as long as the last ones did, or as the whole state is on its way, and about half a
        step while the last one drains."""
        moving = self.state_bytes / BANDWIDTH if self.moved_s is None else self.moved_s
        return moving + self.lately_s / 2


def outlook(
    state: State, among: Mapping[Layout, Kind], pace: Pace, predicted: Callable[[Layout], float], now: float
) -> Outlook:
    """What the offers are worth: predicted, in proportion to what steps take now. Holes that stay are not predicted:
    what they cost is only known of those that there are."""
    scale = pace.lately_s / pace.running_s if pace.running_s else 1.0
    steps = {layout: scale * predicted(layout) for layout in among if not layout.holes}
    steps[state.layout] = pace.lately_s
    return Outlook(steps=steps, next_event=now + min(pace.left_s, pace.calm_s), move_s=pace.move_s)


def judge(
    policy: str, strategy: str, state: State, among: Mapping[Layout, Kind], ahead: Outlook, now: float
) -> tuple[Decision, str]:
    """What the policy, `cost` or `bamboo`, makes of the nodes, and why. Templates are always a matter of cost."""
    if policy == "bamboo" and strategy != "templates":
        return bamboo(state, ahead, now)
    return decide(state, ahead, now, among=among, near=NEAR)
