"""The job of `culm bench gpu` as a file for `culm run`: a GPT of 406 M parameters in bf16.

culm run benchmarks/gpu/gpu_job.py --pipelines 2 --stages 2 --strategy reroute --steps 8 --out runs/trace
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu.gpu_bench import GPT_406M, GPT_CPU
from benchmarks.pipeline.culm_pipeline import job_from_spec

from culm.job import Job


def job() -> Job:
    """On GPUs."""
    return replace(job_from_spec(GPT_406M), steps=8)


def on_cpu() -> Job:
    """A small one, to try the commands."""
    return replace(job_from_spec(GPT_CPU), steps=8)
