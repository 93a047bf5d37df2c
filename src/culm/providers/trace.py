"""The provider `trace`: nodes of another provider come and go as a market had them."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.market import Event
    from culm.providers.rental import Rental
    from culm.providers.run import LocalRun
    from culm.runtime.clock import Clock


async def replay(rental: Rental, run: LocalRun, clock: Clock) -> None:
    """Start and stop nodes from the first step on until the trace ends. What a market gives back is a new node.

    The first nodes of the run are those that the rental begins with, in order.
    """
    numbers = {event.node: number for number, event in enumerate(rental.first)}
    await run.begun()
    began = clock.now()
    for at, seconds, move in _orders(rental):
        await clock.sleep(max(0.0, began + at - clock.now()))
        if move.kind == "remove":
            run.nodes.stop(numbers.pop(move.node), seconds)
        else:
            (numbers[move.node],) = await run.nodes.start(zones=[move.zone])


def _orders(rental: Rental) -> list[tuple[float, float, Event]]:
    """(when, with how many seconds of notice, what): a node has its notice ahead of its removal, whatever else happens
    meanwhile, but not before it has come."""
    came: dict[str, float] = {}
    found = []
    for move in rental.moves:
        if move.kind == "remove":
            at = max(move.t - rental.notice_s, came.get(move.node, 0.0))
        else:
            at = came[move.node] = move.t
        found.append((at, move.t - at, move))
    return sorted(found, key=lambda order: order[0])


def beside_ideal(rental: Rental, run: LocalRun, summary: Mapping[str, Any]) -> dict[str, float | None]:
    """What a run came to, beside one that loses no second and whose speed is proportional to the nodes that it has.

    The speed with all nodes is the median over the steps of this run in which every slot was filled; None where there
    was no such step.
    """
    share = rental.share(summary["wall_s"])
    ideal = share * run.samples_per_step / median(run.full_steps_s) if run.full_steps_s else None
    of_ideal = summary["goodput"] / ideal if ideal else None
    return {"capacity_share": share, "ideal_goodput": ideal, "of_ideal": of_ideal}
