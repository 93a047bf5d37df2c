"""A run as its store tells it, for who watches from outside: `culm dash --etcd`, `culm run --dash` without a folder.

It reads and never writes. What was before it began to listen it knows from the record alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from culm.cluster.recovered import Recovered
from culm.cluster.setup import NodeRecord, Setup, decode_node, decode_result, decode_setup
from culm.errors import RunError
from culm.observe.posts import posts, seats_of
from culm.observe.reading import Contents, Step
from culm.providers.stores import Place, opened
from culm.runtime import epoch as letters
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from culm.cluster.store import Store
    from culm.runtime.clock import Clock

_MOST_STEPS = 100_000
"""Of more, two become one: a run may be long, and a page shows a thousand points."""
_AGAIN_S = 2.0


class Account(msgspec.Struct, frozen=True):
    """Of a `Record`, what a page shows. Not the record itself: its arithmetic brings torch along, which launchers and
    pages do without."""

    began: float
    first_step_at: float | None
    next_step: int
    steps: int
    samples: int
    lost: int
    duplicated: int
    gone: tuple[int, ...]
    recoveries: tuple[Recovered, ...]
    checkpoints: tuple[int, ...] = ()
    redone: int = 0
    at_risk_s: float = 0.0


_decode_account = msgspec.msgpack.Decoder(Account).decode


class Heard:
    """What was heard of a run so far."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock = name, clock
        self._forget()

    def _forget(self) -> None:
        self._setup: Setup | None = None
        self._account: Account | None = None
        self._summary: Mapping[str, Any] | None = None
        self._events: list[tuple[float, dict[str, Any]]] = []
        self._steps: list[Step] = []
        self._nodes: dict[int, NodeRecord] = {}
        self._leader: int | None = None
        self._epoch: letters.Epoch | None = None
        self._began: float | None = None
        """By the clock; a guess until a record says it."""
        self._ended = False

    def hear(self, key: str, value: bytes | None) -> None:
        """A key of the store has changed."""
        kind, _, name = key.partition("/")
        if kind == "nodes":
            self._hear_of_node(int(name), value)
        elif value is None:
            return
        elif kind == "setup":
            self._begin(decode_setup(value))
        elif kind == "leader":
            self._leader = int(value)
        elif kind == "step":
            self._hear_of_step(msgspec.msgpack.decode(value, type=dict[str, Any]))
        elif kind == "epoch":
            self._hear_of_epoch(letters.decode(value))
        elif kind == "record":
            self._hear_of_account(_decode_account(value))
        elif kind == "result" and not self._ended:
            self._end(value)

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.append((self._clock.now(), {"kind": kind, "node": None, **fields}))

    def _begin(self, setup: Setup) -> None:
        """A run; another one, where there was one before. Its nodes may have been heard of already: keys are told by
        name when a watch begins."""
        if setup == self._setup:
            return
        if self._ended:
            self._forget()
        self._setup = setup
        self._event(
            "run_started",
            job=setup.name,
            nodes=setup.nodes,
            pipelines=setup.pipelines,
            stages=setup.stages,
            schedule=setup.schedule,
            strategy=setup.strategy,
            exact=setup.facts.get("exact"),
            layers=len(setup.layers) or None,
            global_batch=setup.facts.get("global_batch"),
            start=setup.start,
            steps=setup.steps,
            why=setup.why,
        )
        self._events.insert(0, self._events.pop())

    def _hear_of_node(self, node: int, value: bytes | None) -> None:
        before = self._nodes.get(node)
        if value is None:
            if self._nodes.pop(node, None) is not None and not self._ended:
                leaves = before is not None and before.leaves_in is not None
                step = self._steps[-1].step + 1 if self._steps else 0
                self._event("left" if leaves else "lost", node=node, step=step)
            return
        record = self._nodes[node] = decode_node(value)
        if before is None:
            self._event("node_joined", node=node)
        if record.leaves_in is not None and (before is None or before.leaves_in is None):
            self._event("notice", node=node, seconds=record.leaves_in)

    def _hear_of_step(self, metrics: Mapping[str, Any]) -> None:
        step = msgspec.convert({**metrics, "loss": metrics.get("loss")}, Step)
        if self._began is None:
            self._began = self._clock.now() - step.t
        while self._steps and self._steps[-1].step >= step.step:  # the run went back to a checkpoint
            self._steps.pop()
        self._steps.append(step)
        if len(self._steps) > _MOST_STEPS:
            self._steps = halved(self._steps)

    def _hear_of_epoch(self, epoch: letters.Message) -> None:
        assert isinstance(epoch, letters.Epoch)
        if self._epoch is not None and self._epoch.number == epoch.number:
            return
        self._epoch = epoch
        self._event("epoch", number=epoch.number, **seats_of(epoch))

    def _hear_of_account(self, account: Account) -> None:
        known = len(self._account.recoveries) if self._account is not None else 0
        self._account, self._began = account, account.began
        for recovered in account.recoveries[known:]:
            self._event("recovered", **msgspec.to_builtins(recovered))

    def _end(self, value: bytes) -> None:
        result = decode_result(value)
        self._ended = True
        if result.summary is not None:
            self._summary = result.summary
            self._event("finished", steps=result.summary.get("steps"), samples=result.summary.get("samples"))
        else:
            self._event("failed", error=result.error, message=result.message)

    def look(self) -> Contents:
        """What a page can be made of."""
        began = self._began if self._began is not None else min((at for at, _ in self._events), default=0.0)
        return Contents(
            name=self._name,
            summary=self._summary if self._ended else self._so_far() or None,
            steps=list(self._steps),
            events=[{"t": max(0.0, at - began), **event} for at, event in self._events],
            live=not self._ended and bool(self._events),
            now=self._now(),
        )

    def _so_far(self) -> dict[str, Any]:
        """What the record says, in the words of a summary."""
        account, setup = self._account, self._setup
        if account is None or setup is None:
            return {}
        found: dict[str, Any] = {
            "steps": account.next_step,
            "samples": account.samples,
            "samples_lost": account.lost,
            "samples_duplicated": account.duplicated,
            "preemptions": len(account.gone),
            "recoveries": [msgspec.to_builtins(recovered) for recovered in account.recoveries],
            "checkpoints": list(account.checkpoints),
            "samples_redone": account.redone,
            "at_risk_s": account.at_risk_s,
        }
        batch = setup.facts.get("global_batch")
        if isinstance(batch, int):
            found["samples_expected"] = account.steps * batch
        if account.first_step_at is not None:
            found["start_s"] = account.first_step_at - account.began
            wall = account.began + self._steps[-1].t - account.first_step_at if self._steps else 0.0
            found |= {"wall_s": wall, "goodput": account.samples / wall} if wall > 0 else {}
        return found

    def _now(self) -> dict[str, Any]:
        if self._ended or self._epoch is None:
            return {}
        seats = {post.node: post for post in posts(self._epoch)}
        rows = []
        for node in sorted({*self._nodes, *seats}):
            post = seats.get(node)
            row = {"node": node, "slot": post.slot if post else "", "layers": post.layers if post else ""}
            rows.append({**row, "more": self._more(node)})
        return {"leader": self._leader, "epoch": self._epoch.number, "posts": rows}

    def _more(self, node: int) -> str:
        """What else there is to say of a node."""
        record = self._nodes.get(node)
        if record is None:
            return "gone"
        told = ["leads"] if node == self._leader else []
        told += [f"zone {record.zone}"] if record.zone else []
        told += [f"notice: {record.leaves_in:.0f} s"] if record.leaves_in is not None else []
        return ", ".join([*told, record.agent])


