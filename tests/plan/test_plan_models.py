"""Models that can not be run here: counts that the literature knows, and times that follow the device."""

from __future__ import annotations

import pytest

from culm.errors import PlanError
from culm.plan.instances import DEVICES, NETWORK, device, network
from culm.plan.models import MODELS, model


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
def test_parameters_are_those_of_the_papers_with_the_head_counted_where_it_is_held(
    name: str, millions: float, layers: int
) -> None:
    found = model(name)
    assert found.parameters / 1e6 == pytest.approx(millions, rel=0.01)
    assert len(found.parts) == layers


@pytest.mark.parametrize(("name", "forward"), [("resnet-152", 23.1), ("vgg-19", 39.3), ("alexnet", 1.43)])
def test_flop_of_a_picture_are_those_of_the_literature(name: str, forward: float) -> None:
    assert model(name).flop / 3 / 1e9 == pytest.approx(forward, rel=0.02)


@pytest.mark.parametrize("name", ["gpt-3-1.3b", "gpt-3-6.7b", "gpt-3-175b"])
def test_flop_of_a_transformer_are_six_for_each_parameter_and_token_and_attention(name: str) -> None:
    found = model(name)
    tokens = 2048
    blocks = sum(part.parameters for part in found.parts[1:])
    attention = 3 * sum(part.extra_flop for part in found.parts)
    assert found.flop == pytest.approx(6 * blocks * tokens + attention, rel=0.01)


def test_a_faster_device_takes_less_time_for_every_layer() -> None:
    for name in MODELS:
        slow, fast = (model(name).profile(device(d), 4).layers for d in ("T4", "H100"))
        assert all(s.time_s > f.time_s for s, f in zip(slow, fast, strict=True))


def test_half_precision_halves_what_travels_but_not_what_is_kept_of_the_state() -> None:
    full, half = (model("bert-large").profile(device("A100"), 2, precision=p).layers[5] for p in ("fp32", "bf16"))
    assert half.output_bytes * 2 == full.output_bytes
    assert half.activation_bytes * 2 == full.activation_bytes
    assert half.resident_bytes == full.resident_bytes
    assert half.time_s < full.time_s


def test_recomputing_trades_time_for_memory() -> None:
    plain, again = (model("gpt-2").profile(device("V100"), 1, recompute=r).layers[3] for r in (False, True))
    assert again.activation_bytes < plain.activation_bytes / 10
    assert again.input_s == pytest.approx(plain.input_s + plain.forward_s)


def test_bert_on_the_machines_of_bamboo_is_near_what_its_authors_measured() -> None:
    """108 samples/s on 4 x 8 V100 on demand; an estimate without overheads should be above that, and not far."""
    from culm.plan import choose

    found = model("bert-large")
    profile = found.profile(device("V100"), found.micro_batch)
    asked = {"nodes": 32, "micro_batches": found.batch // found.micro_batch, "pipelines": 4, "stages": 8}
    step = choose(profile, schedule="1f1b", bandwidth=network("p3.2xlarge", 1), **asked).step_s
    assert 1.0 < found.batch / step / 108 < 1.5


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: model("bert-larg"), "there is no model 'bert-larg': did you mean bert-large?"),
        (lambda: model("zzz"), "there is no model 'zzz': there is bert-large, gpt-2"),
        (lambda: device("A10"), "there are no figures of the accelerator 'A10': did you mean A10G?"),
        (lambda: model("gpt-2").profile(DEVICES["T4"], 1, precision="int8"), "precision is 'int8': use one of fp32"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(ask: object, sentence: str) -> None:
    with pytest.raises(PlanError) as error:
        ask()  # type: ignore[operator]
    assert sentence in str(error.value)


def test_every_machine_in_the_catalogue_with_an_accelerator_has_figures_and_a_network() -> None:
    from culm.market.catalogue import catalogue

    for machine in catalogue().machines:
        if machine.gpu_count:
            assert device(machine.gpu).memory > 0
            assert machine.instance in NETWORK


def test_the_network_of_an_instance_is_shared_by_its_accelerators() -> None:
    assert network("p3.2xlarge", 1) == 1.25e9
    assert network("p4d.24xlarge", 8) == 400e9 / 8 / 8
    assert network("somebody's own", 1) == 1.25e9
