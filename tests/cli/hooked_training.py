"""A program that trains a job with a hook: python -m tests.cli.hooked_training JOB FOLDER."""

import dataclasses
import sys

import culm
from culm.job import load_job


def main(reference: str, out: str) -> None:
    job = dataclasses.replace(load_job(reference), on_step=lambda metrics: print("step", metrics.step, flush=True))
    culm.train(job, stages=2, out=out)


if __name__ == "__main__":
    main(*sys.argv[1:])
