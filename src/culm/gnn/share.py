"""A server's share of the graph, read once a process: a new generation needs no new tables."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from culm.gnn.files import read_part
from culm.gnn.shard import Shard

if TYPE_CHECKING:
    from culm.gnn.feeds import Feed
    from culm.gnn.setup import Setup

_reading = threading.Lock()


def share(setup: Setup, number: int) -> tuple[Shard, list[list[Feed]]]:
    """The shard, and whom each of its intervals gathers from. From any thread: who comes second waits for the first."""
    with _reading:
        return _share(setup, number)


@lru_cache(maxsize=1)
def _share(setup: Setup, number: int) -> tuple[Shard, list[list[Feed]]]:
    part, source, labels, roles = read_part(Path(setup.parts), number)
    shard = Shard(part, setup.model, source, labels, roles)
    return shard, shard.feeds()
