"""The job of `large_frames_job` with payloads that are cut into pieces.

With LANE_FRAMES in the environment, each process that sends a payload over lanes leaves a file in that folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.transport import large_frames_job

from culm import Job
from culm.transport.frames import frame_codec
from culm.transport.frames.frame_codec import EncodedFrame, LanePlace
from culm.transport.frames.lanes import OutboundLanes


def make_job() -> Job:
    return large_frames_job.make_job()


if "LANE_FRAMES" in os.environ:
    _send = OutboundLanes.send

    def _send_and_tell(self: OutboundLanes, frame: EncodedFrame) -> LanePlace:
        Path(os.environ["LANE_FRAMES"], str(os.getpid())).touch()
        return _send(self, frame)

    OutboundLanes.send = _send_and_tell  # type: ignore[method-assign]
    frame_codec.PIECE_BYTES = 100_000
