"""`culm.train`: a job on local nodes, from Python."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from culm.cluster.setup import Request
from culm.errors import UsageError, said
from culm.job import MODULES, STOP, Job, call
from culm.observe.folder import claim, vacant
from culm.providers.local import LocalNursery, LocalRun, local_run
from culm.providers.nursery import JobSource

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.setup import Setup
    from culm.job import Hook

T = TypeVar("T")
Place: TypeAlias = "str | os.PathLike[str]"
"""A folder or a file, or for a run folder a URL."""


@dataclass(frozen=True)
class Summary:
    """How a run ended: the fields of summary.json as attributes, and the weights if the run had a folder."""

    fields: Mapping[str, Any]
    out: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "fields":  # a copy that is being made has none yet
            raise AttributeError(name)
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"a summary has no {name!r}: it has {', '.join(self.fields)}") from None

    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, from the last checkpoint of the run folder."""
        from culm.checkpoint import Catalog, Storage

        if self.out is None:
            raise UsageError("the run had no folder: train with out='runs/a' to keep its weights")
        catalog = Catalog(Storage(f"{self.out.rstrip('/')}/checkpoints"))
        reader = catalog.open(catalog.newest(verify="sizes").manifest, verify=True)
        return {name: reader.tensor(name) for name in reader.names() if not name.startswith("optimizer.")}


def train(
    job: Job | Callable[[], Job] | str,
    *,
    pipelines: int | None = None,
    stages: int | None = None,
    nodes: int | None = None,
    schedule: str = "1f1b",
    strategy: str = "auto",
    reconfigure: str = "cost",
    out: Place | None = None,
    resume: Place | None = None,
    checkpoint_every: int = 0,
    keep_last: int = 2,
    memory: int | None = None,
    profile: Place | None = None,
    nursery: LocalNursery | None = None,
) -> Summary:
    """Train a job (a Job, a function that returns one, or "FILE:function") on local nodes and wait for the end.

    `Job.on_step` is called in this process. Raises UsageError before anything starts if the request is wrong, RunError
    if the run fails; nothing is left running either way. A `nursery` that is passed in is used and left open.
    """
    described = call(job) if isinstance(job, str) else job() if callable(job) else job
    if not isinstance(described, Job):
        raise UsageError(
            f"culm.train was given a {type(described).__name__}: pass a culm.Job or a function that returns one"
        )
    out, resume, profile = (None if place is None else os.fspath(place) for place in (out, resume, profile))
    request = Request(
        pipelines=pipelines,
        stages=stages,
        nodes=nodes,
        schedule=schedule,
        strategy=strategy,
        reconfigure=reconfigure,
        out=out or resume,
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        memory=memory,
        profile=profile,
        gate="outside" if described.on_step is not None else "open",
    )
    fresh = out if out != resume else None
    if fresh is not None:
        vacant(fresh)
    source = JobSource(reference=job, path=tuple(sys.path)) if isinstance(job, str) else pickled(described)
    own = None if nursery is not None else LocalNursery()
    try:
        return _from_anywhere(_train(nursery or own, source, request, described.on_step, fresh))  # type: ignore[arg-type]
    finally:
        if own is not None:
            own.close()


async def _train(
    nursery: LocalNursery, source: JobSource, request: Request, hook: Hook | None, fresh: str | None
) -> Summary:
    """One run. `fresh` is a folder to make as soon as the request is known to be right."""

    def prepared(_: Setup) -> None:
        if fresh is not None:
            claim(fresh)

    async with local_run(nursery, source, request, prepared=prepared) as run:
        await _follow(run, hook)
        result = await run.result()
    if result.summary is None:
        raise result.failure()
    return Summary(result.summary, request.out)


async def _follow(run: LocalRun, hook: Hook | None) -> None:
    """Hear every step; with a hook, the next one begins when it has returned."""
    run.permit(run.setup.start + 1)
    while (metrics := await run.step()) is not None:
        if hook is None:
            continue
        if hook(metrics) is STOP:
            run.finish(metrics["step"] + 1)
            return
        run.permit(metrics["step"] + 2)


def pickled(job: Job) -> JobSource:
    """A job on its way to the nursery. Its hook stays here, where its variables are."""
    import cloudpickle

    for module in [module for name, module in sys.modules.items() if name.startswith(MODULES)]:
        cloudpickle.register_pickle_by_value(module)  # no other process knows a job file under that name
    try:
        data = cloudpickle.dumps(dataclasses.replace(job, on_step=None))
    except Exception as error:
        raise UsageError(
            f"the job can not be taken to another process ({type(error).__name__}{said(error)}): "
            "put it into a file and pass its name, as in culm.train('my_job.py:job')"
        ) from error
    return JobSource(pickled=data, path=tuple(sys.path))


def _from_anywhere(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where an event loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(main))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="culm-train")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
