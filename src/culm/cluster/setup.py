"""The setup of a run: everything that was decided before the first node came, as one value in the store."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Gate: TypeAlias = Literal["open", "hook", "outside"]
"""Who lets the next step begin: nobody, the leader after the job's on_step hook, or the launcher (the key `permit`)."""


class Setup(msgspec.Struct, frozen=True):
    """What the leader needs to make epochs of a job."""

    nodes: int
    pipelines: int
    stages: int
    schedule: str
    strategy: str
    segments: tuple[tuple[int, int], ...]
    plan: str
    evaluation: str | None
    evaluation_parts: int
    weighted: bool
    steps: int
    start: int = 0
    gate: Gate = "open"
    checkpoint_every: int = 0
    keep_last: int = 2
    out: str | None = None
    resume: int | None = None
    resume_from: str | None = None
    facts: dict[str, str | int | float | bool | None | list[list[str]]] = {}
    why: str = ""
    """Why this shape: one sentence."""


class NodeRecord(msgspec.Struct, frozen=True):
    """What an agent says of its node under `nodes/<number>`."""

    node: int
    agent: str
    worker: str
    fingerprint: str


class Result(msgspec.Struct, frozen=True):
    """How a run ended, under the key `result`."""

    summary: dict[str, object] | None = None
    error: str | None = None
    message: str = ""
    trace: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_node = msgspec.msgpack.Decoder(NodeRecord).decode
decode_result = msgspec.msgpack.Decoder(Result).decode
