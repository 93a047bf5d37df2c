"""What `culm doctor` says of the GPUs of a machine."""

from __future__ import annotations

from dataclasses import replace

from culm.machine_checks.gpu_checks import GpuFacts, check_gpus, find_gpu_facts

H200 = GpuFacts(names=["H200", "H200"], cuda="12.8", driver="570.86", nccl=(2, 28, 9))


def results(facts: GpuFacts) -> dict[str, tuple[str, str]]:
    return {found.name: (found.state, found.what) for found in check_gpus(facts)}


def test_a_machine_without_a_gpu_is_fit() -> None:
    assert results(GpuFacts()) == {"gpu": ("good", "none: workers compute on the CPU")}


def test_a_driver_that_torch_cannot_use_is_named() -> None:
    assert results(GpuFacts(driver="570.86"))["gpu"] == (
        "weak",
        "driver 570.86, and torch was built without CUDA",
    )
    assert "finds no GPU" in results(GpuFacts(driver="570.86", cuda="12.8"))["gpu"][1]


def test_gpus_are_listed_with_driver_and_cuda() -> None:
    found = results(H200)
    assert found["gpu"] == ("good", "2 x H200, driver 570.86, CUDA 12.8")
    assert found["peers"][0] == found["pinned"][0] == found["nccl"][0] == "good"
    assert "mps" not in found


def test_what_is_wrong_is_marked() -> None:
    facts = GpuFacts(
        names=["H200", "H200"],
        cuda="12.8",
        nccl=(2, 28, 3),
        unreachable_peers=[(0, 1)],
        uses_mps=True,
        locks_memory=False,
    )
    found = results(facts)
    assert found["nccl"] == ("weak", "2.28.3 is refused for sums over GPUs")
    assert found["pinned"][0] == found["mps"][0] == "weak"
    assert "GPU 1 from 0" in found["peers"][1]


def test_versions_of_nccl_around_the_refused_ones_are_good() -> None:
    for version in ((2, 28, 2), (2, 28, 9), (2, 29, 1)):
        assert results(GpuFacts(names=["H200"], cuda="12.8", nccl=version))["nccl"][0] == "good"


def test_the_facts_of_this_machine_can_be_found() -> None:
    assert all(found.state in ("good", "weak") for found in check_gpus(find_gpu_facts()))


def test_limits_of_page_locked_memory_are_named() -> None:
    limited = replace(H200, machine_bytes=64 << 30, usable_bytes=16 << 30)
    assert "a control group allows 16.0 GiB of 64.0 GiB" in results(limited)["pinned"][1]
    assert "8 MiB may be locked" in results(replace(H200, lockable_bytes=8 << 20))["pinned"][1]
