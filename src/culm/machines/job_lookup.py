"""Find a job by its name: on this machine, or on the head on which it was launched from here."""

from __future__ import annotations

from culm.errors import UsageError
from culm.machines.head_registry import HeadLaunch, find_head_launch
from culm.machines.launch_registry import known_launches
from culm.providers.supervisor.run_registry import FoundJob, find_job


def find_job_or_head(name_or_folder: str) -> FoundJob | HeadLaunch:
    """The job of this name or run folder on this machine, or the launch of this name on a head, if no newer job has its
    name. Raises UsageError if there is no such job."""
    head = find_head_launch(name_or_folder)
    try:
        found = find_job(name_or_folder)
    except UsageError:
        if head is None:
            _raise_if_abandoned(name_or_folder)
            raise
        return head
    return found if head is None or found.running or found.entry.started_at > head.started_at else head


def _raise_if_abandoned(name: str) -> None:
    """Raise UsageError if a launch has this name whose supervisor was killed."""
    for launch in known_launches():
        if name in (launch.record.job, launch.record.order.launch) and not launch.is_supervised:
            raise UsageError(
                f"the supervisor of {name!r} was killed, and machines of it may be left: end them with culm down {name}"
            )
