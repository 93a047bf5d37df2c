"""`culm.launch`, `culm.list_jobs` and `culm.down`: train a job on machines that culm starts and ends."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, Unpack, overload

from culm.cluster.store.etcd.etcd_access import check_job_name
from culm.config import LaunchOptions, RunConfig, merge_options
from culm.errors import UsageError
from culm.job import call_job_function, find_job_file, import_root, override_texts, replace_fields
from culm.machines.head_registry import HeadLaunch
from culm.machines.job_list import JobStatus, find_jobs
from culm.machines.launch_end import end_launches
from culm.machines.launch_preparation import (
    ABANDON_AFTER_S,
    END_TIMEOUT_S,
    LaunchSettings,
    check_prepared,
    launch_config,
    prepare_launch,
)
from culm.machines.remote_head import ask_head
from culm.providers.execute_run import find_resources
from culm.providers.fork_server import GRACE_S, JobSource
from culm.providers.supervisor.run_registry import registry_name
from culm.providers.supervisor.run_window import SupervisorClient
from culm.providers.supervisor.window_messages import StartRun
from culm.strategies.registry import add_search_folders
from culm.summary import Summary
from culm.training import execute_supervised, make_observer, run_blocking

_log = logging.getLogger("culm")


@overload
def launch(
    job: str,
    config: RunConfig | None = None,
    *,
    on: str,
    detach: Literal[False] = False,
    overrides: Mapping[str, Any] | None = None,
    job_name: str | None = None,
    spot: bool = False,
    instances: Iterable[str] = (),
    any_instance: bool = False,
    zones: Iterable[str] = (),
    max_price: float | None = None,
    price: float | None = None,
    provider_options: Mapping[str, str] | None = None,
    program: str | None = None,
    image: str = "",
    environment: Mapping[str, str] | None = None,
    machine_notice: str = "none",
    grace: float = GRACE_S,
    abandon_after: float = ABANDON_AFTER_S,
    address: str = "",
    port: int = 0,
    join: str | None = None,
    progress: bool | None = None,
    **options: Unpack[LaunchOptions],
) -> Summary: ...
@overload
def launch(
    job: str,
    config: RunConfig | None = None,
    *,
    on: str,
    detach: Literal[True],
    overrides: Mapping[str, Any] | None = None,
    job_name: str | None = None,
    spot: bool = False,
    instances: Iterable[str] = (),
    any_instance: bool = False,
    zones: Iterable[str] = (),
    max_price: float | None = None,
    price: float | None = None,
    provider_options: Mapping[str, str] | None = None,
    program: str | None = None,
    image: str = "",
    environment: Mapping[str, str] | None = None,
    machine_notice: str = "none",
    grace: float = GRACE_S,
    abandon_after: float = ABANDON_AFTER_S,
    address: str = "",
    port: int = 0,
    join: str | None = None,
    progress: bool | None = None,
    **options: Unpack[LaunchOptions],
) -> str: ...
def launch(
    job: str,
    config: RunConfig | None = None,
    *,
    on: str,
    detach: bool = False,
    overrides: Mapping[str, Any] | None = None,
    job_name: str | None = None,
    spot: bool = False,
    instances: Iterable[str] = (),
    any_instance: bool = False,
    zones: Iterable[str] = (),
    max_price: float | None = None,
    price: float | None = None,
    provider_options: Mapping[str, str] | None = None,
    program: str | None = None,
    image: str = "",
    environment: Mapping[str, str] | None = None,
    machine_notice: str = "none",
    grace: float = GRACE_S,
    abandon_after: float = ABANDON_AFTER_S,
    address: str = "",
    port: int = 0,
    join: str | None = None,
    progress: bool | None = None,
    **options: Unpack[LaunchOptions],
) -> Summary | str:
    """Start machines of a provider, train a job on them, replace lost ones and end all of them, as `culm launch` does.
    Starts machines that cost money without asking.

    `job`: "FILE[:function]". `config` and the keyword arguments that are fields of RunConfig say how the job is run;
    `nodes`, or `pipelines` and `stages`, say how many machines are needed. `overrides` replaces fields of the job.
    `on`: local, hosts, slurm, ray, trace, kubernetes, ec2, skypilot or MODULE:CLASS, with `provider_options` such as
    {"hosts": "a,b"} or {"region": "us-east-1"}.

    Returns the summary at the end of the run. `detach=True`: returns the name of the job when its machines are about to
    be requested; the run continues without this process, see `culm.attach`, `culm.stop` and `culm.down`.

    Which machines: `spot`, `instances` (types to choose from) or `any_instance` (all that fit), `zones`, `max_price`
    (dollars per hour of a machine), `price` (what a machine costs, where culm cannot know it). On a machine: `program`
    is the command that runs culm, `image` the image, `environment` its further variables; `machine_notice` says where
    it learns of preemptions, `grace` how many seconds it has after SIGTERM, and `abandon_after` after how many seconds
    without a sign of the run it ends itself. `address` and `port`: where machines reach this one; `join`: the token of
    a store that is used instead of one here. `job_name`: name of the job in that store; default: of its file.

    Ctrl-C and `progress` are as in `culm.train`; `Job.on_step` is called on a node. Raises UsageError if the request is
    wrong, before anything is started, and RunError if the run fails.
    """
    if not isinstance(job, str):
        raise UsageError(
            f"job is of type {type(job).__name__}: other machines import the job, so put it into a file and pass its "
            "name, as in culm.launch('my_job.py:job', on=...)"
        )
    merged = merge_options(config, options, stacklevel=3)
    merged = launch_config(merged if join is None else dataclasses.replace(merged, join=join))
    job_file = find_job_file(job)
    add_search_folders(import_root(job_file), job_file.parent)
    texts = override_texts(overrides or {})
    replace_fields(call_job_function(job), overrides or {})  # what is wrong with the job is said before machines start
    settings = LaunchSettings(
        on=on,
        job=check_job_name(job_name or job_file.stem),
        spot=spot,
        instances=_names("instances", instances),
        any_instance=any_instance,
        zones=_names("zones", zones),
        max_price=max_price,
        price=price,
        options=_texts("provider_options", provider_options or {}),
        program=program,
        image=image,
        environment=_texts("environment", environment or {}),
        machine_notice=machine_notice,
        grace_s=grace,
        abandon_after_s=abandon_after,
        address=address,
        port=port,
    )
    prepared = prepare_launch(settings, merged, warn=_warn, note=_log.info)
    check_prepared(prepared, _warn)
    resources = find_resources(prepared.config, job)
    start_run = StartRun(
        JobSource(job, texts, path=tuple(sys.path)),
        resources.config,
        registry_name(settings.job, job),
        detached=detach,
        launch=prepared.order,
    )
    with closing(make_observer(progress)) as observer:
        if not detach:
            fields = execute_supervised(start_run, observer, None, end_timeout_s=END_TIMEOUT_S)
            return Summary.from_fields(fields, resources.config.out)
        none = subprocess.DEVNULL  # the streams of this process may be closed while the run continues
        with SupervisorClient(
            stdout=none, stderr=none, captures_output=True, end_timeout_s=END_TIMEOUT_S
        ) as supervisor:
            return run_blocking(supervisor.start_detached(start_run, observer))


def list_jobs() -> list[JobStatus]:
    """The jobs that run on this machine, and what was launched from it and may still have machines, as `culm list`."""
    return run_blocking(find_jobs())


def down(job: str | None = None, *, everything: bool = False, at_once: bool = False, forget: bool = False) -> None:
    """End a launch: its run, with a checkpoint, and everything that was started for it, as `culm down` does. May be
    repeated.

    `job`: name of the job or of the launch; or `everything` that was launched from this machine. `at_once`: end a run
    without a checkpoint. `forget`: remove it from the list also if the engine does not confirm that nothing is left.
    What happens is logged to the logger "culm". Raises UsageError if there is no such launch, and RunError if machines
    may be left.
    """
    if (job is None) == (not everything):
        raise UsageError("name a job, or pass everything=True: culm.list_jobs() lists what is launched")
    run_blocking(end_launches(job, at_once=at_once, forget=forget, on_line=_log.info, run_on_head=_run_on_head))


def _run_on_head(head: HeadLaunch, arguments: Sequence[str]) -> int:
    """Run a command of culm on a head, log what it prints, and return its exit code."""
    try:
        output = ask_head(head, arguments)
    except UsageError as error:
        _log.info("%s", error)
        return error.exit_code
    for line in output.splitlines():
        _log.info("%s", line.removeprefix("culm: "))
    return 0


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # at the caller of `launch`, which calls it through two functions


def _names(name: str, values: Iterable[str]) -> tuple[str, ...]:
    if isinstance(values, str):
        raise UsageError(f"{name} is {values!r}: use a sequence, as in {name}=[{values!r}]")
    found = tuple(values)
    for value in found:
        if not isinstance(value, str) or not value:
            raise UsageError(f"{name} has {value!r}: use names")
    return found


def _texts(name: str, values: Mapping[str, str]) -> dict[str, str]:
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"{name} has {key!r}: {value!r}, use strings")
    return dict(values)
