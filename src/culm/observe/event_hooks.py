"""Event hooks: call a job's on_evaluate, on_checkpoint and on_node_lost for events of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from culm.errors import USER_EXCEPTIONS, message_suffix

if TYPE_CHECKING:
    from culm.job import Job

HOOK_OF_KIND = {"evaluation": "on_evaluate", "checkpoint": "on_checkpoint", "lost": "on_node_lost"}
"""The field of the Job that is called for each kind of event."""


class EventHookReport(NamedTuple):
    """A hook for an event that has failed, or that has not returned yet."""

    name: str
    """The field of the Job."""
    cause: str
    """The kind of the event."""
    why: str
    """Why the hook failed; empty: it has not returned yet."""
    seconds: float
    """How long it has been running."""

    @classmethod
    def about(cls, event: Mapping[str, Any], *, why: str = "", seconds: float = 0.0) -> EventHookReport:
        """The report about the hook of an event."""
        return cls(HOOK_OF_KIND[event["kind"]], event["kind"], why, seconds)


def has_event_hook(job: Job, event: Mapping[str, Any]) -> bool:
    """Whether the job has a hook for an event."""
    return event["kind"] in HOOK_OF_KIND and getattr(job, HOOK_OF_KIND[event["kind"]]) is not None


def call_event_hook(job: Job, event: Mapping[str, Any]) -> EventHookReport | None:
    """Call the job's hook for an event. Returns a report if it raises."""
    name = HOOK_OF_KIND[event["kind"]]
    try:
        getattr(job, name)(event)
    except USER_EXCEPTIONS as error:
        why = f"Job.{name} raised {type(error).__name__}{message_suffix(error)}"
        return EventHookReport.about(event, why=why)
    return None
