"""Growth: what the leader makes of the nodes that are there. It decides by cost, lets the open steps drain, and then
everybody goes on in another shape, with the same state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.relayout import Scene, ahead_of, model_of, relayout, shape_now
from culm.errors import PlanError
from culm.plan.failures import Slot
from culm.plan.reconfigure import Kind, Layout, State
from culm.plan.relayout import Depths, Model, Shape, parse, posts, shape_of, step_s, template, written
from culm.plan.reshape import AHEAD, RESHAPING, Bounds, Pace, Quiet, judge, offers, outlook
from culm.runtime import epoch as letters
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.regroup import Regrouped
    from culm.cluster.tenure import Tenure
    from culm.cluster.toll import Halting


@dataclass(frozen=True)
class Intent:
    """Another shape, from the first step on that nobody has begun."""

    depths: Depths
    why: str
    before: int
    asked: bool = False
    """Whether somebody outside asked for it."""


class Growth:
    """Holds what is intended until the boundary is there. A loss, a notice or another leader makes it void."""

    def __init__(self, tenure: Tenure) -> None:
        self.tenure = tenure
        self.intent: Intent | None = None
        self._wish: Depths | None = None
        self._quiet = Quiet()
        self._model: Model | None = None
        self._times: dict[Depths, float] = {}

    # What is wanted.

    def wish(self, text: str) -> None:
        """Somebody outside asks for a layout. What can not be is refused, with an event."""
        try:
            self._wish = parse(text)
        except PlanError as error:
            self.tenure.event("refused", why=f"the layout {text!r} was asked for: {error}")

    async def consider(self, step: int) -> None:
        """A step is about to be committed, so nobody has begun the one after the next yet: if another shape is wanted,
        nobody shall."""
        tenure = self.tenure
        if self.intent is not None or tenure.epoch is None or step + AHEAD >= tenure.setup.steps or not self._able:
            return
        asked = self._asked()
        wanted = asked or await tenure.clock.aside(self._decided, step)
        if wanted is None:
            return
        self.intent = Intent(*wanted, before=step + AHEAD, asked=asked is not None)
        tenure.tell(letters.Drain(tenure.number, self.intent.before))
        tenure.event("drain", step=self.intent.before, layout=written(self.intent.depths), why=self.intent.why)

    @property
    def _able(self) -> bool:
        """Whether the strategy lives on what peers and shadows hold: the others have reasons of their own to change."""
        return self.tenure.setup.strategy in RESHAPING and bool(self.tenure.setup.layers)

    @property
    def due(self) -> bool:
        """Whether the boundary is there: all that was open is committed."""
        return self.intent is not None and self.tenure.ledger.next_step >= self.intent.before

    def _asked(self) -> tuple[Depths, str] | None:
        """What somebody outside asks for, unless it is so already or can not be."""
        wish, self._wish = self._wish, None
        assert self.tenure.epoch is not None
        if wish is None or wish == _depths(self.tenure.epoch, self.tenure):
            return None
        try:
            shape_of(self.model, wish)
            there = len(self._nodes(self.tenure.epoch))
            if sum(wish) > there:
                raise PlanError(f"it needs {sum(wish)} nodes, and {there} are there")
        except PlanError as error:
            self.tenure.event("refused", why=f"the layout {written(wish)} was asked for: {error}")
            return None
        return wish, f"{written(wish)} was asked for"

    # What is best.

    @property
    def model(self) -> Model:
        if self._model is None:
            self._model = model_of(self.tenure.asked)
        return self._model

    def _decided(self, step: int) -> tuple[Depths, str] | None:
        """Where a post has nobody or somebody has no post, and it has been quiet since: what the policy makes of it."""
        tenure, epoch, now = self.tenure, self.tenure.epoch, self.tenure.clock.now()
        assert epoch is not None
        self._quiet.look((frozenset(self._nodes(epoch)), epoch.shaped), step, now)
        at_odds = tenure.roll.empty(epoch) or tenure.roll.waiting(epoch)
        follows = {member.node for member in epoch.alive} - tenure.roll.crew
        busy = follows or tenure.roll.leaving or not tenure.toll.lately_s
        if not self._quiet.due(step, now) or not at_odds or busy:
            return None
        self._quiet.judged = True
        return self._judge(epoch, now)

    def _judge(self, epoch: Epoch, now: float) -> tuple[Depths, str] | None:
        setup = self.tenure.setup
        if setup.reconfigure == "never":
            return None
        state = self._state(epoch)
        among = self._offers(state)
        ahead = outlook(state, among, self._pace(epoch, now), self._time, now)
        decision, why = judge(setup.reconfigure, setup.strategy, state, among, ahead, now)
        self.tenure.event("decision", verdict=decision.kind, layout=str(decision.layout), why=why)
        return (tuple(sorted(decision.layout.depths, reverse=True)), why) if decision.reshapes else None

    def _state(self, epoch: Epoch) -> State:
        """In the words of the policy."""
        full, depths = Plan.from_text(self.tenure.setup.plan), _depths(epoch, self.tenure)
        slots: dict[Slot, str] = {}
        for pipeline in range(full.pipelines):
            own = [slot for slot in posts(full) if slot // full.stages == pipeline]
            members = [epoch.members[slot] for slot in own]
            slots |= {Slot(pipeline, i): str(m.node) for i, m in enumerate(members) if m is not None}
        zones = self.tenure.roll.zones
        return State(
            alive={str(node): zones.get(node, "") for node in self._nodes(epoch)},
            slots=slots,
            depths=depths,
            most=self.model.micro_batches,
        )

    def _offers(self, state: State) -> Mapping[Layout, Kind]:
        """What could be made of the nodes; of templates there is one for each number of them."""
        if self.tenure.setup.strategy == "templates":
            kinds: dict[Layout, Kind] = {state.layout: "stay"}
            kinds.setdefault(Layout(template(self.model, len(state.alive))), "uneven")
            return kinds
        model = self.model
        bounds = Bounds(
            strategy=self.tenure.setup.strategy,
            shallowest=model.shallowest,
            deepest=model.deepest,
            even=model.ranges > 1,
        )
        return offers(state, bounds)

    def _pace(self, epoch: Epoch, now: float) -> Pace:
        tenure, toll = self.tenure, self.tenure.toll
        return Pace(
            lately_s=toll.lately_s,
            running_s=step_s(self.model, _shape(epoch, tenure), Plan.from_text(epoch.plan)),
            left_s=(tenure.setup.steps - tenure.ledger.next_step) * toll.lately_s,
            calm_s=(now - tenure.began) / len(tenure.roll.gone) if tenure.roll.gone else math.inf,
            state_bytes=sum(layer.resident_bytes for layer in self.model.layers),
            moved_s=toll.moved_s,
        )

    def _time(self, layout: Layout) -> float:
        depths = tuple(sorted(layout.depths, reverse=True))
        if depths not in self._times:
            self._times[depths] = step_s(self.model, shape_of(self.model, depths))
        return self._times[depths]

    # What is done.

    def _nodes(self, epoch: Epoch) -> dict[int, Member]:
        """Everybody that could take part."""
        roll = self.tenure.roll
        staying = [member for member in roll.staying(epoch) if member.node not in roll.leaving]
        return {member.node: member for member in (*staying, *roll.waiting(epoch))}

    def remake(self, halting: Halting, old: Epoch) -> Regrouped | None:
        """The epoch of another shape, where one is due: it was intended and nothing is open or, under `templates`,
        somebody was lost. None: go on in this shape."""
        intent, scene = self._taken(), self._scene(halting, old)
        if scene.homeless or not self._able:
            return None
        if halting.lost:
            return self._instantiate(scene) if scene.setup.strategy == "templates" else None
        if intent is None or intent.before > scene.step or ahead_of(halting.standings, scene.step):
            return None
        self._wish, self._quiet.judged = None, True
        return self._tried(scene, intent.depths, intent.why)

    def _taken(self) -> Intent | None:
        """What was intended. Unless it is done now, it has to be looked at again."""
        intent, self.intent = self.intent, None
        if intent is not None:
            self._wish, self._quiet.judged = intent.depths if intent.asked else self._wish, False
        return intent

    def salvage(self, halting: Halting, old: Epoch) -> Regrouped | None:
        """A shape was left half-way: some stage has no holder, but every layer has. None: no, it has not."""
        self._taken()
        scene = self._scene(halting, old)
        return None if scene.homeless or not self._able else self._instantiate(scene)

    def _scene(self, halting: Halting, old: Epoch) -> Scene:
        tenure = self.tenure
        return Scene(
            setup=tenure.asked,
            old=old,
            number=halting.number,
            leader=tenure.transport.address,
            nodes=self._nodes(old),
            standings=halting.standings,
            step=tenure.ledger.next_step,
            zones=tenure.roll.zones,
        )

    def _instantiate(self, scene: Scene) -> Regrouped | None:
        """The template for those that are left; what was begun of a step is given up."""
        try:
            depths = template(self.model, len(scene.nodes))
        except PlanError as error:
            self.tenure.event("refused", why=f"no template: {error}")
            return None
        why = f"{written(depths)} is made of the {len(scene.nodes)} nodes that are there; what was open is run again"
        return self._tried(scene, depths, why)

    def _tried(self, scene: Scene, depths: Depths, why: str) -> Regrouped | None:
        try:
            return relayout(scene, depths, why)
        except PlanError as error:
            self.tenure.event("refused", why=f"the layout {written(depths)}: {error}")
            return None

    def complete_first(self, made: Regrouped) -> Regrouped:
        """Somebody has made the open step already, which so has to be completed: the template comes after it, and
        until then nobody begins another one."""
        start, why = made.epoch.start, "pipelines are made anew out of those that are left"
        try:
            self.intent = Intent(template(self.model, len(made.epoch.alive)), why, start)
        except PlanError as error:
            self.tenure.event("refused", why=f"no template: {error}")
            return made
        return replace(made, epoch=msgspec.structs.replace(made.epoch, until=start))


def _depths(epoch: Epoch, tenure: Tenure) -> Depths:
    return _shape(epoch, tenure).depths


def _shape(epoch: Epoch, tenure: Tenure) -> Shape:
    return epoch.shape or shape_now(tenure.asked)
