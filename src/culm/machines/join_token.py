"""Join tokens: one line that holds everything a machine needs to join runs of a store.

A token names the endpoints of the store, the fingerprint of its certificate, its user, and the secret that the machines
share. Anyone with the token can run code on the machines of the job: treat it as a password.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import ssl
import time
import zlib
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from culm.cluster.store.encrypted_store import check_secret
from culm.cluster.store.etcd import EtcdAccess
from culm.cluster.store.etcd.etcd_access import check_job_name
from culm.errors import UsageError

_PREFIX = "culm1-"
"""Marks a token and the version of its format."""
TOKEN_VARIABLE = "CULM_TOKEN"
_CONNECT_TIMEOUT_S = 10.0


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """The content of a token."""

    endpoints: tuple[str, ...]
    secret: bytes
    fingerprint: bytes = b""
    """SHA-256 of the store's certificate; empty: the certificate is verified with the CAs of the machine."""
    user: str = ""
    password: str = ""
    """Empty for a store of `culm head`: its password is derived from the secret."""
    job: str = ""
    """The only job that the token is for; empty: any."""
    expires_at: int = 0
    """Unix time after which no machine joins with it; 0: never."""

    def __repr__(self) -> str:
        """Without secrets, so that they do not appear in logs."""
        return f"JoinToken({','.join(self.endpoints)}{f', job={self.job!r}' if self.job else ''})"


def encode_token(token: JoinToken) -> str:
    """The token as one word of letters, digits, dashes and underscores."""
    data = msgspec.msgpack.encode(token)
    return _PREFIX + base64.urlsafe_b64encode(data + _checksum(data)).decode().rstrip("=")


def decode_token(text: str) -> JoinToken:
    """Decode a token. Raises UsageError if it is none, if a part of it is missing, or if it has expired."""
    if not text.startswith(_PREFIX):
        raise UsageError(f"--join is {_shorten(text)!r}: give the token of culm head, which starts with {_PREFIX}")
    body = text.removeprefix(_PREFIX)
    try:
        data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        if _checksum(data[:-4]) != data[-4:]:
            raise ValueError
        token = msgspec.msgpack.decode(data[:-4], type=JoinToken)
    except (ValueError, binascii.Error, msgspec.DecodeError):
        raise UsageError(f"--join is {_shorten(text)!r}: the token is damaged, copy it again as a whole") from None
    if token.expires_at and time.time() > token.expires_at:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(token.expires_at))
        raise UsageError(f"the token of --join expired at {when}: print a new one with culm head token")
    check_secret(token.secret)
    if token.job:
        check_job_name(token.job)
    return token


def read_token(value: str | None) -> JoinToken | None:
    """The token of `--join`: the token itself, `@FILE`, or `env` for the variable CULM_TOKEN. Raises UsageError."""
    if value is None:
        return None
    if value == "env":
        value = os.environ.get(TOKEN_VARIABLE, "")
        if not value:
            raise UsageError(f"--join is env, and {TOKEN_VARIABLE} is not set: set it to the token of culm head")
    elif value.startswith("@"):
        try:
            value = Path(value[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--join is {value!r}: the file cannot be read ({error})") from None
    return decode_token(value.strip())


def access_of(token: JoinToken) -> EtcdAccess:
    """How to reach the store of a token. Fetches its certificate and compares it with the fingerprint in the token.

    Raises UsageError if no endpoint answers, or if the certificate is another one.
    """
    return EtcdAccess(
        endpoints=token.endpoints,
        user=token.user,
        password=token.password or (head_password(token.secret) if token.user and token.fingerprint else ""),
        trusted_certificate=_fetch_certificate(token) if token.fingerprint else "",
    )


def etcd_token(access: EtcdAccess, secret: bytes, *, job: str = "", expires_at: int = 0) -> JoinToken:
    """The token for an etcd of the user's own. If `access` names a CA, the token holds the fingerprint of the
    certificate of the first endpoint that answers: all members must have that one.

    Raises UsageError if no endpoint answers with a certificate of that CA.
    """
    return JoinToken(
        endpoints=access.endpoints,
        secret=secret,
        fingerprint=certificate_fingerprint(_verified_certificate(access)) if access.ca else b"",
        user=access.user,
        password=access.password,
        job=job,
        expires_at=expires_at,
    )


def _verified_certificate(access: EtcdAccess) -> str:
    """The certificate of the first endpoint that has one of the CA, in PEM."""
    reasons = []
    for endpoint in access.endpoints:
        parts = urlsplit(endpoint)
        place = (parts.hostname or "", parts.port or 2379)
        try:
            return ssl.get_server_certificate(place, ca_certs=access.ca, timeout=_CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            reasons.append(f"{endpoint} ({error})")
    raise UsageError(f"--etcd cannot be reached, or has no certificate of --etcd-ca: {'; '.join(reasons)}")


def head_password(secret: bytes) -> str:
    """The password of the etcd of a head, so that a token needs only one secret."""
    return hmac.digest(secret, b"culm head etcd password", "sha256").hex()


def _fetch_certificate(token: JoinToken) -> str:
    """The certificate of the first endpoint that answers, in PEM."""
    reasons = []
    for endpoint in token.endpoints:
        parts = urlsplit(endpoint)
        try:
            found = ssl.get_server_certificate((parts.hostname or "", parts.port or 2379), timeout=_CONNECT_TIMEOUT_S)
        except (OSError, ValueError) as error:
            reasons.append(f"{endpoint} ({error})")
            continue
        if certificate_fingerprint(found) != token.fingerprint:
            raise UsageError(
                f"{endpoint} has another certificate than the token of --join names: another store answers there, or "
                "it was set up again; use the token that it prints"
            )
        return found
    raise UsageError(f"the store of --join cannot be reached: {'; '.join(reasons)}; check that culm head is running")


def certificate_fingerprint(pem: str) -> bytes:
    """SHA-256 of a certificate."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).digest()


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def _shorten(text: str) -> str:
    """The beginning of a token, for messages: the rest is secret."""
    return text if len(text) <= 12 else text[:12] + "..."
