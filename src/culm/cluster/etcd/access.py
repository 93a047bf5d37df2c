"""How to reach etcd: endpoints, certificates, user and password. Wrong values are refused in one sentence each."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from culm.errors import UsageError

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know. Empty: not used."""

    endpoints: tuple[str, ...]
    user: str = ""
    password: str = ""
    ca: str = ""
    """File with the certificates of those who sign for etcd; empty: the machine's own list."""
    cert: str = ""
    key: str = ""

    @property
    def secure(self) -> bool:
        return any(url.startswith("https://") for url in self.endpoints)

    def __repr__(self) -> str:
        """Without the password: a log is no place for it."""
        user = f", user={self.user!r}" if self.user else ""
        return f"Access({','.join(self.endpoints)}{user})"


def parse_access(
    urls: str, *, user: str = "", password: str = "", ca: str = "", cert: str = "", key: str = ""
) -> Access:
    """From what a user typed: URLs with commas between them; a user may carry his password, as `name:password`."""
    endpoints = tuple(_endpoint(url.strip()) for url in urls.split(",") if url.strip())
    if not endpoints:
        raise UsageError(f"--etcd is {urls!r}: name at least one endpoint, such as http://10.0.0.5:2379")
    name, _, own = user.partition(":")
    if name and not (own or password):
        raise UsageError(f"--etcd-user is {user!r} without a password: write name:password or set CULM_ETCD_PASSWORD")
    if bool(cert) != bool(key):
        missing = "--etcd-key" if cert else "--etcd-cert"
        raise UsageError(f"{missing} is missing: a client certificate and its key come together")
    access = Access(
        endpoints=endpoints, user=name, password=(own or password) if name else "", ca=ca, cert=cert, key=key
    )
    if (ca or cert) and not access.secure:
        raise UsageError(f"--etcd is {urls!r} and certificates are given: write https:// instead of http://")
    return access


def _endpoint(url: str) -> str:
    """A URL in one form: scheme and port filled in, nothing after them."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    try:
        host, port = parts.hostname, parts.port or 2379
    except ValueError:
        host, port = None, 0
    if parts.scheme not in ("http", "https") or not host or parts.path.strip("/") or parts.query or parts.username:
        raise UsageError(f"--etcd has the endpoint {url!r}: write it as https://host:2379")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def check_job_name(job: str) -> str:
    """A job's name is part of its keys in etcd."""
    if not _JOB_NAME.fullmatch(job):
        raise UsageError(f"--job is {job!r}: use up to 64 letters, digits, dots, dashes and underscores")
    return job


def tls(access: Access) -> ssl.SSLContext | None:
    """What TLS needs, from the files that were named; None without https."""
    if not access.secure:
        return None
    context = ssl.create_default_context()
    if access.ca:
        _load("--etcd-ca", access.ca, lambda: context.load_verify_locations(_existing("--etcd-ca", access.ca)))
    if access.cert:
        cert, key = _existing("--etcd-cert", access.cert), _existing("--etcd-key", access.key)
        _load("--etcd-cert and --etcd-key", f"{cert}, {key}", lambda: context.load_cert_chain(cert, key))
    return context


def _existing(field: str, path: str) -> str:
    if not Path(path).is_file():
        raise UsageError(f"{field} is {path!r}: there is no such file")
    return path


def _load(field: str, found: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (ssl.SSLError, OSError, ValueError) as error:
        raise UsageError(f"{field} ({found}) can not be used: {error}; give PEM files that belong together") from error
