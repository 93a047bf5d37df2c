"""Real compute for the benches that lose nodes: a GPT of equal stages, where there is a core for each worker."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from benchmarks import slow
from benchmarks.job import LARGE, GPTSpec, even_cut
from benchmarks.ours import job_of
from culm.job import Job

slow.register()  # wherever the job is unpickled, such storage is known
BLOCKS = 4
"""Of a stage."""


@dataclass(frozen=True, kw_only=True)
class Known(GPTSpec):
    """A spec of this module, so that a node which unpickles a job of it imports this one."""


SPEC = Known(**asdict(replace(LARGE, micro_batch=2)))
"""Short enough steps that a run sees several losses."""


@dataclass(frozen=True, kw_only=True)
class Computed:
    """A job of so many stages, as `Emulated` is one of layers that sleep."""

    stages: int
    micro_batches: int
    """Of the whole step."""
    steps: int
    spec: Known = SPEC

    def job(self) -> Job:
        """As a user would write it."""
        spec = replace(self.spec, blocks=BLOCKS * self.stages, micro_batches=self.micro_batches)
        return replace(job_of(spec), steps=self.steps)

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(part.start for part in even_cut(BLOCKS * self.stages + 2, self.stages)[1:])
