"""A server process of a run: claims a free server id and serves under it, generation after generation.

It is started with a ticket only: the address of the store and the token. It reads the configuration from the store. A
replacement for a lost server is started the same way and claims the id that has become free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import traceback
from typing import TYPE_CHECKING, Protocol

# Before torch is imported: spinning threads would take the workers' cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Imported here, because server processes are forked from a process that has imported this module.
with contextlib.suppress(ImportError):
    import culm.cluster.store.etcd  # noqa: F401 - a store may do without
from culm.errors import RunError
from culm.gnn.server.gnn_run_store import connect_run_store
from culm.gnn.server.graph_server import GraphServerSession
from culm.gnn.server.graph_shard import load_shard
from culm.gnn.server.parameter_server import ParameterServerSession
from culm.gnn.server.store_records import Generation, GnnRunConfig, ServerMember, pack_record, unpack_record

if TYPE_CHECKING:
    from culm.cluster.store.store import Store
    from culm.gnn.launch.launcher import Ticket


class ServerSession(Protocol):
    """A server in one generation."""

    address: str

    async def run(self, members: dict[str, str]) -> None:
        """Serve, given the addresses of all servers, until cancelled or until the generation is known to be broken."""

    async def close(self) -> None:
        """Close all connections."""


def serve(ticket: Ticket) -> None:
    """Run the server process until the store is closed or the server's session is lost."""
    with contextlib.suppress(RunError):
        asyncio.run(_serve(ticket))


async def _serve(ticket: Ticket) -> None:
    async with connect_run_store(ticket) as store:
        stored = await store.get("setup")
        assert stored is not None
        config = unpack_record(stored, GnnRunConfig)
        server_id = await _claim_server_id(store, config)
        if server_id is not None:
            torch.set_num_threads(config.threads)
            await _serve_generations(store, config, server_id, ticket.token)


async def _claim_server_id(store: Store, config: GnnRunConfig) -> str | None:
    for server_id in config.server_ids:
        if await store.swap(f"servers/{server_id}", None, str(os.getpid()).encode(), session=True):
            return server_id
    return None


async def _serve_generations(store: Store, config: GnnRunConfig, server_id: str, token: str) -> None:
    serving: asyncio.Task[None] | None = None
    try:
        async with contextlib.aclosing(store.watch("generation")) as changes:
            async for _, value in changes:
                if value is None:
                    continue
                await _cancel_and_wait(serving)
                serving = asyncio.create_task(
                    _serve_generation(store, config, server_id, token, unpack_record(value, Generation))
                )
                serving.add_done_callback(_exit_on_failure)
    finally:
        await _cancel_and_wait(serving)


def _exit_on_failure(serving: asyncio.Task[None]) -> None:
    """End the process after a failure, so that its server id becomes free and a replacement can claim it."""
    error = None if serving.cancelled() else serving.exception()
    if error is None:
        return
    unexpected = error.split(RunError)[1] if isinstance(error, ExceptionGroup) else error
    if unexpected is not None and not isinstance(unexpected, RunError):
        traceback.print_exception(unexpected)
    os._exit(1)


async def _cancel_and_wait(serving: asyncio.Task[None] | None) -> None:
    if serving is not None:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def _serve_generation(
    store: Store, config: GnnRunConfig, server_id: str, token: str, generation: Generation
) -> None:
    """Register in the generation, wait for all other servers, and serve until the generation ends."""
    session = await _make_session(store, config, server_id, token, generation)
    prefix = f"members/{generation.number}/"
    try:
        await store.put(
            prefix + server_id, pack_record(ServerMember(server_id, session.address, os.getpid())), session=True
        )
        members: dict[str, str] = {}
        async with contextlib.aclosing(store.watch(prefix)) as changes:
            async for key, value in changes:
                if value is not None:
                    members[key.removeprefix(prefix)] = unpack_record(value, ServerMember).address
                if set(members) == set(config.server_ids):
                    break
        await session.run(members)
    finally:
        await session.close()


async def _make_session(
    store: Store, config: GnnRunConfig, server_id: str, token: str, generation: Generation
) -> ServerSession:
    role, _, number = server_id.partition("-")
    if role == "parameter":
        return ParameterServerSession(store, config, int(number), token, generation)
    # In a thread: loading a large part takes a while, and the store needs heartbeats meanwhile.
    await asyncio.to_thread(load_shard, config, int(number))
    return GraphServerSession(store, config, int(number), token, generation)
