"""Every error that culm raises on purpose.

CulmError
├── UsageError            the request was wrong: nothing was started (exit code 2)
│   ├── JobError          a field of the Job, or the file it comes from
│   ├── ScheduleError     a plan that cannot run; the message points at the offending cell
│   └── PlanError         no placement fits the request (more stages than layers, memory, nodes)
├── RunError              the run failed; what was saved is intact (exit code 1)
│   ├── LayerFailed       user code raised; names the node, the layer and the action
│   ├── NonFiniteLoss     the loss or a gradient became NaN or infinite
│   ├── ExactRangeError   a gradient does not fit the exact accumulator
│   ├── NodeLost          a node is lost and no other node holds its layers
│   ├── BudgetReached     the run ended with a checkpoint before it cost more than --budget
│   └── CheckpointError   a checkpoint could not be written or read
├── DeviceFailed          internal to the runtime: the device reported an error; its worker ends, and its node is lost
└── EpochClosed           internal to the runtime: the epoch ended during a wait; never reaches a user

A message is one sentence that names the field or the place, the value found, and the fix.
"""

from __future__ import annotations

import traceback
from pathlib import Path

USER_EXCEPTIONS: tuple[type[BaseException], ...] = (Exception, SystemExit, GeneratorExit)
"""Exceptions of user code that are reported as such: the last two would mean something else if not caught.
In an event loop there is one more: culm.runtime.compute.user_errors."""


def message_suffix(error: BaseException) -> str:
    """The text of an error after a colon; empty if it has none or `str` fails, which errors of user code may do."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f": {text}" if text.strip() else ""


class CulmError(Exception):
    """Base of all errors that culm raises on purpose."""

    exit_code = 1
    trace = ""
    """Traceback of the error in another process; shown with --debug."""


class UsageError(CulmError):
    """The request was wrong. Nothing was started and nothing was changed."""

    exit_code = 2


class JobError(UsageError):
    """A field of the Job, or the file that should return one, is wrong."""


class ScheduleError(UsageError):
    """A plan breaks a rule of the schedule. The message ends with the grid and an arrow at the cell."""


class PlanError(UsageError):
    """The request does not fit; the message names the nearest one that does."""


class RunError(CulmError):
    """The run failed after it had started. Everything saved before is intact."""


class LayerFailed(RunError):
    """User code raised in a layer, the loss, the optimizer or the data set."""


class NonFiniteLoss(RunError):
    """The loss became NaN or infinite; the weights of the step before were kept."""


class ExactRangeError(RunError):
    """A gradient is outside the range of the exact accumulator (finite, |sum| < 32,768)."""


class NodeLost(RunError):
    """A node is lost and no holder of its layers is left."""


class BudgetReached(RunError):
    """The run ended, with a checkpoint if it has a folder, before it cost more than its budget."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read; the previous one is untouched."""


class DeviceFailed(CulmError):
    """A compute device reported an error or did not finish its work in time. Raised only inside the runtime: the worker
    ends, and other nodes take over its work."""


class EpochClosed(CulmError):
    """The epoch ended while a frame was awaited. Raised only inside the runtime, which enters the next epoch."""


def unexpected_failure(subject: str, error: BaseException) -> RunError:
    """The error that ends a run for an exception that nobody raised on purpose, as in a method of a user's strategy."""
    failure = RunError(f"{subject} failed: {describe_exception(error)}")
    failure.trace = "".join(traceback.format_exception(error))
    return failure


def describe_exception(error: BaseException) -> str:
    """Class and message of an exception, and the innermost line outside of culm and the standard library or, without
    one, of any code."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_LIBRARY_FOLDERS)]
    place = "".join(f" (in {frame.name}, {frame.filename}:{frame.lineno})" for frame in (outside or frames)[-1:])
    return f"{type(error).__name__}{message_suffix(error)}{place}"


_LIBRARY_FOLDERS = (str(Path(__file__).parent), str(Path(traceback.__file__).parent))
"""Culm and the standard library."""
