"""The newest weights of all layers and what the optimizer knows of them, from the parameter servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.gnn import messages as say
from culm.gnn.link import Link, dial
from culm.runtime.state import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

_PATIENCE_S = 60.0


async def fetch(addresses: Sequence[str], token: str, generation: int, layers: int) -> dict[int, Snapshot]:
    """By layer. Raises RunError if a server is gone or does not answer."""
    found: dict[int, Snapshot] = {}
    complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def heard(_: Link, message: say.Message, tensors: list[Tensor]) -> None:
        assert isinstance(message, say.State)
        own, rest = tensors[: len(message.weights)], tensors[len(message.weights) :]
        found[message.layer] = Snapshot(
            parameters=dict(zip(message.weights, own, strict=True)),
            moments=dict(zip(message.moments, rest, strict=True)),
        )
        if len(found) == layers and not complete.done():
            complete.set_result(None)

    def lost(_: Link) -> None:
        if not complete.done():
            complete.set_exception(RunError("a parameter server went away"))

    links: list[Link] = []
    try:
        for address in addresses:
            links.append(await dial(address, token, f"leader 0 {generation}", heard, lost))
            links[-1].send(say.Fetch())
        async with asyncio.timeout(_PATIENCE_S):
            await complete
    except TimeoutError:
        raise RunError("a parameter server does not answer") from None
    finally:
        for link in links:
            link.close()
    return found
