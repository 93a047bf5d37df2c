"""A parameter server: keeps versions of the weights of its layers, updates them, and saves them now and then."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

from culm.checkpoint.shard import decode, encode
from culm.checkpoint.storage import Storage
from culm.errors import CheckpointError
from culm.gnn.link import Link, Listener, frame
from culm.gnn.messages import Fetch, Gradient, Message, Oldest, Pull, State, Version, Weights
from culm.gnn.setup import pack, unpack
from culm.gnn.shelf import Shelf

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.store import Store
    from culm.gnn.setup import Generation, Setup


INITIAL = "epoch-000000/initial.safetensors"
"""Version 0 of all layers."""


def saved_name(version: int, server: int, generation: int) -> str:
    """Where a server saves a version. A server that was given up and wakes up again must not touch a later one's."""
    return f"epoch-{version:06d}/parameter-{server}.{generation}.safetensors"


class ParameterSession:
    """One parameter server in one generation."""

    def __init__(self, store: Store, setup: Setup, number: int, token: str, generation: Generation) -> None:
        self._store, self._setup, self._number, self._generation = store, setup, number, generation
        self._listener = Listener(token, self._accepted, setup.host)
        self.address = self._listener.address
        self._storage = Storage(setup.checkpoints)
        layers = [layer for layer in range(setup.model.layers) if setup.home(layer) == number]
        self._shelf = Shelf(layers, setup.servers, setup.adam, lookahead=setup.looks_ahead)
        self._shelf.fill(decode(self._storage.read(generation.sources[number])), generation.version)
        self._graph: set[Link] = set()
        self._pullers: dict[int, set[Link]] = {layer: set() for layer in layers}
        self._waiting: dict[tuple[int, int], list[Link]] = {}
        self._snapshots: dict[int, dict[str, Tensor]] = {}
        self._to_save: asyncio.Queue[int] = asyncio.Queue()

    async def run(self, members: dict[str, str]) -> None:
        """Answer calls, and save what is to be saved, until cancelled."""
        del members  # everyone calls us
        while True:
            await self._save(await self._to_save.get())

    async def close(self) -> None:
        self._listener.close()
        for link in [*self._graph, *(link for links in self._pullers.values() for link in links)]:
            link.close()

    def _accepted(self, name: str, sock: socket.socket) -> None:
        role, _, number = name.partition(" ")
        if number.rpartition(" ")[2] != str(self._generation.number):
            sock.close()
            return
        link = Link(sock, name, self._heard, self._lost)
        if role == "graph":
            self._graph.add(link)
            for layer in self._shelf.layers:
                link.pass_on(self._news(layer))

    def _lost(self, link: Link) -> None:
        self._graph.discard(link)
        for links in self._pullers.values():
            links.discard(link)

    def _heard(self, link: Link, message: Message, tensors: list[Tensor]) -> None:
        match message:
            case Gradient():
                self._add(message, tensors)
            case Oldest(server, layer, version):
                self._shelf.oldest(layer, server, version)
            case Pull(layer, version):
                self._pullers[layer].add(link)
                self._send(link, layer, version)
            case Fetch():
                for layer in self._shelf.layers:
                    state = self._shelf.state(layer)
                    tensors = [*state.parameters.values(), *state.moments.values()]
                    link.send(State(layer, tuple(state.parameters), tuple(state.moments)), tensors)
            case _:
                link.close()

    def _add(self, message: Gradient, tensors: list[Tensor]) -> None:
        gradient = dict(zip(message.names, tensors, strict=True))
        for version in self._shelf.add(message.epoch, message.layer, message.server, gradient):
            self._new(message.layer, version)

    def _new(self, layer: int, version: int) -> None:
        """Tell everyone; workers that have asked for this layer before get it at once, and first: their tasks wait."""
        waiting = self._waiting.pop((layer, version), [])
        weights, news = self._weights(layer, version), self._news(layer)
        for link in {*self._pullers[layer], *waiting}:
            link.pass_on(weights)
        for link in list(self._graph):
            link.pass_on(news)
        if version % self._setup.checkpoint_every == 0:
            self._snapshots.setdefault(version, {}).update(self._shelf.snapshot(layer))
            if all(self._shelf.newest(own) >= version for own in self._shelf.layers):
                self._to_save.put_nowait(version)

    def _news(self, layer: int) -> list[memoryview]:
        version = self._shelf.newest(layer)
        stashed = self._shelf.version(layer, version)
        assert stashed is not None
        return frame(Version(layer, version), stashed.tensors(["bias"]))

    def _weights(self, layer: int, version: int) -> list[memoryview]:
        """Nothing if the version is not there."""
        stashed = self._shelf.version(layer, version)
        if stashed is None:
            return []
        names = tuple(stashed.weights)
        return frame(Weights(layer, version, names), stashed.tensors(names))

    def _send(self, link: Link, layer: int, version: int) -> None:
        link.pass_on(self._weights(layer, version))
        if version > self._shelf.newest(layer):
            self._waiting.setdefault((layer, version), []).append(link)

    async def _save(self, version: int) -> None:
        """Write a version, make it known, and forget those that nobody can want any more."""
        name = saved_name(version, self._number, self._generation.number)
        await asyncio.to_thread(self._storage.write, name, encode(self._snapshots.pop(version)))
        own = f"parameter-{self._number}"
        before = await self._versions(own)
        others = [await self._versions(seat) for seat in self._setup.parameter_seats if seat != own]
        floor = min([max(known, default=0) for known in others] + [version])
        kept = {v: n for v, n in before.items() if floor <= v < version} | {version: name}
        await self._store.put(f"saved/{own}", pack(kept))
        for old in set(before.values()) - set(kept.values()):
            with contextlib.suppress(CheckpointError):
                await asyncio.to_thread(self._storage.delete, old)

    async def _versions(self, seat: str) -> dict[int, str]:
        stored = await self._store.get(f"saved/{seat}")
        return unpack(stored, dict[int, str]) if stored else {}
