"""Replay a market trace: start and stop nodes of a run as the trace says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from culm.market import NodeEvent
    from culm.providers.run_handle import RunHandle
    from culm.providers.trace_market import RentalSchedule
    from culm.runtime.clock import Clock


async def replay_rental(rental: RentalSchedule, run: RunHandle, clock: Clock) -> None:
    """Start and stop nodes from the first step on until the trace ends. A node that is rented again is a new node.

    The first nodes of the run are the initial nodes of the rental, in order.
    """
    numbers = {event.node: number for number, event in enumerate(rental.initial_nodes)}
    await run.wait_for_first_step()
    began = clock.now()
    for at, seconds, move in _timed_orders(rental):
        await clock.sleep(max(0.0, began + at - clock.now()))
        if move.kind == "remove":
            run.nodes.stop(numbers.pop(move.node), seconds)
        else:
            (numbers[move.node],) = await run.nodes.start(zones=[move.zone])


def _timed_orders(rental: RentalSchedule) -> list[tuple[float, float, NodeEvent]]:
    """(time, seconds of notice, event), sorted by time. A notice is given `notice_s` before the removal, but not before
    the node was started."""
    came: dict[str, float] = {}
    found = []
    for move in rental.changes:
        if move.kind == "remove":
            at = max(move.t - rental.notice_s, came.get(move.node, 0.0))
        else:
            at = came[move.node] = move.t
        found.append((at, move.t - at, move))
    return sorted(found, key=lambda order: order[0])


_WINDOW_STEPS = 4
"""Steps over which the best speed of a run is measured: single steps can end in quick succession after a recovery."""


def compare_with_ideal(rental: RentalSchedule, run: RunHandle, summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Compare a run with an ideal one, which has the best speed of this run all the time.

    The best speed is the highest mean over any four successive steps, or over the whole run. The goodput is the latter
    at most, so `of_ideal` is 1 at most. None if the run has no two steps. The share of the nodes that the market
    offered is reported beside it and is not part of it: peers can run lost work in bubbles, so fewer nodes are not
    always slower.
    """
    share, goodput = rental.mean_capacity(summary["wall_s"]), summary["goodput"]
    fastest_s = shortest_mean_step(tuple(run.step_ends))
    if not fastest_s:
        return {"capacity_share": share, "ideal_goodput": None, "of_ideal": None}
    ideal = max(run.samples_per_step / fastest_s, goodput)
    return {"capacity_share": share, "ideal_goodput": ideal, "of_ideal": goodput / ideal}


def shortest_mean_step(ends: Sequence[float]) -> float | None:
    """The shortest mean duration of four successive steps, from when each ended; None with fewer than two steps."""
    window = min(_WINDOW_STEPS, len(ends) - 1)
    if window < 1:
        return None
    return min((ends[i + window] - ends[i]) / window for i in range(len(ends) - window))
