"""Why etcd can not be used, in sentences: what went wrong, at which setting, and what to do."""

from __future__ import annotations

import asyncio
import errno
import ssl
from urllib.parse import urlsplit

import aiohttp
import msgspec

from culm.cluster.etcd.access import Access
from culm.cluster.etcd.wire import Fault

_UNAUTHENTICATED = 16
_PERMISSION_DENIED = 7
_NOT_FOUND = 5
_PASSING = {4, 14}
"""gRPC codes of troubles that pass: no answer in time, no leader, a member that is being stopped."""


class Unreachable(Exception):
    """No answer this time; another endpoint or another moment may do better.

    `final`: waiting would not help. `hint`: what may be wrong if it has never worked.
    """

    def __init__(self, why: str, *, final: bool = False, hint: str = "") -> None:
        super().__init__(why)
        self.final, self.hint = final, hint


class Refused(Exception):
    """etcd understood and said no."""


class Gone(Refused):
    """What was named, a lease, is not there (any more)."""


class StaleToken(Exception):
    """The password has to be shown again: tokens end after a while, and with a restart of etcd."""


def fault_of(body: bytes, status: int, endpoint: str, access: Access) -> Exception:
    """What an answer other than 200 means: Unreachable, StaleToken or Refused."""
    try:
        fault = msgspec.json.decode(body, type=Fault)
    except msgspec.MsgspecError:
        return _stranger(body, status, endpoint)
    if _stale(fault):
        return StaleToken()
    if fault.code in _PASSING or "too many requests" in fault.message:
        return Unreachable(f"{endpoint} says: {fault.message}")
    return (Gone if fault.code == _NOT_FOUND else Refused)(refusal(fault, access))


def _stranger(body: bytes, status: int, endpoint: str) -> Unreachable:
    """Not etcd's gateway: a proxy before it, another service, or the gateway is switched off."""
    if b"HTTP request to an HTTPS server" in body:
        return Unreachable(f"{endpoint} speaks TLS: write https:// instead of http://", final=True)
    if status >= 500:
        return Unreachable(f"{endpoint} answers with status {status}")
    return Unreachable(
        f"{endpoint} answers with status {status} and not as etcd does: is it etcd 3.4 or newer, with its gateway on?",
        final=True,
    )


def _stale(fault: Fault) -> bool:
    text = fault.message
    return fault.code == _UNAUTHENTICATED or "invalid auth token" in text or "auth store is old" in text


def refusal(fault: Fault, access: Access) -> str:
    """What a user has to know about a fault."""
    text = fault.message.removeprefix("etcdserver: ")
    where = ",".join(access.endpoints)
    if "invalid user ID or password" in text:
        return f"--etcd-user is {access.user!r}: etcd at {where} does not know this user with this password"
    if "user name is empty" in text:
        return f"--etcd-user is missing: etcd at {where} asks for a user and a password"
    if "authentication is not enabled" in text:
        return (
            f"--etcd-user is {access.user!r}, but etcd at {where} asks nobody for a password: run etcdctl auth enable, "
            "or leave the user away"
        )
    if fault.code == _PERMISSION_DENIED:
        return f"--etcd-user is {access.user!r}: etcd at {where} does not let it use keys under culm/ (readwrite)"
    if "database space exceeded" in text:
        return f"etcd at {where} is full: compact and defragment it, disarm its alarm, or raise --quota-backend-bytes"
    return f"etcd at {where} refused a call: {text}"


_HUNG_UP = (errno.ECONNRESET, errno.EPIPE)
"""While the two greeted each other: somebody listens there, who speaks otherwise."""


def broken(error: Exception, endpoint: str) -> Unreachable:
    """A call that got no answer."""
    if (fatal := _handshake(error, endpoint)) is not None:
        return Unreachable(fatal, final=True)
    if isinstance(error, asyncio.TimeoutError):
        return Unreachable(f"{endpoint} did not answer in time")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return Unreachable(f"{endpoint} has a name that is not known")
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno not in (None, *_HUNG_UP):
        return Unreachable(f"{endpoint} can not be connected to ({error.os_error.strerror})")
    other = "http" if endpoint.startswith("https") else "https"
    return Unreachable(f"{endpoint} hung up", hint=f" (if it is meant to be {other}://, write so)")


def _handshake(error: Exception, endpoint: str) -> str | None:
    """What is wrong with the certificates, if that is what it is."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the certificate of {endpoint} is not to be trusted ({_certificate(error)}): check --etcd-ca"
    text = f"{error} {getattr(error, 'os_error', '')} {error.__cause__}".upper()
    if any(sign in text for sign in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")):
        return f"{endpoint} does not speak TLS: write http:// instead of https://"
    if "SSL" in text and "ALERT" in text:
        return f"{endpoint} does not accept the client certificate: check --etcd-cert and --etcd-key"
    return None


def _certificate(error: aiohttp.ClientConnectorCertificateError) -> str:
    cause = error.certificate_error
    return cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else str(cause)


def unusable(troubles: dict[str, Unreachable]) -> str:
    """Why no endpoint can be used."""
    reasons = "; ".join(f"{trouble}{trouble.hint}" for trouble in troubles.values())
    if all(trouble.final for trouble in troubles.values()):
        return f"--etcd can not be used: {reasons}"
    return f"--etcd can not be reached: {reasons}; start etcd or correct the address"


def unsafe(version: str, endpoint: str) -> bool:
    """Versions that are known to corrupt data when killed under load. On one machine that is no more than its loss."""
    return version in ("3.5.0", "3.5.1", "3.5.2") and urlsplit(endpoint).hostname not in ("127.0.0.1", "::1")
