"""A run on several machines: how to reach its etcd, its name there, and the secret that its machines share."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from culm.cluster.store.encrypted_store import check_secret
from culm.cluster.store.etcd import EtcdAccess, parse_etcd_access
from culm.cluster.store.etcd.etcd_access import check_job_name, check_password_is_encrypted, tls_context
from culm.errors import UsageError
from culm.machines.join_token import access_of, read_token
from culm.providers.advertised_address import advertised_address

if TYPE_CHECKING:
    from culm.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """A run that other machines join through etcd."""

    access: EtcdAccess
    job: str
    """Name of the job in etcd; empty: the only job there."""
    secret: bytes
    local_nodes: int = 0
    """Nodes that this machine provides itself."""
    host: str = "127.0.0.1"
    """Address at which other machines reach these nodes."""


def find_shared_run(config: RunConfig, job_file: str = "") -> SharedRun:
    """The run that the fields `etcd`, `job_name`, `secret_file`, ... of a config describe.

    `job_file`: FILE[:function], which names the job if `job_name` is None. Raises UsageError if a field is missing, a
    file cannot be read, the token cannot be used, or the address is not one of this machine.
    """
    if config.join is not None:
        return _find_run_of_token(config, job_file)
    if config.etcd is None:
        raise UsageError("--join is missing: give the token of culm head, or name an etcd with --etcd URL")
    access = etcd_access(
        config.etcd,
        config.etcd_user,
        config.etcd_ca,
        config.etcd_cert,
        config.etcd_key,
        insecure=config.etcd_insecure,
    )
    host = advertised_address(config.address, access)
    name = job_name(config.job_name, job_file) if config.job_name or job_file else ""
    secret = job_secret(config.secret_file)
    return SharedRun(access=access, job=name, secret=secret, local_nodes=config.local_nodes or 0, host=host)


def _find_run_of_token(config: RunConfig, job_file: str) -> SharedRun:
    token = read_token(config.join)
    assert token is not None
    given = config.job_name or (Path(job_file.partition(":")[0]).stem if job_file else "")
    if token.job and given not in ("", token.job):
        raise UsageError(f"--job is {given!r}, and the token of --join is for job {token.job!r}: use that name")
    name = token.job or given
    access = access_of(token)
    host = advertised_address(config.address, access)
    return SharedRun(
        access=access,
        job=check_job_name(name) if name else "",
        secret=token.secret,
        local_nodes=config.local_nodes or 0,
        host=host,
    )


def etcd_access(
    urls: str, user: str | None, ca: str | None, cert: str | None, key: str | None, *, insecure: bool = False
) -> EtcdAccess:
    """How to reach etcd. The password is CULM_ETCD_PASSWORD, or part of `user`. Raises UsageError if a certificate file
    cannot be used, or if the password would cross the network unencrypted and `insecure` does not allow it."""
    password = os.environ.get("CULM_ETCD_PASSWORD", "")
    found = parse_etcd_access(urls, user=user or "", password=password, ca=ca or "", cert=cert or "", key=key or "")
    if not insecure:
        check_password_is_encrypted(found)
    tls_context(found)
    return found


def job_secret(file: str | None) -> bytes:
    """The secret of the job: the content of a file, or CULM_SECRET. Raises UsageError if there is none."""
    if file is not None:
        try:
            return check_secret(Path(file).read_bytes().strip())
        except OSError as error:
            raise UsageError(f"--secret-file is {file!r}: it cannot be read ({error.strerror})") from None
    found = os.environ.get("CULM_SECRET", "")
    if not found:
        raise UsageError(
            "there is no secret: set CULM_SECRET or give --secret-file, the same on every machine of the job, as in "
            "CULM_SECRET=$(openssl rand -hex 32)"
        )
    return check_secret(found.encode())


def job_name(name: str | None, file: str = "") -> str:
    """The name of a job in etcd: `name`, else the name of its file. Raises UsageError if it cannot be part of a key."""
    return check_job_name(name if name is not None else Path(file.partition(":")[0]).stem)
