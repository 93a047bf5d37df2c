"""That the memory-capped known answer, 32 slots, is the least: CP-SAT proves that 31 can not be had.

    python -m benchmarks.capped          # minutes on two cores

Three pipelines of four stages, six micro-batches each, F = I = W = 1, worker 2.2 dead, staggered optimizer, activations
capped as in 1F1B. `culm.plan.optimal` proves 31 as the bound and no more in its time. Asking for 31 alone, most is
known beforehand. Let stage 0 begin at 0; it ends at 31, so every I of stage s starts by 29 - s.

The 18 micro-batches of stage 2 go to two workers. One with ten would need 3 + 8 x 2 + 10 = 29 from its first F, at 2 at
the earliest, to the end of its last I, and I of stage 1 and 0 and a W are yet to come: 34. So each has nine, which need
3 + 7 x 2 + 9 = 26, from 2 to 28, and 28 is as late as may be: nothing in that count has any slack. Its first F is at 2
and its first I at 5, with two F before that; from 5 to 28 it never waits; the last I is at 27, and two W follow.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ortools.sat.python import cp_model

D, P, EACH, SLOTS = 3, 4, 6, 31
DEAD = 2
"""The stage, and the pipeline, of the dead worker."""
MICROS = range(D * EACH)
LAST = SLOTS + 12
"""Everything has ended by then: W of later stages may come after the end of stage 0."""
KINDS = "FIW"


class Question:
    """Whether there is a plan of 31 slots."""

    def __init__(self) -> None:
        self.model: Any = cp_model.CpModel()
        self.start = {(c, s, m): self._start(c, s) for c in KINDS for s in range(P) for m in MICROS}
        self.first = {m: self.model.new_bool_var("") for m in MICROS if m // EACH == DEAD}
        """Whether a micro-batch of the dead worker runs in pipeline 0, or in 1."""
        self._follow()
        for stage in range(P):
            for pipeline in range(D):
                if (pipeline, stage) != (DEAD, DEAD):
                    self._one_at_a_time(pipeline, stage)
        for pipeline in (0, 1):
            self._without_slack(pipeline)
        self._break_symmetry()

    def _start(self, kind: str, stage: int) -> Any:
        down, up = stage, SLOTS - 2 - stage
        turn = 2 * (P - 1 - stage) + 1
        low, high = {
            "F": (down, up - turn),
            "I": (down + turn, up),
            "W": (down + turn + 1, SLOTS - 1 if stage == 0 else LAST - 1),
        }[kind]
        return self.model.new_int_var(low, high, f"{stage}{kind}")

    def _follow(self) -> None:
        """Data, and the window of each stage: all of it within 31 from its beginning."""
        add, start = self.model.add, self.start
        begin = [self.model.new_int_var(0, LAST - SLOTS if stage else 0, "") for stage in range(P)]
        for (kind, stage, micro), at in start.items():
            add(at >= begin[stage])
            add(at + 1 <= begin[stage] + SLOTS)
            if kind != "F":
                add(at >= start["F" if kind == "I" else "I", stage, micro] + 1)
            if kind == "F" and stage:
                add(at >= start["F", stage - 1, micro] + 1)
            if kind == "I" and stage < P - 1:
                add(at >= start["I", stage + 1, micro] + 1)

    def _runs(self, pipeline: int, stage: int) -> dict[int, Any]:
        """The micro-batches that may run on a worker, with the literal that says so."""
        own: dict[int, Any] = {m: True for m in MICROS if m // EACH == pipeline}
        shared = {m: first if pipeline == 0 else ~first for m, first in self.first.items()}
        return own | (shared if stage == DEAD and pipeline != DEAD else {})

    def _one_at_a_time(self, pipeline: int, stage: int) -> None:
        """One action at a time, and no more activations alive than the cap."""
        actions, lives = [], []
        for micro, here in self._runs(pipeline, stage).items():
            at = {kind: self.start[kind, stage, micro] for kind in KINDS}
            actions += [self._interval(at[kind], 1, at[kind] + 1, here) for kind in KINDS]
            length = self.model.new_int_var(3, LAST, "")
            lives.append(self._interval(at["F"], length, at["W"] + 1, here))
        self.model.add_no_overlap(actions)
        self.model.add_cumulative(lives, [1] * len(lives), P - stage)

    def _interval(self, start: Any, length: Any, end: Any, here: Any) -> Any:
        if here is True:
            return self.model.new_interval_var(start, length, end, "")
        return self.model.new_optional_interval_var(start, length, end, here, "")

    def _without_slack(self, pipeline: int) -> None:
        """What is known of the two workers of stage 2 beforehand (see above)."""
        at: dict[tuple[str, int], list[Any]] = {}
        for micro, here in self._runs(pipeline, DEAD).items():
            for kind, times in (("F", range(2, 27)), ("I", range(5, 28)), ("W", range(6, LAST))):
                chosen = []
                for t in times:
                    chosen.append(self.model.new_bool_var(""))
                    at.setdefault((kind, t), []).append(chosen[-1])
                    self.model.add(self.start[kind, DEAD, micro] == t).only_enforce_if(chosen[-1])
                self.model.add(sum(chosen) == here)

        def many(kind: str, *times: int) -> Any:
            return sum(sum(at.get((kind, t), [])) for t in times)

        for t in range(2, 28):
            busy = many("F", t) + many("I", t) + many("W", t)
            self.model.add(busy <= 1 if t < 5 else busy == 1)
        for kind, t in (("F", 2), ("I", 5), ("I", 27)):
            self.model.add(many(kind, t) == 1)
        self.model.add(many("F", 2, 3, 4) == 2)
        self.model.add(many("W", *range(28, LAST)) == 2)

    def _break_symmetry(self) -> None:
        """Micro-batches of a pipeline begin in order; the first of the dead worker's runs in pipeline 0."""
        for micro in MICROS[:-1]:
            if (micro + 1) % EACH:
                self.model.add(self.start["F", 0, micro] + 1 <= self.start["F", 0, micro + 1])
        self.model.add(self.first[DEAD * EACH] == 1)
        self.model.add(sum(self.first.values()) == EACH // 2)


def main() -> None:
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 1
    began = time.perf_counter()
    status = solver.solve(Question().model)
    print(f"{SLOTS} slots: {solver.status_name(status)} after {time.perf_counter() - began:.0f} s")
    sys.exit(status != cp_model.INFEASIBLE)


if __name__ == "__main__":
    main()
