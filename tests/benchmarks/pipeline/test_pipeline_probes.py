"""The additional figures of the pipeline bench."""

from __future__ import annotations

import pytest
from benchmarks.common.gpt_job import GPTSpec, even_cut
from benchmarks.pipeline.culm_pipeline import CulmPipeline, group_cpu_seconds
from benchmarks.pipeline.pipeline_probes import kept_bytes, us_per_action

from culm.providers.local_provider import ForkServerClient

TINY = GPTSpec(name="tiny", width=8, tokens=4, blocks=2, heads=2, vocab=16, micro_batch=2, micro_batches=4)


def test_the_interpreter_is_timed_per_action() -> None:
    assert 0 < us_per_action(stages=2, micro_batches=4, steps=2, rounds=1) < 1e6


def test_a_middle_stage_keeps_every_activation_and_every_gradient_that_it_sent() -> None:
    frame = TINY.micro_batch * TINY.tokens * TINY.width * 4
    assert kept_bytes(TINY, stages=3)["kept"] == frame * TINY.micro_batches * 2


@pytest.mark.real
def test_culms_side_runs_exactly_the_steps_of_a_round(fork_server: ForkServerClient) -> None:
    side = CulmPipeline(TINY, even_cut(4, 2), "1f1b", fork_server=fork_server)
    try:
        assert side.run_round(2) > 0
        assert side.run_round(3) > 0
        assert group_cpu_seconds(fork_server.pid) > 0
    finally:
        side.close()
    assert side.steps == 5
