"""Real compute for the benches that lose nodes: a GPT of equal stages, for machines with a core for each worker."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from benchmarks.common.gpt_job import LARGE_GPT, GPTSpec, even_cut
from benchmarks.pipeline.culm_pipeline import job_from_spec

from benchmarks.resilience import slow_storage
from culm.job import Job

slow_storage.register_slow_storage()  # so that a node that unpickles the job knows this storage
BLOCKS_PER_STAGE = 4
"""Blocks per stage."""


@dataclass(frozen=True, kw_only=True)
class ComputeGPTSpec(GPTSpec):
    """A spec defined in this module, so that a node that unpickles a job with it imports this module."""


COMPUTE_SPEC = ComputeGPTSpec(**asdict(replace(LARGE_GPT, micro_batch=2)))
"""Steps short enough that a run has several losses."""


@dataclass(frozen=True, kw_only=True)
class ComputeJob:
    """A job with this many stages; the counterpart of `EmulatedJob` with real compute."""

    stages: int
    micro_batches: int
    """Micro-batches of the whole step."""
    steps: int
    spec: ComputeGPTSpec = COMPUTE_SPEC

    def build_job(self) -> Job:
        """The job as a user would write it."""
        spec = replace(self.spec, blocks=BLOCKS_PER_STAGE * self.stages, micro_batches=self.micro_batches)
        return replace(job_from_spec(spec), steps=self.steps)

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(part.start for part in even_cut(BLOCKS_PER_STAGE * self.stages + 2, self.stages)[1:])
