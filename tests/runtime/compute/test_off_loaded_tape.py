"""What a forward keeps leaves the device and comes back: the backward computes the same bits, and memory is freed."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.cached_runs import cached_setup, reference_result
from tests.runtime.sample_jobs import JOBS, job_around, job_with, tiny_gpt
from tests.runtime.sample_layers import Dense
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef

from culm.device.device_copies import DeviceCopies
from culm.device.simulated_streams import SimulatedStreams, SimulatedTimes
from culm.device.streams import HostStreams
from culm.errors import LayerFailed
from culm.job import Job
from culm.runtime.clock import RealClock
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.off_loaded_tape import OffLoadedTape, SavedTensors
from culm.runtime.compute.segment import Segment, Tape
from culm.runtime.shadow_tapes import ShadowTapes
from culm.testing.simulated_cluster import run_prepared
from culm.testing.virtual_time import run_virtual


class SeparateMemory(HostStreams):
    """A device that has done everything when a call returns, but whose memory is not that of the host."""

    is_synchronous = False


def separate(cap: int = 1 << 30) -> DeviceCopies:
    return DeviceCopies(SeparateMemory(), cap, chunk_bytes=1 << 16, min_off_loaded_bytes=1)


def modules_of(segment: Segment) -> list[nn.Module]:
    loss = segment.job.loss
    return [*(layer.module for layer in segment.layers), *([loss] if isinstance(loss, nn.Module) else [])]


def leave_after_forward(monkeypatch: pytest.MonkeyPatch) -> list[OffLoadedTape]:
    """After each forward of any segment, its tape leaves the device. Returns the tapes that have."""
    forward, copies, found = Segment.forward, separate(), []

    def leaving(self: Segment, step: int, micro: int, *arguments: Any, **options: Any) -> Any:
        saved = SavedTensors(copies.device, modules_of(self), 1)
        with saved.noting():
            result = forward(self, step, micro, *arguments, **options)
        tape = self.tapes[step, micro]
        tape.off_loaded = saved.off_loaded(tape, copies)
        assert tape.off_loaded.missing_slabs() is not None
        tape.off_loaded.leave_device()
        found.append(tape.off_loaded)
        return result

    monkeypatch.setattr(Segment, "forward", leaving)
    return found


SHAPES = [("1f1b", 2), ("zb", 2), ("zb", 1)]


@pytest.mark.parametrize(("name", "shape"), list(zip(JOBS, itertools.cycle(SHAPES), strict=False)), ids=str)
def test_every_job_trains_the_same_with_all_its_tapes_on_the_host(
    name: str, shape: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, (schedule, stages) = JOBS[name], shape
    setup = cached_setup(job, pipelines=1, stages=stages, schedule=schedule, strategy="none")
    wanted = reference_result(job)
    tapes = leave_after_forward(monkeypatch)
    found = run_prepared(job, setup)
    assert tapes
    assert found.losses == wanted.losses
    assert found.state_sha256 == wanted.state_sha256


class Wide(nn.Module):
    """Saves three views of one tensor, a tensor of its own, and a table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 18))
        self.table = torch.randn(1000, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.weight).chunk(3, -1)
        y: Tensor = q * k * v * self.table[: len(x)]
        return y.tanh()


def wide_job(**changes: Any) -> Job:
    return job_around(Wide, **changes)


def forward_of(job: Job, layers: Sequence[int] = (1,), copies: DeviceCopies | None = None) -> tuple[Segment, Tape]:
    """A forward of some layers, whose tape may leave but has not."""
    copies = copies or separate()
    state = ModelState(job, list(range(len(job.layers))), torch.device("cpu"))
    segment = Segment(job, state, layers)
    saved = SavedTensors(copies.device, modules_of(segment), 1)
    inputs = (torch.randn(2, 6, generator=torch.Generator().manual_seed(3)).requires_grad_(),)
    with saved.noting():
        segment.forward(0, 0, inputs)
    tape = segment.tapes[0, 0]
    tape.off_loaded = saved.off_loaded(tape, copies)
    return segment, tape


def leave(tape: Tape) -> OffLoadedTape:
    assert tape.off_loaded is not None
    tape.off_loaded.leave_device()
    return tape.off_loaded


def test_views_are_copied_once_and_weights_and_tables_not_at_all() -> None:
    _, tape = forward_of(wide_job())
    floats = 4
    rows = 2
    expected = {
        "input": rows * 6 * floats,
        "product of the weights": rows * 18 * floats,
        "product of q and k": rows * 6 * floats,
        "product with v": rows * 6 * floats,
        "output": rows * 6 * floats,
    }
    assert tape.off_loaded is not None
    assert tape.off_loaded.copied_bytes == sum(expected.values())


