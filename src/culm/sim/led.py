"""Strategies whose every reconfiguration is decided by the policy that the leader of a real cluster asks.

`culm.plan.reconfigure` gets what a leader would know: who is alive where, who fills which slot, how long steps take in
each layout, what pauses cost and when the next loss is due. What it decides is done, here by another clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from culm.plan import Slot
from culm.plan.reconfigure import Decision, Layout, Outlook, State, decide, layouts
from culm.sim.engine import Turn
from culm.sim.strategy import Saving, Scene

if TYPE_CHECKING:
    from culm.sim.engine import Node


@dataclass(frozen=True, kw_only=True)
class Seen(State):
    """The same state, with what follows from it kept up to date instead of found anew: it is asked for often."""

    empty: frozenset[Slot]
    spare: tuple[str, ...]

    @property
    def holes(self) -> list[Slot]:
        return sorted(self.empty)

    @property
    def standby(self) -> list[str]:
        return list(self.spare)


class Led(Saving):
    """Nodes in slots, and a policy that says what is made of them."""

    shapes: ClassVar[bool] = False
    """Whether other depths than the planned one are considered."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.alive: dict[str, str] = {}
        self.filled: dict[Slot, str] = {}
        self.place: dict[str, Slot] = {}
        self.depths: tuple[int, ...] = ()
        self.holes: set[Slot] = set()
        self.spare: dict[str, None] = {}
        self.rate = 0.0
        self.began = False

    @property
    def most(self) -> int:
        return self.workload.micro_batches if self.shapes else self.workload.pipelines

    def lost(self, gone: Sequence[Node]) -> Turn | None:
        hit = [self.place.pop(node.name) for node in gone if node.name in self.place]
        for node in gone:
            self.alive.pop(node.name, None)
            self.spare.pop(node.name, None)
        self.holes.update(hit)
        for slot in hit:
            del self.filled[slot]
        if not hit:
            return None
        if not (self.held(hit) or self.charges.handed_over(self.workload)):
            return self.begin()
        redo = self.redo_s(len(self.depths), hit)
        return self.follow({**self.charges.alarm, "redo": redo}, completes=True) or self.begin()

    def held(self, hit: Sequence[Slot]) -> bool:
        """Whether somebody who is left has the layers of the slots that were hit."""
        return held(self.depths, self.filled, hit)

    def joined(self, new: Sequence[Node]) -> Turn | None:
        self.alive.update((node.name, node.zone) for node in new)
        self.spare.update((node.name, None) for node in new)
        return self.follow({}) if self.depths else self.begin() if not self.rate else None

    def begin(self) -> Turn | None:
        """From nothing, or from the checkpoint: whatever layout is fastest for those that are there."""
        self.depths, self.filled, self.place, self.holes = (), {}, {}, set()
        self.spare = dict.fromkeys(self.alive)
        start = {"start": self.charges.restart_s}
        turn = self.follow(start)
        if turn is None:
            self.rate = 0.0
            return Turn(0.0, back_to="checkpoint", why="too few nodes") if self.began else None
        again, self.began = self.began, True
        return self.reload(turn.rate) if again else Turn(turn.rate, start, why="start")

    def follow(self, pauses: dict[str, float], *, completes: bool = False) -> Turn | None:
        """Ask the policy, and do what it says. None: there is nothing to do, or nothing that can be done."""
        state = Seen(
            alive=self.alive,
            slots=self.filled,
            depths=self.depths,
            most=self.most,
            empty=frozenset(self.holes),
            spare=tuple(self.spare),
        )
        steps = {layout: s for layout in layouts(state, self._depths()) if (s := self.step_s(layout)) < math.inf}
        if not steps or (not pauses and self._settled(steps)):
            return None
        found = self.decide(state, steps)
        if found.kind == "stay" and not pauses:
            return None
        self.rate = self.scene.rate(self.step_s(found.layout))
        if found.kind != "stay":
            self._move_in(found)
        return Turn(self.rate, {**pauses, **self._pause(found)}, why=found.kind, completes=completes)

    def _settled(self, steps: dict[Layout, float]) -> bool:
        """Whether nothing is faster than what there is, and no stage is down to its last holder."""
        lost = max(Counter(slot.stage for slot in self.holes).values(), default=0)
        return self.scene.rate(min(steps.values())) <= self.rate and lost < len(self.depths) - 1

    def _move_in(self, found: Decision) -> None:
        self.depths = found.layout.depths
        self.filled = {slot: node for slot, node in found.slots.items() if node in self.alive}
        self.place = {node: slot for slot, node in self.filled.items()}
        every = (Slot(d, s) for d, depth in enumerate(self.depths) for s in range(depth))
        self.holes = {slot for slot in every if slot not in self.filled}
        self.spare = {node: None for node in self.alive if node not in self.place}

    def decide(self, state: State, steps: dict[Layout, float]) -> Decision:
        """By cost, as the leader does."""
        outlook = Outlook(
            steps=steps,
            next_event=self.expected_s,
            fill_s=self.charges.join_s,
            move_s=self.charges.join_s + self.charges.move_s(self.workload),
        )
        return decide(state, outlook, 0.0, depths=self._depths())[0]

    def step_s(self, layout: Layout) -> float:
        """One hole is where it is; of several it is taken that nodes move until they are where they hurt least."""
        here = layout.holes == len(self.holes) == 1 and len(layout.depths) > 1
        if here and set(layout.depths) == {self.workload.stages}:
            (hole,) = self.holes
            spread = tuple(int(stage == hole.stage) for stage in range(self.workload.stages))
            return self.steps.rerouted(len(layout.depths), spread)
        return self.steps.layout(layout)

    def _depths(self) -> Iterable[int]:
        if not self.shapes:
            return () if self.depths else (self.workload.stages,)
        w = self.workload
        deepest = min(2 * w.fewest, w.layers or 2 * w.fewest)
        return sorted({w.stages, *range(w.fewest, deepest + 1, max(1, (deepest - w.fewest) // 6))})

    def _pause(self, found: Decision) -> dict[str, float]:
        if found.kind == "stay":
            return {}
        move = {} if found.kind in ("fill", "grow") else {"move": self.charges.move_s(self.workload)}
        return {**move, "join": self.charges.join_s}


class Reroute(Led):
    """`reroute`: the peers of a lost worker run its micro-batches; holes are filled as soon as somebody stands by."""

    name = "reroute"


class Auto(Led):
    """`auto`: re-route, fill, give a hurt pipeline up, or cut the model anew: whatever will have trained most.

    In a single pipeline nobody has peers: there each node shadows the next one, where that costs less than to go back
    to a checkpoint as often as nodes are lost.
    """

    name = "auto"
    shapes = True

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.shadows = False

    def _worth_shadows(self, depths: Sequence[int]) -> bool:
        c = self.charges
        back_s = c.detect_s + c.restart_s + c.load_s(self.workload) + self.checkpoint_every_s / 2
        return len(depths) == 1 < depths[0] and c.shadow * self.expected_s < back_s

    def held(self, hit: Sequence[Slot]) -> bool:
        return super().held(hit) or (self.shadows and not neighbours(self.holes, self.depths[0]))

    def step_s(self, layout: Layout) -> float:
        if not self._worth_shadows(layout.depths):
            return super().step_s(layout)
        if not layout.holes:
            return super().step_s(layout) * (1 + self.charges.shadow)
        planned = layout.depths == (self.workload.stages,) and layout.holes == len(self.holes)
        return self.steps.shadowed(1) * self.steps.taken_over(1, self.holes) if planned else math.inf

    def redo_s(self, pipelines: int, hit: Sequence[Slot]) -> float:
        if pipelines > 1 or self.charges.notice_s:
            return super().redo_s(pipelines, hit)
        return self.scene.redo.seconds("shadow", 1, hit, self.phase)

    def follow(self, pauses: dict[str, float], *, completes: bool = False) -> Turn | None:
        turn = super().follow(pauses, completes=completes)
        if turn is not None:
            self.shadows = self._worth_shadows(self.depths)
        return turn


def neighbours(holes: Iterable[Slot], stages: int) -> bool:
    """Whether two slots that follow each other in one pipeline are empty: then the shadow of one is gone too."""
    gone = {(slot.pipeline, slot.stage) for slot in holes}
    return any((d, (s + 1) % stages) in gone for d, s in gone)


def held(depths: Sequence[int], filled: Iterable[Slot], hit: Sequence[Slot]) -> bool:
    """Whether every part of the model still has a holder; only what was hit can have lost its last one."""
    there = set(filled)
    if len(set(depths)) == 1:
        return all(any(Slot(d, slot.stage) in there for d in range(len(depths))) for slot in hit)
    missing = [
        [(s / depth, (s + 1) / depth) for s in range(depth) if Slot(d, s) not in there]
        for d, depth in enumerate(depths)
    ]
    edges = sorted({edge for parts in missing for part in parts for edge in part})
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    return not any(all(any(a < x < b for a, b in parts) for parts in missing) for x in middles)
