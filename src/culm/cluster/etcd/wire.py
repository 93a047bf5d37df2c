"""What is said to etcd's JSON gateway, as plain values. Bytes travel as base64, numbers of 64 bits as strings."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")
Op: TypeAlias = dict[str, Any]
"""One operation, or one comparison, of a transaction."""
encode = msgspec.json.Encoder().encode


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class RangeAnswer(msgspec.Struct, frozen=True):
    header: Header = Header()
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class TxnAnswer(msgspec.Struct, frozen=True):
    header: Header = Header()
    succeeded: bool = False
    responses: tuple[OpAnswer, ...] = ()


class OpAnswer(msgspec.Struct, frozen=True):
    response_range: RangeAnswer | None = None
    response_txn: TxnAnswer | None = None


class LeaseAnswer(msgspec.Struct, frozen=True):
    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")
    """Zero: there is no such lease any more."""


class KeepAliveAnswer(msgspec.Struct, frozen=True):
    result: LeaseAnswer = LeaseAnswer()


class TokenAnswer(msgspec.Struct, frozen=True):
    token: str = ""


class StatusAnswer(msgspec.Struct, frozen=True):
    version: str = ""


class Anything(msgspec.Struct, frozen=True):
    """An answer of which only the fact matters."""


class Event(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"

    @property
    def value(self) -> bytes | None:
        return None if self.type == "DELETE" else self.kv.value


class WatchAnswer(msgspec.Struct, frozen=True):
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[Event, ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """What etcd says when it does not do what was asked: a gRPC code and a text."""

    message: str = ""
    code: int = 0


class WatchMessage(msgspec.Struct, frozen=True):
    result: WatchAnswer | None = None
    error: Fault | None = None


_ANSWERS = (RangeAnswer, TxnAnswer, LeaseAnswer, KeepAliveAnswer, TokenAnswer, StatusAnswer, Anything, WatchMessage)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind, strict=False) for kind in _ANSWERS}
"""Made here and now: reading what a type says takes milliseconds, and every agent would do so after its fork."""


def decode(data: bytes, kind: type[T]) -> T:
    """An answer. msgspec.MsgspecError: it is none of that kind."""
    found: T = _decoders[kind].decode(data)
    return found


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that begin with a prefix that is not all 0xff."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1])


def read(key: bytes) -> Op:
    return {"request_range": {"key": key}}


def put(key: bytes, value: bytes, lease: int = 0) -> Op:
    return {"request_put": {"key": key, "value": value, "lease": str(lease)}}


def delete(key: bytes, end: bytes | None = None) -> Op:
    return {"request_delete_range": {"key": key} if end is None else {"key": key, "range_end": end}}


def equals(key: bytes, value: bytes | None) -> Op:
    """True if a key has a value; None: if it is not there."""
    if value is None:
        return {"key": key, "target": "VERSION", "result": "EQUAL", "version": "0"}
    return {"key": key, "target": "VALUE", "result": "EQUAL", "value": value}


def once(marker: bytes, number: str, lease: int, condition: list[Op], then: list[Op]) -> Op:
    """A transaction that happens at most once, however often it is sent, and only while its session lives.

    The session's marker holds the number of its last write and how that ended ('y' done, 'n' condition not met), and
    is deleted with the session's lease. If the marker is below `number`, do it and note the outcome in the same
    breath; else read what was noted when it came through before.
    """
    noted = f"{number}y".encode(), f"{number}n".encode()
    return {
        "compare": [{"key": marker, "target": "VALUE", "result": "LESS", "value": number.encode()}],
        "success": [
            {
                "request_txn": {
                    "compare": condition,
                    "success": [*then, put(marker, noted[0], lease)],
                    "failure": [put(marker, noted[1], lease)],
                }
            }
        ],
        "failure": [read(marker)],
    }


def outcome(answer: TxnAnswer, number: str) -> bool | None:
    """How a transaction of `once` ended; None: its session is gone, or a later write has overtaken it."""
    (response,) = answer.responses
    if answer.succeeded:
        assert response.response_txn is not None
        return response.response_txn.succeeded
    noted = response.response_range.kvs if response.response_range is not None else ()
    if not noted or not noted[0].value.startswith(number.encode()):
        return None
    return noted[0].value.endswith(b"y")
