"""The newest weights of all layers, from the parameter servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.gnn import messages as say
from culm.gnn.link import Link, dial
from culm.gnn.lookahead import received

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.model import Weights

_PATIENCE_S = 60.0


async def fetch(addresses: Sequence[str], token: str, generation: int, layers: int) -> dict[int, Weights]:
    """By layer. Raises RunError if a server is gone or does not answer."""
    found: dict[int, Weights] = {}
    complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def heard(_: Link, message: say.Message, tensors: list[Tensor]) -> None:
        assert isinstance(message, say.Weights)
        found[message.layer] = received(message.names, tensors).weights
        if len(found) == layers and not complete.done():
            complete.set_result(None)

    def lost(_: Link) -> None:
        if not complete.done():
            complete.set_exception(RunError("a parameter server went away"))

    links: list[Link] = []
    try:
        for address in addresses:
            links.append(await dial(address, token, f"leader 0 {generation}", heard, lost))
            links[-1].send(say.Fetch(-1))
        await asyncio.wait_for(complete, _PATIENCE_S)
    except TimeoutError:
        raise RunError("a parameter server does not answer") from None
    finally:
        for link in links:
            link.close()
    return found
