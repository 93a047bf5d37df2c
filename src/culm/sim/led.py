"""culm's own strategies as a leader leads them: what is lost is made good, holes are filled, and shapes change.

All that is decided is asked of `culm.plan.reshape`, as the leader of a real run does: some steps after nodes have come
or gone, with what it would know by then of speed, losses and the end of the run. What is decided is done, here by
another clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from culm.plan import Slot
from culm.plan.goodput import Risk
from culm.plan.reconfigure import Decision, Outlook, State, never
from culm.plan.reshape import AHEAD, Bounds, Pace, Quiet, judge, offers, outlook, patience
from culm.plan.strategy import choose_strategy
from culm.sim.engine import Node, Turn
from culm.sim.ours import Checkpoint
from culm.sim.shapes import bare_parts, overlap
from culm.sim.slots import interleaved
from culm.sim.strategy import Saving, Scene

_NO_OUTLOOK = Outlook(steps={}, next_event=0.0)
"""Whether to fill a hole is no matter of cost."""


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
    """Nodes in pipelines of any depths, and a leader that makes the best of them."""

    shadows: ClassVar[bool] = False

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self.alive: dict[str, str] = {}
        self.filled: dict[Slot, str] = {}
        self.place: dict[str, Slot] = {}
        self.depths: tuple[int, ...] = ()
        self.holes: set[Slot] = set()
        self.spare: dict[str, None] = {}
        self.began = False
        self.quiet = Quiet()
        self.shaped = 0
        self.gone = 0
        self.calm_since = 0.0
        """The last loss: until then there was time to make copies of what had but one holder."""
        self.moved_s: float | None = None

    # What happens.

    def lost(self, gone: Sequence[Node]) -> Turn | None:
        hit = [self.place.pop(node.name) for node in gone if node.name in self.place]
        for node in gone:
            self.alive.pop(node.name, None)
            self.spare.pop(node.name, None)
        for slot in hit:
            del self.filled[slot]
        self.holes.update(hit)
        self.gone += len(hit)
        turn = self._recovered(hit) if hit else None
        self._wait()
        return turn

    def _recovered(self, hit: Sequence[Slot]) -> Turn | None:
        """The open step is completed by those that hold what was lost, if anybody does."""
        pauses = {**self.charges.alarm, "redo": self.redo_s(len(self.depths), hit)}
        held, self.calm_since = self._held(hit), self.now
        if not held:
            return self.begin()
        filled = self._fill()
        return Turn(self.rate, {**pauses, **filled}, why="fill" if filled else "stay", completes=True)

    def _held(self, hit: Sequence[Slot]) -> bool:
        """Whether every part of the model has a holder left, or was given to somebody before its last one went: within
        a notice, or because it had but one holder for longer than a copy takes."""
        if overlap(self.depths, self.holes, shadows=self.shadows) < len(self.depths):
            return True
        if len(self.depths) > 1 or self.shadows:
            copied = self.now - self.calm_since >= self.charges.move_s(self.workload)
            lost = [part.intersection(hit) for part in bare_parts(self.depths, self.holes, shadows=self.shadows)]
            if copied and all(len(part) < 2 for part in lost):
                return True
        return self.charges.handed_over(self.workload)

    def joined(self, new: Sequence[Node]) -> Turn | None:
        self.alive.update((node.name, node.zone) for node in new)
        self.spare.update((node.name, None) for node in new)
        turn = self._taken_in() if self.depths else self.begin()
        self._wait()
        return turn

    def _taken_in(self) -> Turn | None:
        filled = self._fill()
        return Turn(self.rate, filled, why="fill") if filled else None

    def looked(self) -> Turn | None:
        """It has been quiet since nodes came or went: what does the policy make of them?"""
        self.watches = 0
        if self.quiet.judged or not self.at_odds or self.scene.reconfigure == "never":
            return None
        self.quiet.judged = True
        state = self._state()
        among = offers(state, self._bounds)
        ahead = outlook(state, among, self._pace(), lambda layout: self.scene.shapes.predicted(layout.depths), self.now)
        found, _ = judge(self.scene.reconfigure, self.name, state, among, ahead, self.now)
        turn = self._reshaped(found) if found.reshapes else None
        self._wait()
        return turn

    @property
    def at_odds(self) -> bool:
        """Whether a slot has nobody, or somebody no slot."""
        return bool(self.depths and (self.holes or self.spare))

    def _wait(self) -> None:
        """Look again when it has been quiet for long enough, unless that has been judged."""
        self.quiet.look((frozenset(self.alive), self.shaped), self.step, self.now)
        self.watches = patience(self.step_s()) + AHEAD - 1 if self.at_odds and not self.quiet.judged else 0

    # What is known.

    def _state(self) -> Seen:
        return Seen(
            alive=self.alive,
            slots=self.filled,
            depths=self.depths,
            most=self.workload.micro_batches,
            empty=frozenset(self.holes),
            spare=tuple(self.spare),
        )

    @property
    def _bounds(self) -> Bounds:
        w = self.workload
        return Bounds(strategy=self.name, shallowest=w.fewest, deepest=w.layers or 2 * w.fewest)

    def _pace(self) -> Pace:
        lately_s = self.step_s()
        steps_left = self.workload.steps - self.step + AHEAD - 1
        return Pace(
            lately_s=lately_s,
            running_s=self.scene.shapes.running(self.depths, frozenset(self.holes), self.name),
            left_s=steps_left * lately_s if self.workload.steps else self.left_s,
            calm_s=self.now / self.gone if self.gone else math.inf,
            state_bytes=self.workload.state_bytes,
            moved_s=self.moved_s,
        )

    def step_s(self) -> float:
        """A step as things stand."""
        return self.scene.shapes.actual(self.depths, frozenset(self.holes), self.name)

    @property
    def rate(self) -> float:
        return self.scene.rate(self.step_s()) if self.depths else 0.0

    # What is done.

    def begin(self) -> Turn | None:
        """From nothing, as planned; or from the checkpoint, in the shape that there was as far as it can be held."""
        self.filled, self.place, self.spare = {}, {}, dict.fromkeys(self.alive)
        self._shape(self._restarted() if self.began else self._whole())
        self._fill()
        again, self.began = self.began, self.began or bool(self.depths)
        if not self.depths:
            return Turn(0.0, back_to="checkpoint", why="too few nodes") if again else None
        return self.reload(self.rate) if again else Turn(self.rate, {"start": self.charges.restart_s}, why="start")

    def _whole(self) -> tuple[int, ...]:
        P = self.workload.stages
        return (P,) * min(self.workload.pipelines, len(self.alive) // P)

    def _restarted(self) -> tuple[int, ...]:
        """Every stage has somebody, and holes are where there are most; else one pipeline of those that are left."""
        nodes = len(self.alive)
        if self.depths and nodes >= max(self.depths):
            return self.depths
        return self._whole() or ((nodes,) if nodes >= self.workload.fewest else ())

    def _shape(self, depths: tuple[int, ...]) -> None:
        self.depths, self.shaped = depths, self.shaped + 1
        every = (Slot(d, s) for d, depth in enumerate(depths) for s in range(depth))
        self.holes = {slot for slot in every if slot not in self.filled}

    def _fill(self) -> dict[str, float]:
        """Whoever stands by takes an empty slot; the pause in which that is done."""
        if not self.holes or not self.spare:
            return {}
        found, _ = never(self._state(), _NO_OUTLOOK, self.now)
        self._move_in(self.seats(found))
        return {"join": self.charges.join_s}

    def _move_in(self, slots: dict[Slot, str]) -> None:
        self.filled = slots
        self.place = {node: slot for slot, node in slots.items()}
        self.holes.difference_update(slots)
        self.spare = {node: None for node in self.alive if node not in self.place}

    def seats(self, found: Decision) -> dict[Slot, str]:
        """The node of every slot that will be filled: holders of a stage in as many zones as can be."""
        return dict(found.slots)

    def _reshaped(self, found: Decision) -> Turn:
        """Other pipelines, after a pause in which the last step drains and layers go to their new holders."""
        self.filled = {}
        self._shape(found.layout.depths)
        self._move_in(self.seats(found))
        change = {"move": self.charges.move_s(self.workload), "join": self.charges.join_s}
        took = sum(change.values())
        self.moved_s = took if self.moved_s is None else (self.moved_s + took) / 2
        return Turn(self.rate, change, why=found.kind)


class Reroute(Led):
    """`reroute`: the peers of a lost worker run its micro-batches."""

    name = "reroute"


class Shadow(Led):
    """`shadow`: the predecessor of a lost worker has its layers and runs both stages."""

    name = "shadow"
    shadows = True

    def seats(self, found: Decision) -> dict[Slot, str]:
        """In a new shape neighbours of a pipeline are in different zones; who is seated already stays."""
        if self.filled:
            return super().seats(found)
        order = iter(interleaved(Node(name, zone) for name, zone in self.alive.items()))
        return {slot: next(order).name for slot in sorted(found.slots)}


class ShadowLazy(Shadow):
    """`shadow-lazy`: the shadow is kept current, but runs nothing ahead of time."""

    name = "shadow-lazy"


def auto(scene: Scene) -> Saving:
    """`auto`: the strategy that a run would choose for itself, knowing no more of its losses than by default."""
    w, c = scene.workload, scene.charges
    told = {"detect_s": c.detect_s, "decide_s": c.decide_s, "join_s": c.join_s, "restart_s": c.restart_s}
    risk = Risk(**told, stall_s=c.stall_s, storage=c.storage, shadow=c.shadow)
    step_s = scene.steps.healthy(w.pipelines)
    chosen = choose_strategy(w.case(w.pipelines), step_s, state_bytes=w.state_bytes, risk=risk, saves=True)
    made: dict[str, type[Saving]] = {"reroute": Reroute, "shadow": Shadow}
    return made.get(chosen.strategy, Checkpoint)(scene)
