"""Norm routes: over which workers the norms of a segment reach all others. Pure.

The first runner of a segment computes its norms, so that all workers clip by the same bits. It sends them to everybody
if they are few. With many pipelines it sends them to one runner of each pipeline, which forwards them within the
pipeline: with 64 pipelines of 16 stages a worker then sends at most 78 frames instead of 1,023.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

MOST_DIRECT = 32
"""Receivers up to which the first runner sends to all of them: a second hop would only take longer."""


def next_receivers(slot: int, runners: Sequence[int], receivers: Collection[int], stages: int) -> Collection[int]:
    """The slots to which a slot sends the norms of a segment.

    `runners`: the slots that run the segment; the first of them computes the norms. `receivers`: all slots that need
    them. `stages`: slots of a pipeline. Each receiver but the first runner gets them exactly once.
    """
    first = runners[0]
    if len(receivers) <= MOST_DIRECT:
        return receivers if slot == first else ()
    staying = set(receivers)
    forwarders: dict[int, int] = {}
    for runner in runners:
        if runner in staying and runner != first:
            forwarders.setdefault(runner // stages, runner)
    forwarders.pop(first // stages, None)
    if slot == first:
        running = set(runners)
        return [at for at in receivers if at != first and (at in running or at // stages not in forwarders)]
    if forwarders.get(slot // stages) != slot:
        return ()
    return [at for at in receivers if at // stages == slot // stages and at not in runners]
