"""Reference models: counts agree with the literature, and times follow the device."""

from __future__ import annotations

import pytest

from culm.errors import PlanError
from culm.plan.model.accelerators import ACCELERATORS, INSTANCE_GBIT_PER_S, find_accelerator, worker_bandwidth
from culm.plan.model.reference_models import REFERENCE_MODELS, find_model


@pytest.mark.parametrize(
    ("name", "millions", "layers"),
    [
        ("resnet-152", 60.2, 52),
        ("vgg-19", 143.7, 19),
        ("alexnet", 61.1, 8),
        ("gnmt-16", 275, 18),
        ("bert-large", 334 + 31, 26),
        ("gpt-2", 1558 + 80, 50),
        ("gpt-3-125m", 125 + 39, 14),
        ("gpt-3-6.7b", 6658 + 206, 34),
        ("gpt-3-13b", 12853 + 257, 42),
        ("gpt-3-175b", 174_600 + 618, 98),
    ],
)
def test_parameters_equal_those_of_the_papers_with_a_tied_head_counted_twice(
    name: str, millions: float, layers: int
) -> None:
    result = find_model(name)
    assert result.parameters / 1e6 == pytest.approx(millions, rel=0.01)
    assert len(result.layers) == layers


@pytest.mark.parametrize(("name", "forward"), [("resnet-152", 23.1), ("vgg-19", 39.3), ("alexnet", 1.43)])
def test_flop_of_an_image_equal_those_of_the_literature(name: str, forward: float) -> None:
    assert find_model(name).flop / 3 / 1e9 == pytest.approx(forward, rel=0.02)


@pytest.mark.parametrize("name", ["gpt-3-1.3b", "gpt-3-6.7b", "gpt-3-175b"])
def test_flop_of_a_transformer_are_six_for_each_parameter_and_token_and_attention(name: str) -> None:
    result = find_model(name)
    tokens = 2048
    blocks = sum(part.parameters for part in result.layers[1:])
    attention = 3 * sum(part.parameterless_flop for part in result.layers)
    assert result.flop == pytest.approx(6 * blocks * tokens + attention, rel=0.01)


def test_a_faster_device_takes_less_time_for_every_layer() -> None:
    for name in REFERENCE_MODELS:
        slow, fast = (find_model(name).profile(find_accelerator(d), 4).layers for d in ("T4", "H100"))
        assert all(s.time_s > f.time_s for s, f in zip(slow, fast, strict=True))


def test_half_precision_halves_sent_bytes_and_keeps_a_copy_of_the_weights_for_each_micro_batch() -> None:
    full, half = (
        find_model("bert-large").profile(find_accelerator("A100"), 2, precision=p).layers[5] for p in ("fp32", "bf16")
    )
    assert half.output_bytes * 2 == full.output_bytes
    assert half.activation_bytes == full.activation_bytes // 2 + half.parameter_bytes // 2
    assert (half.parameter_bytes, half.state_bytes) == (full.parameter_bytes, full.state_bytes)
    assert half.resident_bytes == full.resident_bytes
    assert half.time_s < full.time_s


def test_recomputing_trades_time_for_memory() -> None:
    plain, again = (
        find_model("gpt-2").profile(find_accelerator("V100"), 1, recompute=r).layers[3] for r in (False, True)
    )
    assert again.activation_bytes < plain.activation_bytes / 10
    assert again.input_s == pytest.approx(plain.input_s + plain.forward_s)


def test_bert_on_bamboos_instances_is_near_the_published_speed() -> None:
    """108 samples/s were measured on 4 x 8 V100 on demand; an estimate without overheads is slightly above that."""
    from culm.plan import choose_shape

    result = find_model("bert-large")
    profile = result.profile(find_accelerator("V100"), result.micro_batch)
    asked = {"nodes": 32, "micro_batches": result.global_batch // result.micro_batch, "pipelines": 4, "stages": 8}
    step = choose_shape(profile, schedule="1f1b", bandwidth=worker_bandwidth("p3.2xlarge", 1), **asked).step_s
    assert 1.0 < result.global_batch / step / 108 < 1.5


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: find_model("bert-larg"), "there is no model 'bert-larg': did you mean bert-large?"),
        (lambda: find_model("zzz"), "there is no model 'zzz': there is bert-large, gpt-2"),
        (lambda: find_accelerator("A10"), "there are no figures for the accelerator 'A10': did you mean A10G?"),
        (
            lambda: find_model("gpt-2").profile(ACCELERATORS["T4"], 1, precision="int8"),
            "precision is 'int8': use one of fp32",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(ask: object, sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        ask()  # type: ignore[operator]
    assert sentence in str(error.value)


def test_every_machine_in_the_catalogue_with_an_accelerator_has_figures_and_a_network() -> None:
    from culm.market.catalogue import load_catalogue

    for machine in load_catalogue().instances:
        if machine.gpu_count:
            assert find_accelerator(machine.gpu).memory > 0
            assert machine.instance in INSTANCE_GBIT_PER_S


def test_bf16_is_the_default_precision_where_the_accelerator_has_it() -> None:
    without = {name for name, device in ACCELERATORS.items() if device.default_precision == "fp32"}
    assert without == {"V100", "V100-32GB", "T4"}


def test_newer_accelerators_have_more_memory_and_nvlink() -> None:
    names = ("A100-80GB", "H100", "H200", "B200", "B300")
    devices = [find_accelerator(name) for name in names]
    assert [device.nvlink / 1e9 for device in devices] == [600, 900, 900, 1800, 1800]
    assert [device.memory for device in devices] == sorted(device.memory for device in devices)


def test_the_network_of_an_instance_is_shared_by_its_accelerators() -> None:
    assert worker_bandwidth("p3.2xlarge", 1) == 1.25e9
    assert worker_bandwidth("p4d.24xlarge", 8) == 400e9 / 8 / 8
    assert worker_bandwidth("somebody's own", 1) == 1.25e9
