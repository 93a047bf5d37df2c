"""Communication, derived from the placement: nobody writes a send or a receive by hand."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from culm.schedule.action import BACKWARD, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.schedule.plan import Plan


class Edge(NamedTuple):
    """The output of `producer` travels from worker `source` to worker `target`."""

    producer: Action
    source: int
    target: int


class Step(NamedTuple):
    """An action with what must arrive before it and what leaves after it.

    What an action takes from another on the same worker is in neither: the executor finds it at home.
    """

    action: Action
    receives: tuple[Edge, ...]
    sends: tuple[Edge, ...]


@lru_cache(maxsize=8)
def lower(plan: Plan) -> tuple[tuple[Step, ...], ...]:
    """Each worker's list with its sends and receives. The plan is taken to be one that `check` accepts.

    Kept for a while: all workers of a simulated cluster ask for the same.
    """
    placement = plan.placement()
    incoming = {action: _edge(action, worker, plan.segments, placement) for action, worker in placement.items()}
    outgoing: defaultdict[Action, list[Edge]] = defaultdict(list)
    for edge in incoming.values():
        if edge is not None:
            outgoing[edge.producer].append(edge)

    def step(action: Action) -> Step:
        edge = incoming.get(action)
        return Step(action, () if edge is None else (edge,), tuple(outgoing.get(action, ())))

    return tuple(tuple(map(step, actions)) for actions in plan.workers)


def producer(action: Action, segments: int, placement: Mapping[Action, int]) -> Action | None:
    """The action of a neighbouring segment whose output this one takes, if it takes any.

    F takes the output of the segment before, I and B the gradient from the segment after, made by its I or B
    as placed. What an action needs of its own segment is always on the same worker.
    """
    segment, kind, micro = action
    if kind is Kind.F:
        return Action(segment - 1, Kind.F, micro) if segment else None
    if kind not in BACKWARD or segment == segments - 1:
        return None
    split = Action(segment + 1, Kind.I, micro)
    return split if split in placement else Action(segment + 1, Kind.B, micro)


def _edge(action: Action, worker: int, segments: int, placement: Mapping[Action, int]) -> Edge | None:
    made = producer(action, segments, placement)
    if made is None or placement[made] == worker:
        return None
    return Edge(made, placement[made], worker)
