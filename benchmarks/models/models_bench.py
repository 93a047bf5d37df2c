"""`culm bench models`: a Llama of transformers, trained by culm and by others, in alternating rounds.

At 1 x 1 culm is compared with the plain loop over the model of transformers; at 1 x 4 and 2 x 2 with
torch.distributed.pipelining on the same layers and the same cut, with DistributedDataParallel over the pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TypedDict

from benchmarks.common.gpt_job import StageCut, even_cut
from benchmarks.common.paired_rounds import PairedComparison, TimedSide, compare_rounds
from benchmarks.models.llama_spec import LLAMA_100M, LLAMA_SMALL, LlamaSpec
from benchmarks.pipeline.culm_pipeline import CulmPool
from benchmarks.pipeline.pipeline_bench import PipelineEffort, available_core_count, describe_machine, measure_sides
from benchmarks.pipeline.torch_pipeline import PlainLoop, TorchPipeline
from rich.table import Table

SCHEDULE = "1f1b"
SHAPES = ((1, 1), (1, 4), (2, 2))
"""(pipelines, stages) of the rows."""
FULL = PipelineEffort(jobs=(), rounds=8, starts=2, round_s=1.0)
QUICK = PipelineEffort(jobs=(), rounds=6, starts=2, round_s=0.3)


class ModelRow(TypedDict):
    """One shape. Seconds are per step, medians; a ratio above 1: culm is faster."""

    model: str
    pipelines: int
    stages: int
    schedule: str
    micro_batches: int
    peer: str
    culm: float
    other: float
    ratio: float
    ci: list[float]
    rounds: int


class ModelsResult(TypedDict):
    """The JSON of the bench."""

    rows: list[ModelRow]
    ratio_median: float
    cores: int
    workers: int


@dataclass(frozen=True)
class ModelCase:
    """What one row measures."""

    spec: LlamaSpec
    pipelines: int
    stages: int

    @property
    def cut(self) -> StageCut:
        return even_cut(self.spec.blocks + 2, self.stages)

    @property
    def peer(self) -> str:
        if self.pipelines * self.stages == 1:
            return "plain loop"
        return "torch pipelining" + (" + DDP" if self.pipelines > 1 else "")


def run(
    *,
    quick: bool = False,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    progress: Callable[[str], object] = lambda _: None,
) -> ModelsResult:
    """Measure every shape; `progress` gets a line for each. Raises RunError if a process of a side died."""
    effort = QUICK if quick else FULL
    widest = max(pipelines * stages for pipelines, stages in shapes)
    progress(describe_machine(available_core_count(), widest))
    rows = []
    for pipelines, stages in shapes:
        row = measure_row(ModelCase(LLAMA_SMALL if quick else LLAMA_100M, pipelines, stages), effort)
        progress(
            f"{row['model']} {pipelines} x {stages}: {row['peer']} / culm {row['ratio']:.3f} "
            f"({row['ci'][0]:.3f} to {row['ci'][1]:.3f})"
        )
        rows.append(row)
    return ModelsResult(
        rows=rows, ratio_median=median(row["ratio"] for row in rows), cores=available_core_count(), workers=widest
    )


def measure_row(case: ModelCase, effort: PipelineEffort) -> ModelRow:
    """One row: both sides are started `effort.starts` times, and alternate in every start."""
    found: list[PairedComparison] = []
    for _ in range(effort.starts):
        with _both_sides(case) as (ours, theirs):
            found.append(measure_sides(ours, theirs, effort))
    comparison = compare_rounds([s for c in found for s in c.a_s], [s for c in found for s in c.b_s])
    return ModelRow(
        model=case.spec.name,
        pipelines=case.pipelines,
        stages=case.stages,
        schedule=SCHEDULE,
        micro_batches=case.spec.micro_batches,
        peer=case.peer,
        culm=median(comparison.a_s),
        other=median(comparison.b_s),
        ratio=comparison.ratio_median,
        ci=list(comparison.ci),
        rounds=len(comparison.ratios),
    )


def render_table(result: ModelsResult) -> Table:
    """The rows as a table."""
    table = Table(title="seconds per step", caption=describe_machine(result["cores"], result["workers"]))
    table.add_column("model")
    for name in ("shape", "micro-batches", "culm", "other", "other / culm", "95 %", "rounds"):
        table.add_column(name, justify="right")
    table.add_column("compared with")
    for row in result["rows"]:
        table.add_row(
            row["model"],
            f"{row['pipelines']} x {row['stages']}",
            str(row["micro_batches"]),
            f"{row['culm']:.4f}",
            f"{row['other']:.4f}",
            f"{row['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*row["ci"]),
            str(row["rounds"]),
            row["peer"],
        )
    return table


@contextmanager
def _both_sides(case: ModelCase) -> Iterator[tuple[TimedSide, TimedSide]]:
    with ExitStack() as stack:
        theirs: PlainLoop | TorchPipeline
        if case.pipelines * case.stages == 1:
            theirs = stack.enter_context(PlainLoop(case.spec))
        else:
            theirs = stack.enter_context(TorchPipeline(case.spec, case.cut, SCHEDULE, pipelines=case.pipelines))
        pool = stack.enter_context(CulmPool())
        strategy = "none" if case.pipelines == 1 else "reroute"
        ours = pool(case.spec, case.cut, SCHEDULE, pipelines=case.pipelines, strategy=strategy)
        yield stack.enter_context(closing(ours)), theirs
