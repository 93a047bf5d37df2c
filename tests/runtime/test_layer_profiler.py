"""Layers are measured by the events of their device. It is simulated here: its clock advances by the work of layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from tests.tiny_jobs import job, linear
from torch import Tensor, nn

from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.device.simulated_streams import SimulatedStreams, SimulatedTimes
from culm.device.streams import DeviceEvent, HostStreams
from culm.runtime.compute.layer_profiler import profile_layers
from culm.runtime.compute.saved_tensors import DeferredBytes
from culm.testing import run_virtual


class CountedEvent:
    """An event of a device that has a clock of its own."""

    read: bool = False

    def __init__(self, at: float) -> None:
        self.at = at

    def is_complete(self) -> bool:
        return True

    async def wait(self) -> None:
        return

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, CountedEvent)
        return self.at - earlier.at


class CountingStreams(HostStreams):
    """Streams whose time is the work that layers have launched."""

    launched_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        streams = self

        class Stream(type(self.compute)):  # type: ignore[misc]
            def record(self, *, timed: bool = False) -> DeviceEvent:
                assert timed
                return CountedEvent(streams.launched_s)

        self.compute = Stream()


DEVICE = CountingStreams()


class Slow(nn.Module):
    """A layer whose forward takes 8 s on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, values: Tensor) -> Tensor:
        DEVICE.launched_s += 8.0
        found: Tensor = self.inner(values)
        return found


class Quick(Slow):
    """One that takes 2 s."""

    def forward(self, values: Tensor) -> Tensor:
        DEVICE.launched_s += 2.0
        found: Tensor = self.inner(values)
        return found


JOB = job(layers=[Quick, Quick, Quick, Quick, Slow])


def test_times_are_those_of_the_device_whatever_the_host_takes() -> None:
    profile = profile_layers(JOB, streams=DEVICE)
    assert [layer.forward_s for layer in profile.layers] == [2, 2, 2, 2, 8]
    assert [layer.step_s for layer in profile.layers] == [0] * 5


def test_a_profile_of_device_times_decides_where_the_model_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    profile_layers(JOB, streams=DEVICE).save(file)
    assert prepare_run(JOB, RunConfig(stages=2, strategy="none", profile=str(file))).segments == ((0, 4), (4, 5))
    assert prepare_run(JOB, RunConfig(stages=2, strategy="none")).segments != ((0, 4), (4, 5))


def test_simulated_streams_measure_in_virtual_time() -> None:
    async def main() -> None:
        streams = SimulatedStreams(0, SimulatedTimes(compute=(0.5, 0.5)))
        (layer,) = profile_layers(dataclasses.replace(JOB, layers=[linear]), streams=streams).layers
        assert layer.forward_s == layer.weight_s == layer.step_s == 0.5

    run_virtual(main())


def test_a_cpu_is_measured_by_its_clock() -> None:
    profile = profile_layers(job(layers=[linear] * 2))
    assert all(layer.forward_s > 0 for layer in profile.layers)
    assert profile.device.startswith(torch.device("cpu").type)


def test_gradients_that_a_split_backward_keeps_are_counted() -> None:
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    layer[2].weight.requires_grad_(False)
    layer[2].bias.requires_grad_(False)
    deferred = DeferredBytes()
    with deferred.counting(layer):
        layer(torch.zeros(3, 4))
    layer(torch.zeros(3, 4))
    assert deferred.total == 3 * 8 * 4, "of the trained module, once"
