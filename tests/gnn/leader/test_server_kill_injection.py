"""Descriptions of kills."""

from __future__ import annotations

import pytest

from culm.errors import UsageError
from culm.gnn.leader import server_kill_injection


def test_kills_are_parsed_and_chaos_depends_only_on_its_seed() -> None:
    assert server_kill_injection.parse_kills("server=1 epoch=5", 2, 1, 10) == [
        server_kill_injection.ProcessKill(5, "graph-1")
    ]
    assert server_kill_injection.parse_kills("worker epoch=0", 2, 1, 10) == [
        server_kill_injection.ProcessKill(0, "worker")
    ]
    chaos = server_kill_injection.parse_kills("chaos workers=9 servers=2", 2, 1, 10, seed=3)
    assert sorted(k.target for k in chaos) == ["server"] * 2 + ["worker"] * 9
    assert chaos == server_kill_injection.parse_kills("chaos workers=9 servers=2", 2, 1, 10, seed=3)


@pytest.mark.parametrize(
    "text",
    [
        *("server=2 epoch=1", "server=0 epoch=10", "server epoch=1", "cat epoch=1", "worker at=1", "worker=2 epoch=1"),
        *("chaos", "chaos workers=0", "chaos epoch=3", "worker workers=2", "parameter=1 epoch=1", ""),
    ],
)
def test_an_invalid_kill_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="--kill"):
        server_kill_injection.parse_kills(text, 2, 1, 10)
