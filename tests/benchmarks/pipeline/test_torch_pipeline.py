"""The comparison is fair: torch's pipeline trains exactly what a plain loop trains, and leaves no process behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from benchmarks.common.gpt_job import GPTSpec, build_stage, even_cut, step_inputs, step_targets
from benchmarks.pipeline.rank_processes import RankProcesses, TorchUnavailable, clean_environment
from benchmarks.pipeline.torch_overhead import torch_us_per_action
from benchmarks.pipeline.torch_pipeline import STAGES_PER_WORKER, TorchPipeline, TorchPool, worker_count
from benchmarks.pipeline.torch_rank import MULTI_STAGE_SCHEDULES, SINGLE_STAGE_SCHEDULES

from culm.errors import RunError, ScheduleError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

SPEC = GPTSpec(name="tiny", width=16, tokens=8, blocks=4, heads=2, vocab=32, micro_batch=2, micro_batches=4, items=20)
LAYERS = SPEC.blocks + 2
STEPS = 3


@pytest.fixture(scope="module")
def ranks(forked_programs: None) -> Iterator[RankProcesses]:
    with RankProcesses(2) as started:
        yield started


@pytest.fixture(scope="module")
def plain() -> Iterator[tuple[list[float], dict[str, Tensor]]]:
    """Losses and weights of a plain loop, with one thread as in a rank: sums over two threads round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield plain_loop()
    torch.set_num_threads(threads)


def plain_loop() -> tuple[list[float], dict[str, Tensor]]:
    model, data = build_stage(SPEC, range(LAYERS)), SPEC.data()
    optimizer = SPEC.optimizer(model.parameters())
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = zip(step_inputs(SPEC, data, step).split(2), step_targets(SPEC, data, step).split(2), strict=True)
        losses = [SPEC.loss(model(x), y) for x, y in batch]
        for loss in losses:
            (loss / SPEC.micro_batches).backward()
        optimizer.step()
        history.append(torch.stack(losses).mean().item())
    return history, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.parametrize("schedule", sorted(SINGLE_STAGE_SCHEDULES | MULTI_STAGE_SCHEDULES))
def test_torchs_pipeline_trains_what_a_plain_loop_trains(
    ranks: RankProcesses, plain: tuple[list[float], dict[str, Tensor]], schedule: str
) -> None:
    losses, weights = plain
    cut = even_cut(LAYERS, 2 * STAGES_PER_WORKER[schedule])
    with TorchPipeline(SPEC, cut, schedule, ranks=ranks) as pipeline:
        assert pipeline.run_round(1) > 0
        assert pipeline.run_round(STEPS - 1) > 0
        assert pipeline.losses() == pytest.approx(losses, rel=1e-6)
        torch.testing.assert_close(pipeline.weights(), weights, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_schedule_that_torch_refuses_is_unavailable_and_the_ranks_stay_usable(ranks: RankProcesses) -> None:
    odd = GPTSpec(name="odd", width=16, tokens=8, blocks=4, heads=2, vocab=32, micro_batch=2, micro_batches=5)
    with pytest.raises(TorchUnavailable, match="multiple of the number of rounds"):
        TorchPipeline(odd, even_cut(LAYERS, 2), "zb", ranks=ranks)
    with TorchPipeline(SPEC, even_cut(LAYERS, 2), "1f1b", ranks=ranks) as pipeline:
        assert pipeline.run_round(1) > 0


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_killed_rank_is_reported_and_the_others_are_closed() -> None:
    with TorchPool() as pool, pool(SPEC, even_cut(LAYERS, 2), "gpipe") as pipeline:
        watches = [os.pidfd_open(pid) for pid in pool.pids]
        signal.pidfd_send_signal(watches[0], signal.SIGKILL)
        with pytest.raises(RunError, match=r"rank \d .*(died|failed)"):
            pipeline.run_round(1)
        assert ended(watches) == 2
        with pytest.raises(RunError, match="closed"):
            pipeline.run_round(1)


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.real
def test_closing_ends_the_processes_before_it_returns() -> None:
    with TorchPool() as pool:
        assert pool(SPEC, even_cut(LAYERS, 1), "gpipe").run_round(1) > 0
        watches = [os.pidfd_open(pid) for pid in pool.pids]
        pool.close()
        assert ended(watches) == 1


def ended(watches: list[int]) -> int:
    """How many of the watched processes have ended. A pidfd becomes readable when its process ends."""
    ready = len(select.select(watches, [], [], 0)[0])
    for watch in watches:
        os.close(watch)
    return ready


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_ranks_end_with_their_parent_whether_it_is_interrupted_or_killed() -> None:
    parents = {number: _parent() for number in (signal.SIGINT, signal.SIGKILL)}
    for number, parent in parents.items():
        with parent:
            assert parent.stdout is not None
            watch = os.pidfd_open(int(parent.stdout.readline()))
            parent.send_signal(number)
            assert select.select([watch], [], [], 60)[0], f"a rank outlived its parent after {number.name}"
            os.close(watch)


def _parent() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.pipeline.rank_parent"],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_an_action_of_the_empty_pipeline_costs_time() -> None:
    result = torch_us_per_action(1, "1f1b", micro_batches=4, steps=2, rounds=1)
    assert result.cpu_us > 0
    assert result.wall_us > 0


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_ranks_share_a_session_but_no_process_group() -> None:
    """Linux divides a busy machine between sessions: each rank would get as much as all nodes of culm together."""
    with RankProcesses(2) as started:
        assert [os.getsid(pid) for pid in started.pids] == [os.getsid(0)] * 2
        assert [os.getpgid(pid) for pid in started.pids] == list(started.pids)


def test_an_interleaved_schedule_puts_two_stages_on_a_worker() -> None:
    assert worker_count(even_cut(18, 8), "interleaved") == 4
    assert worker_count(even_cut(18, 8), "zb") == 8


def test_invalid_cuts_and_schedules_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ScheduleError, match=r"'dualpipe'.*gpipe"):
        TorchPipeline(SPEC, even_cut(LAYERS, 2), "dualpipe")
    with pytest.raises(ScheduleError, match="multiple of 2"):
        TorchPipeline(SPEC, even_cut(LAYERS, 3), "interleaved")
    with pytest.raises(UsageError, match="workers is 0"):
        RankProcesses(0)


def test_ranks_do_not_see_settings_that_would_tune_the_measurement() -> None:
    seen = clean_environment(
        {"HOME": "/home/x", "TORCH_LOGS": "all", "OMP_NUM_THREADS": "8", "RANK": "3"}, ["/a", "/b"]
    )
    assert seen == {"HOME": "/home/x", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": "/a:/b"}
