"""Requests to etcd's JSON gateway and its answers, as plain values. Bytes travel as base64, 64-bit numbers as
strings."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

from culm.cluster.store.store import KeyVersion

T = TypeVar("T")
EtcdOperation: TypeAlias = dict[str, Any]
"""One operation, or one comparison, of a transaction."""
encode = msgspec.json.Encoder().encode


class EtcdHeader(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0
    create_revision: int = 0
    version: int = 0
    """Number of writes since it was created."""

    @property
    def key_version(self) -> KeyVersion:
        return KeyVersion(self.create_revision, self.version)


class RangeAnswer(msgspec.Struct, frozen=True):
    header: EtcdHeader = EtcdHeader()
    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class TxnAnswer(msgspec.Struct, frozen=True):
    header: EtcdHeader = EtcdHeader()
    succeeded: bool = False
    responses: tuple[OpAnswer, ...] = ()


class OpAnswer(msgspec.Struct, frozen=True):
    response_range: RangeAnswer | None = None
    response_txn: TxnAnswer | None = None


class LeaseAnswer(msgspec.Struct, frozen=True):
    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")
    """Zero: the lease does not exist any more."""


class KeepAliveAnswer(msgspec.Struct, frozen=True):
    result: LeaseAnswer = LeaseAnswer()


class TokenAnswer(msgspec.Struct, frozen=True):
    token: str = ""


class StatusAnswer(msgspec.Struct, frozen=True):
    version: str = ""


class EmptyAnswer(msgspec.Struct, frozen=True):
    """An answer whose content does not matter."""


class EtcdEvent(msgspec.Struct, frozen=True):
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
    events: tuple[EtcdEvent, ...] = ()


class EtcdFault(msgspec.Struct, frozen=True):
    """An error of etcd: a gRPC code and a text."""

    message: str = ""
    code: int = 0


class WatchMessage(msgspec.Struct, frozen=True):
    result: WatchAnswer | None = None
    error: EtcdFault | None = None


_ANSWERS = (RangeAnswer, TxnAnswer, LeaseAnswer, KeepAliveAnswer, TokenAnswer, StatusAnswer, EmptyAnswer, WatchMessage)
_decoders: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind, strict=False) for kind in _ANSWERS}
"""Created at import: building a decoder takes milliseconds, and otherwise every agent would spend them after its
fork."""


def decode(data: bytes, kind: type[T]) -> T:
    """Decode an answer. Raises msgspec.MsgspecError if it is not of this kind."""
    found: T = _decoders[kind].decode(data)
    return found


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys with a prefix. The prefix must not be all 0xff."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1])


def read_operation(key: bytes) -> EtcdOperation:
    return {"request_range": {"key": key}}


def put_operation(key: bytes, value: bytes, lease: int = 0) -> EtcdOperation:
    return {"request_put": {"key": key, "value": value, "lease": str(lease)}}


def delete_operation(key: bytes, end: bytes | None = None) -> EtcdOperation:
    return {"request_delete_range": {"key": key} if end is None else {"key": key, "range_end": end}}


def equals_condition(key: bytes, value: bytes | None) -> EtcdOperation:
    """The condition that a key has this value; None: that it does not exist."""
    if value is None:
        return {"key": key, "target": "VERSION", "result": "EQUAL", "version": "0"}
    return {"key": key, "target": "VALUE", "result": "EQUAL", "value": value}


def version_condition(key: bytes, version: KeyVersion | None) -> list[EtcdOperation]:
    """The condition that a key is at this version; None: that it does not exist."""
    if version is None:
        return [equals_condition(key, None)]
    return [
        {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": str(version.created)},
        {"key": key, "target": "VERSION", "result": "EQUAL", "version": str(version.writes)},
    ]


def write_once_transaction(
    marker_key: bytes, number: str, lease: int, condition: list[EtcdOperation], operations: list[EtcdOperation]
) -> EtcdOperation:
    """A transaction that is executed at most once, however often it is sent, and only while its session lives.

    The session's marker holds the number of its last write and the outcome ('y' done, 'n' condition not met), and is
    deleted with the session's lease. If the marker is below `number`, the transaction is executed and its outcome
    recorded atomically; otherwise the recorded outcome is read.
    """
    noted = f"{number}y".encode(), f"{number}n".encode()
    return {
        "compare": [{"key": marker_key, "target": "VALUE", "result": "LESS", "value": number.encode()}],
        "success": [
            {
                "request_txn": {
                    "compare": condition,
                    "success": [*operations, put_operation(marker_key, noted[0], lease)],
                    "failure": [put_operation(marker_key, noted[1], lease)],
                }
            }
        ],
        "failure": [read_operation(marker_key)],
    }


def write_once_outcome(answer: TxnAnswer, number: str) -> bool | None:
    """The outcome of a `write_once_transaction`; None: its session is gone, or a later write has overtaken it."""
    (response,) = answer.responses
    if answer.succeeded:
        assert response.response_txn is not None
        return response.response_txn.succeeded
    noted = response.response_range.kvs if response.response_range is not None else ()
    if not noted or not noted[0].value.startswith(number.encode()):
        return None
    return noted[0].value.endswith(b"y")
