"""The memory that a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from culm.device import host_memory
from culm.device.host_memory import machine_memory_bytes, usable_memory_bytes


@pytest.mark.parametrize(
    ("own", "files", "usable"),
    [
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {"memory.max": "1000\n"}, 1000),
        ("0::/pod/container\n", {"pod/memory.max": "3000", "pod/container/memory.max": "max"}, 3000),
        ("0::/pod/container\n", {"pod/memory.max": "3000", "pod/container/memory.max": "2000"}, 2000),
        ("4:cpu,memory:/docker/1\n0::/\n", {"memory/docker/1/memory.limit_in_bytes": "5000"}, 5000),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "6000"}, 6000),
        ("4:cpu:/docker/1\n", {"memory.max": "7000"}, None),
        ("0::/gone\n", {}, None),
    ],
)
def test_the_smallest_limit_of_the_control_groups_counts(
    own: str, files: dict[str, str], usable: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "own")
    assert usable_memory_bytes() == (machine_memory_bytes() if usable is None else usable)


def test_a_machine_without_control_groups_has_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "missing")
    assert usable_memory_bytes() == machine_memory_bytes()