def halved(steps: list[Step]) -> list[Step]:
    """Two steps as one: the later, with the samples of both. An evaluation stays."""
    found = []
    for one, other in zip(steps[::2], steps[1::2], strict=False):
        kept = one.eval_loss if other.eval_loss is None else other.eval_loss
        found.append(msgspec.structs.replace(other, samples=one.samples + other.samples, eval_loss=kept))
    return found + steps[len(found) * 2 :]


@contextlib.asynccontextmanager
async def hearing(store: Store, name: str) -> AsyncIterator[Heard]:
    """Listen to the store of a run of this process, for as long as it is open."""
    heard = Heard(name, RealClock())
    task = asyncio.create_task(_listen(store, heard))
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def listening(place: Place, say: Callable[[str], None]) -> AsyncIterator[Heard]:
    """Listen to the store of a run that goes on elsewhere. UsageError: etcd can not be used, or the secret is another.

    A session that is lost is begun anew; the run does not notice.
    """
    heard = Heard(place.job, RealClock())
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(place, RealClock(), say))
        task = asyncio.create_task(_through(place, store, heard, say))
        try:
            yield heard
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _through(place: Place, store: Store, heard: Heard, say: Callable[[str], None]) -> None:
    """Listen, and again over a new session where one is lost."""
    with contextlib.suppress(RunError):
        await _listen(store, heard)
    while True:
        await asyncio.sleep(_AGAIN_S)
        try:
            async with opened(place, RealClock(), say) as again:
                await _listen(again, heard)
        except RunError as error:
            say(str(error))


async def _listen(store: Store, heard: Heard) -> None:
    async with contextlib.aclosing(store.watch("")) as changes:
        async for key, value in changes:
            heard.hear(key, value)
