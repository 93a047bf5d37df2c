from __future__ import annotations

import pytest
import torch
from benchmarks.common.gpt_job import LARGE_GPT, SMALL_GPT, GPTSpec, build_stage, even_cut, step_inputs, step_targets
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError

TINY = GPTSpec(name="tiny", width=16, tokens=8, blocks=4, heads=2, vocab=32, micro_batch=2, micro_batches=4, items=20)


@given(st.data())
def test_a_cut_holds_every_layer_once_in_order_with_blocks_spread_evenly(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, 40))
    stages = data.draw(st.integers(1, blocks))
    cut = even_cut(blocks + 2, stages)
    assert len(cut) == stages
    assert [layer for part in cut for layer in part] == list(range(blocks + 2))
    sizes = [sum(1 <= layer <= blocks for layer in part) for part in cut]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("stages", [0, 5])
def test_a_cut_into_more_stages_than_blocks_is_refused(stages: int) -> None:
    with pytest.raises(PlanError, match=f"stages is {stages}.*4 blocks"):
        even_cut(6, stages)


def test_weights_do_not_depend_on_the_cut() -> None:
    whole = dict(build_stage(TINY, range(6)).named_parameters())
    parts = {n: p for part in even_cut(6, 3) for n, p in build_stage(TINY, part).named_parameters()}
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_steps_iterate_over_the_data_and_start_again_at_its_end() -> None:
    data = TINY.data()
    third = [data[number % 20] for number in range(16, 24)]
    assert torch.equal(step_inputs(TINY, data, 2), torch.stack([x for x, _ in third]))
    assert torch.equal(step_targets(TINY, data, 2), torch.stack([y for _, y in third]))


@pytest.mark.parametrize(("spec", "width", "tokens"), [(LARGE_GPT, 256, 128), (SMALL_GPT, 64, 32)])
def test_the_fixed_jobs_are_what_the_table_says(spec: GPTSpec, width: int, tokens: int) -> None:
    assert len(spec.layers()) == 18
    assert build_stage(spec, range(2))(step_inputs(spec, spec.data(), 0)[:1]).shape == (1, tokens, width)
    assert (spec.micro_batch, spec.micro_batches) == (4, 8)
