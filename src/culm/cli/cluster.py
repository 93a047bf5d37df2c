"""Options of a job that several machines share: etcd, the name of the job, and the secret."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from culm.cluster.etcd import Access, parse_access
from culm.cluster.etcd.access import check_job_name, tls
from culm.cluster.sealed import check_secret
from culm.errors import UsageError

EtcdUser: TypeAlias = Annotated[str | None, typer.Option(help="User of etcd; the password is CULM_ETCD_PASSWORD.")]
EtcdCa: TypeAlias = Annotated[str | None, typer.Option(metavar="FILE", help="Certificates of who signs for etcd.")]
EtcdCert: TypeAlias = Annotated[str | None, typer.Option(metavar="FILE", help="Client certificate.")]
EtcdKey: TypeAlias = Annotated[str | None, typer.Option(metavar="FILE", help="Its key.")]
SecretFile: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="The job's secret; default: CULM_SECRET.")
]


def access_of(urls: str, user: str | None, ca: str | None, cert: str | None, key: str | None) -> Access:
    """How to reach etcd; the password comes from CULM_ETCD_PASSWORD, or with the user. Files are looked at here."""
    password = os.environ.get("CULM_ETCD_PASSWORD", "")
    found = parse_access(urls, user=user or "", password=password, ca=ca or "", cert=cert or "", key=key or "")
    tls(found)
    return found


def secret_of(file: str | None) -> bytes:
    """The secret of the job: from a file, or from CULM_SECRET."""
    if file is not None:
        try:
            return check_secret(Path(file).read_bytes().strip())
        except OSError as error:
            raise UsageError(f"--secret-file is {file!r}: it can not be read ({error.strerror})") from None
    found = os.environ.get("CULM_SECRET", "")
    if not found:
        raise UsageError(
            "there is no secret: set CULM_SECRET or give --secret-file, the same on every machine of the job, as in "
            "CULM_SECRET=$(openssl rand -hex 32)"
        )
    return check_secret(found.encode())


def job_name(asked: str | None, file: str = "") -> str:
    """The name of a job in etcd: as asked, else that of its file."""
    return check_job_name(asked if asked is not None else Path(file.partition(":")[0]).stem)
