"""Proof that the known answer of the memory-capped case, 32 slots, is optimal: CP-SAT proves that 31 is infeasible.

    python -m benchmarks.planner.memory_cap_proof          # minutes on two cores

Three pipelines of four stages, six micro-batches each, F = I = W = 1, worker 2.2 failed, staggered optimizer,
activations capped as in 1F1B. `culm.plan.replan.cp_sat_planner` only proves a bound of 31 in its time. For exactly 31
slots, much can be derived in advance. Let stage 0 begin at 0; it ends at 31, so every I of stage s starts by 29 - s.

The 18 micro-batches of stage 2 go to two workers. One with ten would need 3 + 8 x 2 + 10 = 29 slots from its first F,
at 2 at the earliest, to the end of its last I, followed by I of stages 1 and 0 and a W: 34. So each has nine, which
need 3 + 7 x 2 + 9 = 26 slots, from 2 to 28, and 28 is the latest possible end: this count has no slack. The first F
is at 2 and the first I at 5, with two F before it; from 5 to 28 the worker never waits; the last I is at 27, and two
W follow.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ortools.sat.python import cp_model

D, P, EACH, SLOTS = 3, 4, 6, 31
LOST_STAGE = 2
"""The stage, and the pipeline, of the failed worker."""
MICROS = range(D * EACH)
HORIZON = SLOTS + 12
"""Everything has ended by then: W of later stages may come after the end of stage 0."""
KINDS = "FIW"


class FeasibilityModel:
    """A model that is feasible if there is a plan of 31 slots."""

    def __init__(self) -> None:
        self.model: Any = cp_model.CpModel()
        self.start = {(c, s, m): self._start_variable(c, s) for c in KINDS for s in range(P) for m in MICROS}
        self.runs_in_first_pipeline = {m: self.model.new_bool_var("") for m in MICROS if m // EACH == LOST_STAGE}
        """Whether a micro-batch of the failed worker runs in pipeline 0; otherwise it runs in pipeline 1."""
        self._add_dependencies()
        for stage in range(P):
            for pipeline in range(D):
                if (pipeline, stage) != (LOST_STAGE, LOST_STAGE):
                    self._add_worker_limits(pipeline, stage)
        for pipeline in (0, 1):
            self._add_tight_bounds(pipeline)
        self._add_symmetry_breaking()

    def _start_variable(self, kind: str, stage: int) -> Any:
        first, last_input = stage, SLOTS - 2 - stage
        round_trip = 2 * (P - 1 - stage) + 1
        low, high = {
            "F": (first, last_input - round_trip),
            "I": (first + round_trip, last_input),
            "W": (first + round_trip + 1, SLOTS - 1 if stage == 0 else HORIZON - 1),
        }[kind]
        return self.model.new_int_var(low, high, f"{stage}{kind}")

    def _add_dependencies(self) -> None:
        """Data dependencies, and the window of each stage: all of it within 31 slots of its beginning."""
        add, start = self.model.add, self.start
        begin = [self.model.new_int_var(0, HORIZON - SLOTS if stage else 0, "") for stage in range(P)]
        for (kind, stage, micro), at in start.items():
            add(at >= begin[stage])
            add(at + 1 <= begin[stage] + SLOTS)
            if kind != "F":
                add(at >= start["F" if kind == "I" else "I", stage, micro] + 1)
            if kind == "F" and stage:
                add(at >= start["F", stage - 1, micro] + 1)
            if kind == "I" and stage < P - 1:
                add(at >= start["I", stage + 1, micro] + 1)

    def _candidate_micro_batches(self, pipeline: int, stage: int) -> dict[int, Any]:
        """The micro-batches that may run on a worker, each with the literal that says whether it does."""
        own: dict[int, Any] = {m: True for m in MICROS if m // EACH == pipeline}
        shared = {m: first if pipeline == 0 else ~first for m, first in self.runs_in_first_pipeline.items()}
        return own | (shared if stage == LOST_STAGE and pipeline != LOST_STAGE else {})

    def _add_worker_limits(self, pipeline: int, stage: int) -> None:
        """One action at a time, and no more live activations than the cap."""
        actions, lives = [], []
        for micro, here in self._candidate_micro_batches(pipeline, stage).items():
            at = {kind: self.start[kind, stage, micro] for kind in KINDS}
            actions += [self._interval(at[kind], 1, at[kind] + 1, here) for kind in KINDS]
            length = self.model.new_int_var(3, HORIZON, "")
            lives.append(self._interval(at["F"], length, at["W"] + 1, here))
        self.model.add_no_overlap(actions)
        self.model.add_cumulative(lives, [1] * len(lives), P - stage)

    def _interval(self, start: Any, length: Any, end: Any, here: Any) -> Any:
        if here is True:
            return self.model.new_interval_var(start, length, end, "")
        return self.model.new_optional_interval_var(start, length, end, here, "")

    def _add_tight_bounds(self, pipeline: int) -> None:
        """The derived constraints of the two workers of stage 2 (see the module docstring)."""
        at: dict[tuple[str, int], list[Any]] = {}
        for micro, here in self._candidate_micro_batches(pipeline, LOST_STAGE).items():
            for kind, times in (("F", range(2, 27)), ("I", range(5, 28)), ("W", range(6, HORIZON))):
                chosen = []
                for t in times:
                    chosen.append(self.model.new_bool_var(""))
                    at.setdefault((kind, t), []).append(chosen[-1])
                    self.model.add(self.start[kind, LOST_STAGE, micro] == t).only_enforce_if(chosen[-1])
                self.model.add(sum(chosen) == here)

        def count(kind: str, *times: int) -> Any:
            return sum(sum(at.get((kind, t), [])) for t in times)

        for t in range(2, 28):
            busy = count("F", t) + count("I", t) + count("W", t)
            self.model.add(busy <= 1 if t < 5 else busy == 1)
        for kind, t in (("F", 2), ("I", 5), ("I", 27)):
            self.model.add(count(kind, t) == 1)
        self.model.add(count("F", 2, 3, 4) == 2)
        self.model.add(count("W", *range(28, HORIZON)) == 2)

    def _add_symmetry_breaking(self) -> None:
        """Micro-batches of a pipeline begin in order; the first of the failed worker's runs in pipeline 0."""
        for micro in MICROS[:-1]:
            if (micro + 1) % EACH:
                self.model.add(self.start["F", 0, micro] + 1 <= self.start["F", 0, micro + 1])
        self.model.add(self.runs_in_first_pipeline[LOST_STAGE * EACH] == 1)
        self.model.add(sum(self.runs_in_first_pipeline.values()) == EACH // 2)


def main() -> None:
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 1
    start = time.perf_counter()
    status = solver.solve(FeasibilityModel().model)
    print(f"{SLOTS} slots: {solver.status_name(status)} after {time.perf_counter() - start:.0f} s")
    sys.exit(status != cp_model.INFEASIBLE)


if __name__ == "__main__":
    main()
