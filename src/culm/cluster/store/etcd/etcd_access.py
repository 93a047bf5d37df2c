"""Access to etcd: endpoints, certificates, user and password, with one error message for each invalid value."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from culm.errors import UsageError
from culm.transport.frames.encryption_policy import is_loopback

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class EtcdAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to connect. Empty: not used."""

    endpoints: tuple[str, ...]
    user: str = ""
    password: str = ""
    ca: str = ""
    """File with the CA certificates for etcd; empty: the machine's own list."""
    cert: str = ""
    key: str = ""
    trusted_certificate: str = ""
    """The one certificate in PEM that etcd must present, whatever its host name; empty: `ca` or the machine's list."""

    @property
    def secure(self) -> bool:
        return any(url.startswith("https://") for url in self.endpoints)

    def __repr__(self) -> str:
        """Without the password, so that it does not appear in logs."""
        user = f", user={self.user!r}" if self.user else ""
        return f"Access({','.join(self.endpoints)}{user})"


def parse_etcd_access(
    urls: str, *, user: str = "", password: str = "", ca: str = "", cert: str = "", key: str = ""
) -> EtcdAccess:
    """Parse user input: URLs separated by commas; `user` may be `name:password`. Raises UsageError."""
    endpoints = tuple(_normalize_endpoint(url.strip()) for url in urls.split(",") if url.strip())
    if not endpoints:
        raise UsageError(f"--etcd is {urls!r}: name at least one endpoint, such as http://10.0.0.5:2379")
    name, _, own = user.partition(":")
    if name and not (own or password):
        raise UsageError(f"--etcd-user is {user!r} without a password: write name:password or set CULM_ETCD_PASSWORD")
    if bool(cert) != bool(key):
        missing = "--etcd-key" if cert else "--etcd-cert"
        raise UsageError(f"{missing} is missing: a client certificate and its key come together")
    access = EtcdAccess(
        endpoints=endpoints, user=name, password=(own or password) if name else "", ca=ca, cert=cert, key=key
    )
    if (ca or cert) and not access.secure:
        raise UsageError(f"--etcd is {urls!r} and certificates are given: write https:// instead of http://")
    return access


def check_password_is_encrypted(access: EtcdAccess) -> None:
    """Raise UsageError if the password would be sent unencrypted to another machine."""
    for endpoint in access.endpoints:
        if access.password and endpoint.startswith("http://") and not is_loopback(urlsplit(endpoint).hostname or ""):
            raise UsageError(
                f"--etcd has the endpoint {endpoint}, and there is a password: everyone on the way could read it; use "
                "https://, or --etcd-insecure in a network that you trust"
            )


def _normalize_endpoint(url: str) -> str:
    """Normalize a URL: scheme and port filled in, nothing after them. Raises UsageError."""
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
    """Return the job's name, which is part of its keys in etcd. Raises UsageError if it is not usable there."""
    if not _JOB_NAME.fullmatch(job):
        raise UsageError(f"--job is {job!r}: use up to 64 letters, digits, dots, dashes and underscores")
    return job


def tls_context(access: EtcdAccess) -> ssl.SSLContext | None:
    """The TLS context for the given files; None without https. Raises UsageError."""
    if not access.secure:
        return None
    if access.trusted_certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # only one certificate is trusted, and it is this store's
        context.load_verify_locations(cadata=access.trusted_certificate)
    else:
        context = ssl.create_default_context()
    if access.ca:
        _load_certificate(
            "--etcd-ca", access.ca, lambda: context.load_verify_locations(_check_file_exists("--etcd-ca", access.ca))
        )
    if access.cert:
        cert, key = _check_file_exists("--etcd-cert", access.cert), _check_file_exists("--etcd-key", access.key)
        _load_certificate("--etcd-cert and --etcd-key", f"{cert}, {key}", lambda: context.load_cert_chain(cert, key))
    return context


def _check_file_exists(field: str, path: str) -> str:
    if not Path(path).is_file():
        raise UsageError(f"{field} is {path!r}: there is no such file")
    return path


def _load_certificate(field: str, paths: str, load: Callable[[], None]) -> None:
    try:
        load()
    except (ssl.SSLError, OSError, ValueError) as error:
        raise UsageError(f"{field} ({paths}) cannot be used: {error}; give PEM files that belong together") from error
