"""A parameter server: stashes versions of its layers' weights, updates them, and saves them periodically.

A version of the weights includes the gradients of that many training epochs.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from culm.checkpoint.safetensors_codec import decode, encode
from culm.checkpoint.storage import Storage
from culm.errors import CheckpointError
from culm.gnn.server.store_records import pack_record, unpack_record
from culm.gnn.server.weight_stash import WeightStash
from culm.gnn.transport.gnn_messages import (
    FetchParameterState,
    GnnMessage,
    NewVersion,
    OldestNeededVersion,
    ParameterState,
    PullWeights,
    ServerGradient,
    WeightVersion,
)
from culm.gnn.transport.link_listener import LinkListener
from culm.gnn.transport.tensor_link import TensorLink, frame_message

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.store.store import Store
    from culm.gnn.server.store_records import Generation, GnnRunConfig
    from culm.transport.frames.handshake import FrameSocket


INITIAL_WEIGHTS_FILE = "epoch-000000/initial.safetensors"
"""File with version 0 of all layers."""


def checkpoint_name(version: int, server: int, generation: int) -> str:
    """Return the file of a saved version. The generation is part of the name: a replaced server that wakes up again
    must not overwrite a file of its successor."""
    return f"epoch-{version:06d}/parameter-{server}.{generation}.safetensors"


class ParameterServerSession:
    """One parameter server in one generation."""

    def __init__(self, store: Store, config: GnnRunConfig, server: int, token: str, generation: Generation) -> None:
        self._store, self._config, self._server, self._generation = store, config, server, generation
        self._listener = LinkListener(token, self._handle_connection, config.host)
        self.address = self._listener.address
        self._storage = Storage(config.checkpoints)
        layers = [layer for layer in range(config.model.layers) if config.parameter_server_of(layer) == server]
        self._stash = WeightStash(layers, config.servers, config.adam, lookahead=config.predicts_weights)
        self._stash.load(decode(self._storage.read(generation.checkpoint_names[server])), generation.version)
        self._graph_links: set[TensorLink] = set()
        self._subscribers: dict[int, set[TensorLink]] = {layer: set() for layer in layers}
        self._version_waiters: dict[tuple[int, int], list[TensorLink]] = {}
        self._snapshots: dict[int, dict[str, Tensor]] = {}
        self._save_queue: asyncio.Queue[int] = asyncio.Queue()

    async def run(self, members: dict[str, str]) -> None:
        """Serve connections and save versions until cancelled."""
        del members  # all other processes dial this one
        while True:
            await self._save_version(await self._save_queue.get())

    async def close(self) -> None:
        self._listener.close()
        for link in [*self._graph_links, *(link for links in self._subscribers.values() for link in links)]:
            link.close()

    def _handle_connection(self, name: str, sock: FrameSocket) -> None:
        role, _, number = name.partition(" ")
        if number.rpartition(" ")[2] != str(self._generation.number):
            sock.close()
            return
        link = TensorLink(sock, name, self._handle_message, self._handle_link_lost)
        if role == "graph":
            self._graph_links.add(link)
            for layer in self._stash.layers:
                link.send_framed(self._version_frames(layer))

    def _handle_link_lost(self, link: TensorLink) -> None:
        self._graph_links.discard(link)
        for links in self._subscribers.values():
            links.discard(link)

    def _handle_message(self, link: TensorLink, message: GnnMessage, tensors: list[Tensor]) -> None:
        match message:
            case ServerGradient():
                self._add_gradient(message, tensors)
            case OldestNeededVersion(server, layer, version):
                self._stash.release_older_than(layer, server, version)
            case PullWeights(layer, version):
                self._subscribers[layer].add(link)
                self._send_or_defer(link, layer, version)
            case FetchParameterState():
                for layer in self._stash.layers:
                    state = self._stash.newest_state(layer)
                    tensors = [*state.parameters.values(), *state.moments.values()]
                    link.send(ParameterState(layer, tuple(state.parameters), tuple(state.moments)), tensors)
            case _:
                link.close()

    def _add_gradient(self, message: ServerGradient, tensors: list[Tensor]) -> None:
        gradient = dict(zip(message.names, tensors, strict=True))
        for version in self._stash.add_gradient(message.epoch, message.layer, message.server, gradient):
            self._publish_version(message.layer, version)

    def _publish_version(self, layer: int, version: int) -> None:
        """Send a new version to all subscribers, then announce it to the graph servers. Workers come first, since
        their tasks wait for it."""
        waiting = self._version_waiters.pop((layer, version), [])
        weights, announcement = self._weight_frames(layer, version), self._version_frames(layer)
        for link in {*self._subscribers[layer], *waiting}:
            link.send_framed(weights)
        for link in list(self._graph_links):
            link.send_framed(announcement)
        if version % self._config.checkpoint_every == 0:
            self._snapshots.setdefault(version, {}).update(self._stash.checkpoint_tensors(layer))
            if all(self._stash.newest_version(other) >= version for other in self._stash.layers):
                self._save_queue.put_nowait(version)

    def _version_frames(self, layer: int) -> list[memoryview]:
        version = self._stash.newest_version(layer)
        stashed = self._stash.get_version(layer, version)
        assert stashed is not None
        return frame_message(NewVersion(layer, version), stashed.wire_tensors(["bias"]))

    def _weight_frames(self, layer: int, version: int) -> list[memoryview]:
        """Return the frames of a version; empty if it is not stashed."""
        stashed = self._stash.get_version(layer, version)
        if stashed is None:
            return []
        names = tuple(stashed.weights)
        return frame_message(WeightVersion(layer, version, names), stashed.wire_tensors(names))

    def _send_or_defer(self, link: TensorLink, layer: int, version: int) -> None:
        link.send_framed(self._weight_frames(layer, version))
        if version > self._stash.newest_version(layer):
            self._version_waiters.setdefault((layer, version), []).append(link)

    async def _save_version(self, version: int) -> None:
        """Write a version, publish its file name, and delete versions that no restart can need any more."""
        name = checkpoint_name(version, self._server, self._generation.number)
        await asyncio.to_thread(self._storage.write, name, encode(self._snapshots.pop(version)))
        own_id = f"parameter-{self._server}"
        before = await self._saved_versions(own_id)
        others = [
            await self._saved_versions(server_id)
            for server_id in self._config.parameter_server_ids
            if server_id != own_id
        ]
        floor = min([max(known, default=0) for known in others] + [version])
        kept = {v: n for v, n in before.items() if floor <= v < version} | {version: name}
        await self._store.put(f"saved/{own_id}", pack_record(kept))
        for old in set(before.values()) - set(kept.values()):
            with contextlib.suppress(CheckpointError):
                await asyncio.to_thread(self._storage.delete, old)

    async def _saved_versions(self, server_id: str) -> dict[int, str]:
        stored = await self._store.get(f"saved/{server_id}")
        return unpack_record(stored, dict[int, str]) if stored else {}
