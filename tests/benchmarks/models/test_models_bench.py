"""The comparison is fair: the plain loop, torch's pipelines and culm learn the same from the same weights and data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from benchmarks.common.gpt_job import even_cut
from benchmarks.models.llama_spec import LlamaSpec
from benchmarks.models.models_bench import QUICK, ModelCase, ModelRow, ModelsResult, measure_row, render_table
from benchmarks.pipeline.culm_pipeline import CulmPool
from benchmarks.pipeline.rank_processes import RankProcesses
from benchmarks.pipeline.torch_pipeline import PlainLoop, TorchPipeline
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

SPEC = LlamaSpec(name="tiny", width=16, blocks=4, heads=2, inner=32, vocab=32, tokens=8, micro_batches=8, items=16)
STEPS = 3


@pytest.fixture(scope="module")
def ranks(forked_programs: None) -> Iterator[RankProcesses]:
    with RankProcesses(4) as started:
        yield started


@pytest.fixture(scope="module")
def plain_losses(forked_programs: None) -> list[float]:
    with PlainLoop(SPEC) as plain:
        plain.run_round(STEPS)
        return plain.losses()


@pytest.mark.real
@pytest.mark.parametrize(("pipelines", "stages"), [(1, 4), (2, 2)])
def test_torchs_pipelines_learn_what_the_plain_loop_learns(
    ranks: RankProcesses, plain_losses: list[float], pipelines: int, stages: int
) -> None:
    cut = even_cut(SPEC.blocks + 2, stages)
    with TorchPipeline(SPEC, cut, "1f1b", ranks=ranks, pipelines=pipelines) as torchs:
        torchs.run_round(STEPS)
        losses = torchs.losses()
    of_pipelines = [losses[p * STEPS : (p + 1) * STEPS] for p in range(pipelines)]
    assert [sum(step) / pipelines for step in zip(*of_pipelines, strict=True)] == pytest.approx(plain_losses, rel=1e-5)


@pytest.mark.real
def test_culm_learns_what_the_plain_loop_learns(plain_losses: list[float]) -> None:
    """culm takes the items in a seeded order: a pass over all items has the same mean loss with the first weights."""
    with CulmPool() as pool, PlainLoop(SPEC) as plain:
        ours = pool(SPEC, even_cut(SPEC.blocks + 2, 1), "1f1b")
        passes = SPEC.items // SPEC.micro_batches
        ours.run_round(2 * passes)
        plain.run_round(2 * passes)
        ours.close()
        ends = plain.losses()[-passes:]
        assert ours.summary["samples"] == 2 * SPEC.items
        assert ours.summary["final_loss"] == pytest.approx(sum(ends) / passes, rel=0.1)


def test_a_row_names_both_sides_and_the_table_says_when_workers_share_cores() -> None:
    assert ModelCase(SPEC, 1, 1).peer == "plain loop"
    assert ModelCase(SPEC, 1, 4).peer == "torch pipelining"
    assert ModelCase(SPEC, 2, 2).peer == "torch pipelining + DDP"
    assert [len(part) for part in ModelCase(SPEC, 2, 2).cut] == [3, 3]
    row = ModelRow(
        model="tiny", pipelines=2, stages=2, schedule="1f1b", micro_batches=4, peer="torch",
        culm=0.1, other=0.12, ratio=1.2, ci=[1.1, 1.3], rounds=6,
    )  # fmt: skip
    console = Console(width=160, record=True)
    console.print(render_table(ModelsResult(rows=[row], ratio_median=1.2, cores=2, workers=4)))
    shown = console.export_text()
    for part in ("2 x 2", "1.200", "1.100 to 1.300", "fewer cores than workers"):
        assert part in shown


@pytest.mark.real
def test_a_row_is_measured_with_real_processes(forked_programs: None) -> None:
    row = measure_row(ModelCase(SPEC, 1, 1), QUICK)
    assert row["culm"] > 0
    assert row["other"] > 0
    assert row["rounds"] == QUICK.rounds