def test_memory_of_the_device_is_free_after_the_copies_and_that_of_the_host_when_the_tape_is_dropped() -> None:
    copies = separate()
    segment, tape = forward_of(wide_job(), copies=copies)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (*tape.inputs, *tape.pieces[0].outputs)]
    leave(tape)
    copies._release_completed()
    assert all(storage.expired() for storage in storages)
    assert copies.pool.lent_bytes > 0
    del tape
    segment.drop_tapes(0)
    assert copies.pool.lent_bytes == 0, "at once, without a collection of garbage"


def test_after_the_backward_the_slabs_are_free() -> None:
    copies = separate()
    segment, tape = forward_of(wide_job(), copies=copies)
    leave(tape)
    del tape
    segment.backward_input(0, 0, (torch.ones(2, 6),))
    copies._release_completed()
    assert copies.pool.lent_bytes == 0
    segment.backward_weight(0, 0)


def test_a_copy_of_a_weight_in_another_precision_is_made_again_instead_of_copied() -> None:
    floats, halfs = 4, 2
    both = {}
    for name in ("1", "several layers"):
        _, tape = forward_of(job_around(Dense, Dense, precision="bf16"), (1, 2) if name != "1" else (1,))
        assert tape.off_loaded is not None
        both[name] = tape.off_loaded.copied_bytes
    rows, width = 2, 6
    weight_bytes = width * width * halfs
    assert both["1"] < weight_bytes + rows * width * (floats + 3 * halfs)
    assert both["several layers"] - both["1"] < weight_bytes, "the second layer has a weight, too"


@pytest.mark.parametrize("splits", [False, True])
def test_gradients_of_all_kinds_of_graphs_have_the_same_bits(splits: bool) -> None:
    def gradients(*, leaves: bool) -> list[Tensor]:
        torch.manual_seed(0)
        segment, tape = forward_of(job_around(Wide, Dense, precision="bf16"), (1, 2))
        if leaves:
            leave(tape)
        else:
            tape.off_loaded = None
        arrived = (torch.linspace(-1, 1, 12).reshape(2, 6).to(tape.pieces[-1].outputs[0].dtype),)
        if splits:
            found = segment.backward_input(0, 0, arrived)
            segment.backward_weight(0, 0)
        else:
            found = segment.backward(0, 0, arrived)
        weights = [p.grad for layer in segment.layers for p in layer.trainable.values()]
        return [g for g in (*found, *weights) if g is not None]

    for ours, wanted in zip(gradients(leaves=True), gradients(leaves=False), strict=True):
        assert torch.equal(ours, wanted)
        assert ours.stride() == wanted.stride()


def test_compiled_layers_leave_and_come_back_without_another_compilation() -> None:
    job = job_around(Wide, Dense, compile=True)

    def gradients(*, leaves: bool) -> list[Tensor]:
        torch.manual_seed(0)
        segment, tape = forward_of(job, (1, 2))
        if leaves:
            assert leave(tape).copied_bytes > 0
        else:
            tape.off_loaded = None
        found = segment.backward(0, 0, (torch.linspace(-1, 1, 12).reshape(2, 6),))
        weights = [p.grad for layer in segment.layers for p in layer.trainable.values()]
        return [g for g in (*found, *weights) if g is not None]

    wanted = gradients(leaves=False)
    compiled = counters["frames"]["total"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients(leaves=True), wanted, strict=True))
    assert counters["frames"]["total"] == compiled


