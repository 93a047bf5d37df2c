"""Errors of etcd as sentences: what went wrong, at which setting, and what to do."""

from __future__ import annotations

import asyncio
import errno
import ssl
from urllib.parse import urlsplit

import aiohttp
import msgspec

from culm.cluster.store.etcd.etcd_access import EtcdAccess
from culm.cluster.store.etcd.etcd_messages import EtcdFault

_UNAUTHENTICATED = 16
_PERMISSION_DENIED = 7
_NOT_FOUND = 5
_TRANSIENT_CODES = {4, 14}
"""gRPC codes of transient errors: timeout, no leader, a member that is being stopped."""


class EtcdUnreachable(Exception):
    """No answer this time; another endpoint or a later attempt may succeed.

    `is_permanent`: retrying does not help. `hint`: what may be wrong if it has never worked.
    """

    def __init__(self, why: str, *, is_permanent: bool = False, hint: str = "") -> None:
        super().__init__(why)
        self.is_permanent, self.hint = is_permanent, hint


class EtcdRefused(Exception):
    """etcd understood the request and refused it."""


class LeaseNotFound(EtcdRefused):
    """The lease named in the request does not exist (any more)."""


class AuthTokenExpired(Exception):
    """The password has to be sent again: tokens expire after a while and with a restart of etcd."""


def error_from_response(body: bytes, status: int, endpoint: str, access: EtcdAccess) -> Exception:
    """The error for an answer other than 200: EtcdUnreachable, AuthTokenExpired or EtcdRefused."""
    try:
        fault = msgspec.json.decode(body, type=EtcdFault)
    except msgspec.MsgspecError:
        return _error_from_non_etcd(body, status, endpoint)
    if _is_token_expired(fault):
        return AuthTokenExpired()
    if fault.code in _TRANSIENT_CODES or "too many requests" in fault.message:
        return EtcdUnreachable(f"{endpoint} says: {fault.message}")
    return (LeaseNotFound if fault.code == _NOT_FOUND else EtcdRefused)(refusal_message(fault, access))


def _error_from_non_etcd(body: bytes, status: int, endpoint: str) -> EtcdUnreachable:
    """The answer is not from etcd's gateway: a proxy, another service, or the gateway is disabled."""
    if b"HTTP request to an HTTPS server" in body:
        return EtcdUnreachable(f"{endpoint} speaks TLS: write https:// instead of http://", is_permanent=True)
    if status >= 500:
        return EtcdUnreachable(f"{endpoint} answers with status {status}")
    return EtcdUnreachable(
        f"{endpoint} answers with status {status} and not as etcd does: is it etcd 3.4 or newer, with its gateway on?",
        is_permanent=True,
    )


def _is_token_expired(fault: EtcdFault) -> bool:
    text = fault.message
    return fault.code == _UNAUTHENTICATED or "invalid auth token" in text or "auth store is old" in text


def refusal_message(fault: EtcdFault, access: EtcdAccess) -> str:
    """The message for the user about a fault."""
    text = fault.message.removeprefix("etcdserver: ")
    where = ",".join(access.endpoints)
    if "invalid user ID or password" in text:
        return (
            f"--join: the store at {where} does not accept this token: use the one that culm head token prints"
            if access.trusted_certificate
            else f"--etcd-user is {access.user!r}: etcd at {where} does not know this user with this password"
        )
    if "user name is empty" in text:
        return f"--etcd-user is missing: etcd at {where} asks for a user and a password"
    if "authentication is not enabled" in text:
        return (
            f"--etcd-user is {access.user!r}, but etcd at {where} has authentication disabled: "
            "run etcdctl auth enable, or omit the user"
        )
    if fault.code == _PERMISSION_DENIED:
        return f"--etcd-user is {access.user!r}: etcd at {where} does not let it use keys under culm/ (readwrite)"
    if "database space exceeded" in text:
        return f"etcd at {where} is full: compact and defragment it, disarm its alarm, or raise --quota-backend-bytes"
    return f"etcd at {where} refused a call: {text}"


_DISCONNECT_ERRNOS = (errno.ECONNRESET, errno.EPIPE)
"""Errors during the handshake: something listens there but uses another protocol."""


def error_from_exception(error: Exception, endpoint: str) -> EtcdUnreachable:
    """The error for a call without an answer."""
    if (fatal := _tls_error_message(error, endpoint)) is not None:
        return EtcdUnreachable(fatal, is_permanent=True)
    if isinstance(error, asyncio.TimeoutError):
        return EtcdUnreachable(f"{endpoint} did not answer in time")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return EtcdUnreachable(f"{endpoint} has an unknown host name")
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno not in (None, *_DISCONNECT_ERRNOS):
        return EtcdUnreachable(f"cannot connect to {endpoint} ({error.os_error.strerror})")
    other = "http" if endpoint.startswith("https") else "https"
    return EtcdUnreachable(f"{endpoint} closed the connection", hint=f" (if it should be {other}://, write that)")


def _tls_error_message(error: Exception, endpoint: str) -> str | None:
    """The message if TLS is the cause, else None."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the certificate of {endpoint} is not to be trusted ({_certificate_message(error)}): check --etcd-ca"
    text = f"{error} {getattr(error, 'os_error', '')} {error.__cause__}".upper()
    if any(sign in text for sign in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")):
        return f"{endpoint} does not speak TLS: write http:// instead of https://"
    if "SSL" in text and "ALERT" in text:
        return f"{endpoint} does not accept the client certificate: check --etcd-cert and --etcd-key"
    return None


def _certificate_message(error: aiohttp.ClientConnectorCertificateError) -> str:
    cause = error.certificate_error
    return cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else str(cause)


def no_endpoint_message(errors: dict[str, EtcdUnreachable]) -> str:
    """The message when no endpoint can be used."""
    reasons = "; ".join(f"{error}{error.hint}" for error in errors.values())
    if all(error.is_permanent for error in errors.values()):
        return f"--etcd cannot be used: {reasons}"
    return f"--etcd cannot be reached: {reasons}; start etcd or correct the address"


def loses_data(version: str) -> bool:
    """Whether a version is known to corrupt data when it is killed under load, or is not known."""
    return version in ("", "3.5.0", "3.5.1", "3.5.2")


def loses_data_when_killed(version: str, endpoint: str) -> bool:
    """Whether to warn of such a version. On the local machine that risk is accepted."""
    return version != "" and loses_data(version) and urlsplit(endpoint).hostname not in ("127.0.0.1", "::1")
