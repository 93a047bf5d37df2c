"""The store that `culm head` starts for machines of a cluster: an etcd with TLS and a password.

Its folder holds the certificate, the key, the secret and the data, readable by the owner only. A head that is started
again with the same folder has the same token.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import os
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.machines.join_token import JoinToken, certificate_fingerprint, encode_token, head_password
from culm.providers.advertised_address import is_own_address
from culm.providers.private_etcd import PrivateEtcd, TlsFiles

if TYPE_CHECKING:
    from cryptography.x509 import GeneralName

DEFAULT_PORT = 2379
DEFAULT_FOLDER = Path("~/.culm/head")
_CERTIFICATE_DAYS = 3650
_SECRET_BYTES = 32
_OWNER_ONLY = 0o600


@dataclass(frozen=True)
class HeadFolder:
    """Files of a head, created when they are missing."""

    path: Path
    secret: bytes
    tls: TlsFiles

    @property
    def password(self) -> str:
        return head_password(self.secret)


@contextlib.contextmanager
def locked_head_folder(path: Path) -> Iterator[None]:
    """Keep other heads out of a folder. Raises UsageError if one uses it, or if the folder cannot be used.

    The kernel releases the lock when the process ends.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, _OWNER_ONLY)
    except OSError as error:
        raise UsageError(f"--data is {str(path)!r}: it cannot be used ({error.strerror})") from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--data is {str(path)!r}: a culm head is running there; print its token with culm head token, or stop "
                "it first"
            ) from None
        yield


def open_head_folder(path: Path, addresses: list[str], *, new_secret: bool = False) -> HeadFolder:
    """Open or create the folder of a head. `addresses`: names and addresses for its certificate.

    `new_secret` replaces the secret and the certificate and deletes the data: old tokens do not work any more. Raises
    UsageError if the folder cannot be used.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
        secret_file, certificate, key = path / "secret", path / "certificate.pem", path / "key.pem"
        if new_secret:
            shutil.rmtree(path / "data", ignore_errors=True)  # it requires the old password
        if new_secret or not secret_file.exists():
            _write_private(secret_file, secrets.token_bytes(_SECRET_BYTES))
        if new_secret or not (certificate.exists() and key.exists()):
            certificate_pem, key_pem = make_certificate(addresses)
            _write_private(key, key_pem)
            _write_private(certificate, certificate_pem)
        secret = secret_file.read_bytes()
    except OSError as error:
        raise UsageError(f"--data is {str(path)!r}: it cannot be used ({error.strerror})") from None
    if len(secret) != _SECRET_BYTES:
        raise UsageError(f"{secret_file} has {len(secret)} bytes: it is not a secret of culm head, use another --data")
    return HeadFolder(path, secret, TlsFiles(certificate, key))


def head_etcd(folder: HeadFolder, host: str, port: int) -> PrivateEtcd:
    """The etcd of a head, not started yet. Raises UsageError if the port is taken."""
    bind = host if is_own_address(host) else "0.0.0.0"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            raise UsageError(f"--port {port} cannot be used on {bind} ({error.strerror}): choose another") from None
    return PrivateEtcd(
        folder.path, host=host, bind=bind, port=port, tls=folder.tls, password=folder.password, durable=True
    )


@dataclass(frozen=True)
class ServedHead:
    """A head whose store is open."""

    etcd: PrivateEtcd
    url: str
    token: str
    """With which machines join runs of this head."""


@contextlib.asynccontextmanager
async def serve_head(
    data: Path, host: str, port: int, *, job: str = "", expires_at: int = 0, new_secret: bool = False
) -> AsyncIterator[ServedHead]:
    """Open the store of a head. `data`: its folder; `host`: the address at which machines reach it; the rest: see
    `open_head_folder` and `head_token`. Raises UsageError if folder or port cannot be used."""
    with locked_head_folder(data):
        folder = open_head_folder(data, [host, "127.0.0.1", "localhost"], new_secret=new_secret)
        async with head_etcd(folder, host, port) as etcd:
            token = head_token(folder, host, port, job=job, expires_at=expires_at)
            yield ServedHead(etcd, f"https://{host}:{port}", encode_token(token))


def read_head_token(data: Path, host: str, port: int, *, job: str = "", expires_at: int = 0) -> str:
    """A token of a head whose folder is on this machine. Raises UsageError if there is none."""
    if not (data / "secret").is_file():
        raise UsageError(f"--data is {str(data)!r}: it is not a folder of culm head, start the head first")
    return encode_token(head_token(open_head_folder(data, [host]), host, port, job=job, expires_at=expires_at))


def head_token(folder: HeadFolder, host: str, port: int, *, job: str = "", expires_at: int = 0) -> JoinToken:
    """The token with which machines join runs of this head."""
    return JoinToken(
        endpoints=(f"https://{host}:{port}",),
        secret=folder.secret,
        fingerprint=certificate_fingerprint(folder.tls.certificate.read_text()),
        user="root",
        job=job,
        expires_at=expires_at,
    )


def make_certificate(addresses: list[str]) -> tuple[bytes, bytes]:
    """A self-signed certificate and its key in PEM, for these names and addresses."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "culm head")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_CERTIFICATE_DAYS))
        .add_extension(x509.SubjectAlternativeName([_general_name(address) for address in addresses]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _general_name(address: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step, readable by the owner only."""
    new_file = path.with_suffix(".new")
    with os.fdopen(os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _OWNER_ONLY), "wb") as file:
        file.write(content)
    new_file.chmod(_OWNER_ONLY)
    new_file.replace(path)