class Overwriting(nn.Module):
    """Changes in place what autograd has saved."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        z = y * 2
        y.zero_()
        return z


def test_a_tensor_that_was_changed_after_it_was_saved_is_an_error_as_without_leaving() -> None:
    segment, tape = forward_of(job_around(Overwriting))
    leave(tape)
    with pytest.raises(LayerFailed, match="modified by an inplace operation"):
        segment.backward(0, 0, (torch.ones(2, 6),))


def test_a_weight_that_was_changed_since_is_an_error() -> None:
    for precision in ("fp32", "bf16"):
        segment, tape = forward_of(job_around(Dense, Dense, precision=precision))
        leave(tape)
        with torch.no_grad():
            for parameter in segment.layers[0].trainable.values():
                parameter.add_(1)
        arrived = torch.ones(2, 6)
        with pytest.raises((LayerFailed, RuntimeError), match="modified by an inplace operation"):
            segment.backward(0, 0, (arrived,))


def test_what_is_not_copied_yet_is_used_where_it_is() -> None:
    async def main() -> None:
        copies = DeviceCopies(
            SimulatedStreams(1, SimulatedTimes(copy=(5.0, 6.0))), chunk_bytes=1 << 16, min_off_loaded_bytes=1
        )
        segment, tape = forward_of(wide_job(), copies=copies)
        where = [tensor.data_ptr() for tensor in tape.inputs]
        off_loaded = leave(tape)
        assert not off_loaded.is_copied
        tape.bring_back()
        assert [tensor.data_ptr() for tensor in tape.inputs] == where
        segment.backward(0, 0, (torch.ones(2, 6),))
        await copies.drain(60.0)

    run_virtual(main())


class Announced:
    """What a `ShadowTapes` says when there is no room."""

    def __init__(self) -> None:
        self.needed: list[int] = []


def tapes_and_segment(cap: int) -> tuple[ShadowTapes, Announced, Callable[[int], Segment], DeviceCopies]:
    announced, copies = Announced(), separate(cap)
    tapes = ShadowTapes(copies, RealClock(), 4, announced.needed.append)
    job = wide_job()
    state = ModelState(job, [0, 1, 2], torch.device("cpu"))
    segment = Segment(job, state, [1])

    def forward(micro: int) -> Segment:
        saved = tapes.note_forward(segment)
        assert saved is not None
        with saved.noting():
            segment.forward(0, micro, (torch.randn(2, 6).requires_grad_(),))
        tapes.add(segment, segment.tapes[0, micro], saved)
        return segment

    return tapes, announced, forward, copies


def test_slabs_are_allocated_beside_the_run_and_the_first_tape_waits_for_them() -> None:
    async def main() -> None:
        tapes, announced, forward, _ = tapes_and_segment(1 << 30)
        assert tapes.may_run_forward()
        segment = forward(0)
        assert not segment.tapes[0, 0].is_on_host, "no slab is there, and nothing waits for one"
        while not tapes.may_run_forward():
            await asyncio.sleep(0.001)
        assert segment.tapes[0, 0].is_on_host
        assert not announced.needed

    asyncio.run(main())


def test_without_room_no_further_forward_is_run_and_that_is_said_once() -> None:
    async def main() -> None:
        tapes, announced, forward, _ = tapes_and_segment(1024)
        segment = forward(0)
        assert [tapes.may_run_forward() for _ in range(3)] == [False] * 3
        assert len(announced.needed) == 1
        assert not segment.tapes[0, 0].is_on_host
        segment.drop_tapes(0)
        assert tapes.may_run_forward(), "the step was committed"

    asyncio.run(main())


def test_tapes_stay_on_a_device_that_has_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        tapes, announced, forward, copies = tapes_and_segment(1 << 30)
        segment = forward(0)
        assert tapes.may_run_forward()
        assert not segment.tapes[0, 0].is_on_host
        assert tapes.note_forward(segment) is None, "nothing is noted any more"
        assert copies.pool.lent_bytes == 0
        assert not announced.needed

    monkeypatch.setattr(SeparateMemory, "free_bytes", 1 << 30)
    asyncio.run(main())


def test_tapes_keep_a_quarter_of_the_slabs_free() -> None:
    async def main() -> None:
        slab = 4096
        tapes, _, forward, copies = tapes_and_segment(4 * slab)
        for micro in range(4):
            segment = forward(micro)
            for _ in range(100):
                if tapes.may_run_forward():
                    break
                await asyncio.sleep(0.001)
        assert sum(tape.is_on_host for tape in segment.tapes.values()) == 3
        assert copies.pool.lent_bytes == 3 * slab
        assert segment.drop_oldest_on_host(0)
        assert (0, 0) not in segment.tapes
        assert not segment.drop_oldest_on_host(1), "the tapes of a step that is recovered are needed"

    asyncio.run(main())


def test_a_recomputing_forward_keeps_only_the_inputs_of_layers() -> None:
    job = job_with(tiny_gpt, recompute=True)
    copies = separate()
    state = ModelState(job, list(range(len(job.layers))), torch.device("cpu"))
    segment = Segment(job, state, [1, 2])
    saved = SavedTensors(copies.device, modules_of(segment), 1)
    with saved.noting():
        segment.forward(0, 0, (torch.randn(2, 5, 8).requires_grad_(),))
    tape = segment.tapes[0, 0]
    off_loaded = saved.off_loaded(tape, copies)
    del saved
    gc.collect()
    assert off_loaded.copied_bytes == 2 * (2 * 5 * 8 * 4), "the inputs of two layers"
