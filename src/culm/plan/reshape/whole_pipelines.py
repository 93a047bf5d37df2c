"""Which pipelines run after a restart from a checkpoint; used by the leader of a real run and by the simulator. Pure.

Slots are numbers: pipeline d has the slots d P to d P + P - 1.
"""

from __future__ import annotations

from collections.abc import Collection


def choose_whole_pipelines(pipelines: int, stages: int, filled: Collection[int], waiting: int) -> list[int]:
    """The slots that are to be filled, with so many workers waiting beside those of the filled slots.

    Whole pipelines, those with the fewest empty slots first; at least one, even if there are too few workers for it.
    """
    count = min(pipelines, max(1, (len(filled) + waiting) // stages))
    missing = {d: sum(d * stages + s not in filled for s in range(stages)) for d in range(pipelines)}
    chosen = sorted(sorted(missing, key=lambda d: missing[d])[:count])
    return [d * stages + s for d in chosen for s in range(stages)]


def completes_another_pipeline(pipelines: int, stages: int, filled: Collection[int], waiting: int) -> bool:
    """Whether the waiting workers complete another pipeline: only then is a restart worth its cost."""
    running = len({slot // stages for slot in filled}) if len(filled) >= stages else 0
    return min(pipelines, (len(filled) + waiting) // stages) > running
