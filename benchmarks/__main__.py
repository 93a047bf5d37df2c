"""`python -m benchmarks`: the pipeline bench without the command line, for a machine where culm is not installed."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks import pipeline
from benchmarks.ours import CulmPool
from benchmarks.probes import probes


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--schedules", default="gpipe,1f1b,zb")
    given = parser.parse_args()
    with CulmPool() as pool:
        result = pipeline.run(
            quick=given.quick,
            stages=[int(s) for s in given.stages.split(",")],
            schedules=given.schedules.split(","),
            probes=probes(pool, quick=given.quick),
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
