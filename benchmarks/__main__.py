"""`python -m benchmarks`: the pipeline bench without the command line, for machines where culm is not installed."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.pipeline import pipeline_bench
from benchmarks.pipeline.culm_pipeline import CulmPool
from benchmarks.pipeline.pipeline_probes import list_probes


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--schedules", default="gpipe,1f1b,zb")
    options = parser.parse_args()
    with CulmPool() as pool:
        result = pipeline_bench.run(
            quick=options.quick,
            stages=[int(s) for s in options.stages.split(",")],
            schedules=options.schedules.split(","),
            probes=list_probes(pool, quick=options.quick),
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
