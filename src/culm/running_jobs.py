"""`culm.attach`, `culm.logs` and `culm.stop`: wait for a running job, read what it shows, or end it, from any process
of this machine."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import closing

from culm.errors import UsageError
from culm.machines.head_registry import HeadLaunch
from culm.machines.job_lookup import find_job_or_head
from culm.machines.remote_head import ask_head
from culm.providers.supervisor.job_log import event_lines, find_events_file, job_log_lines
from culm.providers.supervisor.run_window import show_until_end, stop_job, summary_or_raise
from culm.summary import Summary
from culm.training import iterate_blocking, make_observer, print_line, run_blocking

_log = logging.getLogger("culm")


def attach(job: str | os.PathLike[str], *, progress: bool | None = None) -> Summary:
    """Wait for the end of a running job and return its summary, as `culm attach` does.

    `job`: name or run folder of a job that `culm.start`, `culm.launch(detach=True)`, `culm run` or `culm launch` has
    started. A detached job that has ended is known for a week. `progress`: True shows the run on stderr, with what
    happened before; False logs it to the logger "culm"; None shows it if stderr is a terminal.

    Ctrl-C ends the waiting, not the job. Raises UsageError if there is no such job, RunError if it was stopped early,
    and the error that ended it.
    """
    found = find_job_or_head(os.fspath(job))
    if isinstance(found, HeadLaunch):
        answer = ask_head(found, ["attach", found.job, "--quiet", "--json"])
        fields = json.loads(answer.splitlines()[-1])
        out = fields.get("config", {}).get("out") or ""
        return Summary.from_fields(fields, out if "://" in out else None)  # a folder of the head is not here
    with closing(make_observer(progress)) as observer:
        ended = run_blocking(show_until_end(found, observer, print_line, observer.print_line))
    return Summary.from_fields(summary_or_raise(ended), found.entry.out)


def logs(job: str | os.PathLike[str], *, follow: bool = False) -> Iterator[str]:
    """The events, steps and output of a job so far, a line each with its time, as `culm logs` prints them.

    `job`: its name or run folder. Of a run folder whose run has ended: its events. `follow`: lines until the job has
    ended; then raises RunError if it was stopped early, and the error that ended it. Ending the iteration does not
    affect the job. Raises UsageError if there is no such job.
    """
    name = os.fspath(job)
    try:
        found = find_job_or_head(name)
    except UsageError:
        if (events := find_events_file(name)) is None:
            raise
        return event_lines(events)
    if isinstance(found, HeadLaunch):  # with `follow`, all lines come when the job has ended
        return iter(ask_head(found, ["logs", found.job, *["--follow"] * follow]).splitlines())
    return iterate_blocking(job_log_lines(found, follow=follow))


def stop(job: str | os.PathLike[str], *, at_once: bool = False) -> str:
    """End a running job at the next step boundary, with a checkpoint if it has a folder, and wait for its end, as `culm
    stop` does.

    `job`: its name or run folder. `at_once`: end it without a checkpoint. Returns a sentence: what was saved, and how
    to continue. Raises UsageError if there is no such job or if it has ended already.
    """
    found = find_job_or_head(os.fspath(job))
    if isinstance(found, HeadLaunch):
        return ask_head(found, ["stop", found.job, *["--now"] * at_once]).strip().splitlines()[-1]
    ended = run_blocking(stop_job(found, at_once=at_once, on_line=_log.info))
    return ended.stopped or "the job has ended"
