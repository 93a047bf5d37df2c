"""Every error that culm raises on purpose.

CulmError
├── UsageError            the request was wrong: nothing was started (exit code 2)
│   ├── JobError          a field of the Job, or the file it comes from
│   ├── ScheduleError     a plan that can not run: points at the offending cell
│   └── PlanError         no placement fits what was asked (more stages than layers, memory, nodes)
├── RunError              the run failed; what was saved is still there (exit code 1)
│   ├── LayerFailed       code of the user raised: says the node, the layer and the action
│   ├── NonFiniteLoss     the loss or a gradient became NaN or infinite
│   ├── ExactRangeError   a gradient does not fit the exact accumulator
│   ├── NodeLost          a node vanished and nobody holds its layers
│   └── CheckpointError   a checkpoint could not be written or read
└── EpochClosed           inside the runtime only: the epoch ended while something waited; never reaches a user

A message is one sentence that names the field or the place, the value found, and the fix.
"""

from __future__ import annotations

RAISED: tuple[type[BaseException], ...] = (Exception, SystemExit, GeneratorExit)
"""What code of the user may raise, and be told of: let through, the last two would mean something else to us. Inside of
an event loop there is one more: culm.runtime.raised."""


def said(error: BaseException) -> str:
    """What an error says, after a colon; nothing if it says nothing, or fails to: code of the user may raise that."""
    try:
        text = str(error)
    except Exception:
        text = ""
    return f": {text}" if text.strip() else ""


class CulmError(Exception):
    """Base of all errors that culm raises on purpose."""

    exit_code = 1
    trace = ""
    """Where it happened, when that was in another process; shown with --debug."""


class UsageError(CulmError):
    """The request was wrong. Nothing was started and nothing was changed."""

    exit_code = 2


class JobError(UsageError):
    """A field of the Job, or the file that should return one, is wrong."""


class ScheduleError(UsageError):
    """A plan breaks a rule of the step. The message ends with the grid and an arrow at the cell."""


class PlanError(UsageError):
    """What was asked for does not fit: the message names the nearest thing that does."""


class RunError(CulmError):
    """The run failed after it had started. Everything saved before is intact."""


class LayerFailed(RunError):
    """Code of the user raised inside a layer, the loss, the optimizer or the data set."""


class NonFiniteLoss(RunError):
    """The loss became NaN or infinite; the weights of the step before were kept."""


class ExactRangeError(RunError):
    """A gradient is outside what the exact accumulator can hold (finite, |sum| < 32,768)."""


class NodeLost(RunError):
    """A node vanished and no holder of its layers is left."""


class CheckpointError(RunError):
    """A checkpoint could not be written or read; the one before it is untouched."""


class EpochClosed(CulmError):
    """The epoch ended while a frame was awaited. Raised only inside the runtime, which adopts the next one."""
