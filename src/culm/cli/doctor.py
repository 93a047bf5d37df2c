"""`culm doctor`: is this machine fit for culm? What can be tried is tried: an etcd, and a run that loses a node."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from rich.text import Text

from culm.cli.cluster import EtcdCa, EtcdCert, EtcdKey, EtcdUser, access_of
from culm.cli.display import console_on
from culm.cli.failing import failing
from culm.errors import CulmError

if TYPE_CHECKING:
    from culm.cluster.etcd import Access
    from culm.job import Job

State = Literal["good", "weak", "broken"]
Words = str | None
_MARKS: dict[State, tuple[str, str]] = {
    "good": ("ok  ", "green"),
    "weak": ("weak", "yellow"),
    "broken": ("BAD ", "red"),
}
_FILES = 1024
"""Open files that a process should be allowed: a leader of many nodes has two connections to each."""
_ROOM = 1 << 30
"""Bytes free where temporary files go."""
_EXTRAS = {"planner": ("ortools",), "gnn": ("pymetis", "scipy"), "ray": ("ray",), "aws": ("boto3",)}


class Finding(NamedTuple):
    """One thing that was looked at: how it is, and what to do about it."""

    name: str
    state: State
    what: str
    fix: str = ""


def doctor(
    etcd: Annotated[Words, typer.Option(metavar="URL[,URL...]", help="Look at this etcd, too.")] = None,
    etcd_user: EtcdUser = None,
    etcd_ca: EtcdCa = None,
    etcd_cert: EtcdCert = None,
    etcd_key: EtcdKey = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what was found as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """See whether this machine is fit: libraries, limits, an etcd, and a small run that loses a node."""
    with failing(debug=debug):
        access = None if etcd is None else access_of(etcd, etcd_user, etcd_ca, etcd_cert, etcd_key)
        console = console_on(stderr=json_)
        found = []
        with console.status("trying things out"):
            for finding in findings(access):
                found.append(finding)
                console.print(_line(finding), soft_wrap=True)
        fit = all(finding.state != "broken" for finding in found)
        console.print("fit for culm" if fit else "NOT fit for culm: what is BAD above has to be mended")
        if json_:
            print(json.dumps({"fit": fit, "findings": [finding._asdict() for finding in found]}))
        if not fit:
            raise typer.Exit(1)


def _line(finding: Finding) -> Text:
    mark, colour = _MARKS[finding.state]
    said = f"{finding.what}: {finding.fix}" if finding.fix else finding.what
    return Text.assemble((mark, colour), f"  {finding.name:<9} {said}")


def findings(access: Access | None) -> Iterator[Finding]:
    """One after the other, as they are made: what costs nothing comes first."""
    yield system(platform.system(), sys.version_info[:2])
    yield library("torch", _installed("torch"), _asked("torch"))
    yield cores(len(os.sched_getaffinity(0)), _memory())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield room(tempfile.gettempdir(), shutil.disk_usage(tempfile.gettempdir()).free)
    yield extras({name: all(map(importlib.util.find_spec, needs)) for name, needs in _EXTRAS.items()})
    yield _tried("etcd", _private_etcd)
    if access is not None:
        yield _tried("your etcd", lambda: _their_etcd(access))
    yield _tried("a run", _run)


def system(name: str, python: tuple[int, int]) -> Finding:
    what = f"{name}, Python {python[0]}.{python[1]}"
    if name != "Linux":
        return Finding("system", "broken", what, "culm needs Linux")
    if python > (3, 13):
        return Finding("system", "weak", what, "culm was tried with Python 3.11 to 3.13")
    return Finding("system", "good", what)


def library(name: str, has: str | None, asked: str) -> Finding:
    """`asked` as in "torch<2.14,>=2.11", which is how culm's metadata have it."""
    if has is None:
        return Finding(name, "broken", "not installed", f"pip install '{asked}'")
    least, below = (
        _numbers(match[1]) if (match := re.search(f"{sign}([0-9.]+)", asked)) else () for sign in (">=", "<")
    )
    if _numbers(has) < least or (below and _numbers(has) >= below):
        return Finding(name, "broken", has, f"pip install '{asked}'")
    return Finding(name, "good", has)


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13, 0)."""
    return tuple(int(part) for part in re.match("[0-9.]*", version)[0].split(".") if part)  # type: ignore[index]


def cores(count: int, memory: int) -> Finding:
    what = f"{count} cores, {memory / 2**30:.0f} GiB"
    if count < 2:
        return Finding("machine", "weak", what, "local nodes will share one core")
    return Finding("machine", "good", what)


def open_files(limit: int) -> Finding:
    if 0 <= limit < _FILES:
        return Finding("files", "weak", f"{limit} may be open", f"ulimit -n {_FILES}")
    return Finding("files", "good", "any number may be open" if limit < 0 else f"{limit} may be open")


def room(folder: str, free: int) -> Finding:
    what = f"{folder} has {free / 2**30:.1f} GiB free"
    if free < _ROOM:
        return Finding("room", "weak", what, "set TMPDIR to a place with more")
    return Finding("room", "good", what)


def extras(there: dict[str, bool]) -> Finding:
    """Never more than a hint: whoever needs one is told so by name."""
    missing = [name for name, found in there.items() if not found]
    if missing:
        return Finding("extras", "good", f"without {', '.join(missing)}", f"pip install 'culm[{','.join(missing)}]'")
    return Finding("extras", "good", ", ".join(there))


def _tried(name: str, attempt: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "good", attempt())
    except CulmError as error:
        return Finding(name, "broken", str(error))


def _private_etcd() -> str:
    from culm.providers.etcd import PrivateEtcd

    async def main() -> str:
        began = time.perf_counter()
        async with PrivateEtcd() as etcd:
            up = time.perf_counter() - began
            return f"a private one was up in {up:.1f} s, {await _paced(etcd.access)}"

    return asyncio.run(main())


def _their_etcd(access: Access) -> str:
    return asyncio.run(_paced(access))


async def _paced(access: Access) -> str:
    """Written to a few times, under a name of its own, which is gone afterwards."""
    from culm.cluster.etcd import EtcdStore
    from culm.cluster.timeouts import derive

    notes: list[str] = []
    async with await EtcdStore.open(access, f"doctor-{os.getpid()}", timeouts=derive(5.0), note=notes.append) as store:
        took = []
        for _ in range(10):
            began = time.perf_counter()
            await store.put("probe", b"x" * 1000)
            took.append(time.perf_counter() - began)
        await store.erase()
    return "; ".join([f"a write takes {sorted(took)[len(took) // 2] * 1e3:.1f} ms", *notes])


def _run() -> str:
    """A real one of two nodes, one of which is killed: what was learned must be what one process learns."""
    from culm.api import pickled
    from culm.cli.display import Display
    from culm.cli.launch import launch
    from culm.cluster.setup import Request
    from culm.errors import RunError
    from culm.testing import reference

    job = _small_job()
    request = Request(pipelines=2, stages=1, strategy="reroute", kills=("node=1 step=1 at=0B2",))
    began = time.perf_counter()
    summary = launch(pickled(job), request, Display(), prepared=lambda _: None)
    took = time.perf_counter() - began
    if summary["preemptions"] != 1 or summary["weights_sha256"] != reference(job).weights_sha256:
        raise RunError("of two nodes one was lost, and the other learned something else: please report this")
    told = "one of two nodes was lost to SIGKILL, and what was learned is what one process learns"
    return f"{told}: {took:.1f} s on {_device(job)}"


def _small_job() -> Job:
    import torch

    from culm.job import Job
    from culm.models import RandomTokens, gpt, gpt_loss

    return Job(
        layers=gpt("nano", vocab=16),
        loss=gpt_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=RandomTokens(vocab=16, length=16, count=64),
        global_batch=8,
        micro_batch=2,
        steps=4,
        exact=True,
    )


def _device(job: Job) -> str:
    from culm.runtime.fingerprint import fingerprint

    return fingerprint(job)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _asked(name: str) -> str:
    """What culm's own metadata have of a library."""
    return next((text for text in requires("culm") or () if re.match(f"{name}[^a-z_-]", text)), name)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
