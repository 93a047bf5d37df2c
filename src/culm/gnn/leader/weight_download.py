"""Download of the newest weights and optimizer moments from the parameter servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.gnn.transport import gnn_messages as messages
from culm.gnn.transport.tensor_link import TensorLink, connect_link
from culm.runtime.compute.snapshot import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

_TIMEOUT_S = 60.0


async def download_weights(addresses: Sequence[str], token: str, generation: int, layers: int) -> dict[int, Snapshot]:
    """Return the newest state by layer. Raises RunError if a server is lost or does not answer."""
    state: dict[int, Snapshot] = {}
    complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handle_message(_: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
        assert isinstance(message, messages.ParameterState)
        weights, moments = tensors[: len(message.weights)], tensors[len(message.weights) :]
        state[message.layer] = Snapshot(
            parameters=dict(zip(message.weights, weights, strict=True)),
            moments=dict(zip(message.moments, moments, strict=True)),
        )
        if len(state) == layers and not complete.done():
            complete.set_result(None)

    def handle_lost(_: TensorLink) -> None:
        if not complete.done():
            complete.set_exception(RunError("a parameter server was lost"))

    links: list[TensorLink] = []
    try:
        for address in addresses:
            links.append(await connect_link(address, token, f"leader 0 {generation}", handle_message, handle_lost))
            links[-1].send(messages.FetchParameterState())
        async with asyncio.timeout(_TIMEOUT_S):
            await complete
    except TimeoutError:
        raise RunError(f"a parameter server has not sent its weights within {_TIMEOUT_S:g} s") from None
    finally:
        for link in links:
            link.close()
    return state
