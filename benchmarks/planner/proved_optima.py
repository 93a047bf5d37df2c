"""Random cases with optima proved by CP-SAT, which greedy plans are compared with. To write the file again:

    python -m benchmarks.planner.proved_optima [CASES]

Cases that were not proved within the time limit are omitted, so the file favours cases that are easy to prove.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from culm.plan import ActivationLimit, PlanCase, Slot
from culm.plan.replan.cp_sat_planner import plan_optimal
from culm.schedule import Costs

OPTIMA_FILE = Path(__file__).parents[2] / "tests" / "plan" / "data" / "optima.json"
SOLVER_LIMIT_S = 12.0
_COSTS = ("forward", "input", "weight", "reduce", "step", "send")


def case_from_row(row: dict[str, Any]) -> PlanCase:
    """Convert a row of the file into a case."""
    costs = {name: tuple(cost) if isinstance(cost, list) else cost for name, cost in row["costs"].items()}
    return PlanCase(
        pipelines=row["pipelines"],
        stages=row["stages"],
        micro_batches=row["micro_batches"],
        failed=frozenset(Slot(*map(int, slot.split("."))) for slot in row["failed"]),
        costs=Costs(**costs),
        split=row["split"],
        stagger=row["stagger"],
        memory=row["memory"],
    )


def row_from_case(case: PlanCase, optimum: float) -> dict[str, Any]:
    """Convert a case into a row of the file."""
    return {
        "pipelines": case.pipelines,
        "stages": case.stages,
        "micro_batches": case.micro_batches,
        "failed": sorted(map(str, case.failed)),
        "costs": {name: getattr(case.costs, name) for name in _COSTS if getattr(case.costs, name)},
        "split": case.split,
        "stagger": case.stagger,
        "memory": case.memory,
        "optimum": optimum,
    }


def random_case(seed: int) -> PlanCase:
    """A case that is mostly small enough to prove: 2 or 3 pipelines of 2 to 4 stages, 2 to 5 micro-batches each."""
    rng = random.Random(seed)
    D, P = rng.choice((2, 2, 3)), rng.choice((2, 3, 3, 4))
    M = D * rng.randint(2, 5 if D == 2 else 4) + rng.choice((0, 0, 1))
    lost = rng.choice((0, 1, 1, 1, 2))
    failed: set[Slot] = set()
    while len(failed) < lost:
        slot = Slot(rng.randrange(D), rng.randrange(P))
        failed |= {slot} if sum(other.stage == slot.stage for other in failed) < D - 1 else set()
    memory: ActivationLimit = rng.choice((None, None, "1f1b", "1f1b", 2, 3))
    split = rng.random() < 0.75
    return PlanCase(
        pipelines=D,
        stages=P,
        micro_batches=M,
        failed=frozenset(failed),
        costs=_random_costs(rng, P),
        split=split,
        stagger=rng.random() < 0.5,
        memory=memory,
    )


def _random_costs(rng: random.Random, stages: int) -> Costs:
    if rng.random() < 0.4:
        return Costs()
    each = {name: tuple(float(rng.randint(1, 4)) for _ in range(stages)) for name in _COSTS[:3]}
    return Costs(**each, reduce=rng.choice((0.0, 1.0)), step=rng.choice((0.0, 1.0)), send=rng.choice((0.0, 0.5, 1.0)))


def main(cases: int = 360) -> None:
    rows = []
    for seed in range(cases):
        solution = plan_optimal(random_case(seed), limit_s=SOLVER_LIMIT_S, workers=2)
        if not solution.gap:
            rows.append(row_from_case(solution.case, solution.step_time))
        print(f"{seed + 1}: {len(rows)} proved", file=sys.stderr, flush=True)
    OPTIMA_FILE.parent.mkdir(exist_ok=True)
    OPTIMA_FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
