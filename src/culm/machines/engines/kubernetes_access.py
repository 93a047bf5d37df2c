"""How to reach a Kubernetes cluster: from a kubeconfig, or from inside a Pod."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from culm.errors import UsageError
from culm.machines.engines.kubernetes_manifests import import_yaml
from culm.machines.machine_provider import EngineMissing

_IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_EXEC_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ClusterAccess:
    """Where the API server is, and the credentials of the user."""

    server: str
    namespace: str
    certificate: str = ""
    """CA certificates of the server in PEM; empty: those of this machine."""
    insecure: bool = False
    """The certificate of the server is not verified, as the kubeconfig demands."""
    server_name: str = ""
    """Name in the certificate of the server, if it is not that of its URL."""
    user: dict[str, Any] = field(default_factory=dict, repr=False)
    """The user's entry of the kubeconfig."""
    folder: str = "."
    """Where relative paths of the kubeconfig begin."""


@dataclass(frozen=True)
class Credentials:
    """What proves who the user is."""

    token: str = field(default="", repr=False)
    certificate: str = ""
    """Client certificate in PEM."""
    key: str = field(default="", repr=False)
    """Its key in PEM."""
    basic: tuple[str, str] | None = field(default=None, repr=False)
    """User and password."""

    @property
    def headers(self) -> dict[str, str]:
        if self.token:
            return {"Authorization": f"Bearer {self.token}"}
        return {"Authorization": aiohttp.BasicAuth(*self.basic).encode()} if self.basic else {}


def find_access(context: str = "", namespace: str = "") -> ClusterAccess:
    """The access that a context of the kubeconfig describes, by default its current one, or that of this Pod.

    Raises UsageError if there is none.
    """
    files = [Path(name).expanduser() for name in os.environ.get("KUBECONFIG", "~/.kube/config").split(os.pathsep)]
    files = [file for file in files if file.is_file()]
    if not files:
        return _access_of_pod(namespace)
    merged: dict[str, Any] = {}
    for file in files:
        _merge(merged, _read_config(file), str(file.parent))
    name = context or merged.get("current-context", "")
    if name not in merged.get("contexts", {}):
        known = ", ".join(merged.get("contexts", {})) or "none"
        raise UsageError(f"context is {name!r}: the kubeconfig has no such context, the known ones are {known}")
    chosen = merged["contexts"][name]["context"]
    cluster_entry = merged.get("clusters", {}).get(chosen.get("cluster"))
    if cluster_entry is None:
        raise UsageError(f"context is {name!r}: the kubeconfig has no cluster {chosen.get('cluster')!r}")
    cluster, folder = cluster_entry["cluster"], cluster_entry["folder"]
    user_entry = merged.get("users", {}).get(chosen.get("user"), {"user": {}, "folder": folder})
    return ClusterAccess(
        server=str(cluster["server"]).rstrip("/"),
        namespace=namespace or chosen.get("namespace") or "default",
        certificate=_file_or_data(cluster, "certificate-authority", folder),
        insecure=bool(cluster.get("insecure-skip-tls-verify")),
        server_name=cluster.get("tls-server-name", ""),
        user=user_entry.get("user") or {},
        folder=user_entry["folder"],
    )


def find_credentials(access: ClusterAccess) -> Credentials:
    """The credentials of the user; runs the program that the kubeconfig names, if it does. May take seconds.

    Raises UsageError if there are none.
    """
    user = access.user
    if "exec" in user:
        return _run_credential_program(user["exec"], access)
    if "auth-provider" in user:
        raise UsageError("the kubeconfig has an auth-provider, which Kubernetes has removed: create it again")
    token = str(user.get("token", ""))
    if not token and "tokenFile" in user:
        token = _read(Path(access.folder) / user["tokenFile"]).strip()
    return Credentials(
        token=token,
        certificate=_file_or_data(user, "client-certificate", access.folder),
        key=_file_or_data(user, "client-key", access.folder),
        basic=(user["username"], user.get("password", "")) if "username" in user else None,
    )


def make_ssl_context(access: ClusterAccess, credentials: Credentials) -> ssl.SSLContext:
    """How to verify the server, and to prove who the user is."""
    context = ssl.create_default_context(cadata=access.certificate or None)
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if credentials.certificate:
        with tempfile.TemporaryDirectory() as folder:  # readable by the owner only; ssl takes files only
            pair = Path(folder) / "pair.pem"
            pair.touch(mode=0o600)
            pair.write_text(credentials.certificate + "\n" + credentials.key)
            context.load_cert_chain(pair)
    return context


def _access_of_pod(namespace: str) -> ClusterAccess:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if not host or not (_IN_POD / "token").is_file():
        raise EngineMissing("there is no Kubernetes cluster: set KUBECONFIG to a kubeconfig file")
    host = f"[{host}]" if ":" in host else host
    return ClusterAccess(
        server=f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}",
        namespace=namespace or _read(_IN_POD / "namespace").strip() or "default",
        certificate=_read(_IN_POD / "ca.crt"),
        user={"tokenFile": str(_IN_POD / "token")},
    )


def _read_config(file: Path) -> dict[str, Any]:
    yaml = import_yaml()
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"the kubeconfig {file} cannot be read ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict):
        raise UsageError(f"{file} is not a kubeconfig")
    return found


def _merge(merged: dict[str, Any], config: dict[str, Any], folder: str) -> None:
    """Add the entries of a kubeconfig. As in kubectl, the first file that has a name wins."""
    if config.get("current-context"):
        merged.setdefault("current-context", config["current-context"])
    for kind in ("clusters", "contexts", "users"):
        for entry in config.get(kind) or []:
            merged.setdefault(kind, {}).setdefault(entry["name"], {**entry, "folder": folder})


def _file_or_data(entry: dict[str, Any], name: str, folder: str) -> str:
    """The text of a PEM that is in the kubeconfig in base64, or in a file that it names; empty: neither."""
    if f"{name}-data" in entry:
        return base64.b64decode(entry[f"{name}-data"]).decode()
    return _read(Path(folder) / entry[name]) if name in entry else ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}, which the access to Kubernetes needs, cannot be read ({error})") from None


def _run_credential_program(entry: dict[str, Any], access: ClusterAccess) -> Credentials:
    """Run the `exec` program of a kubeconfig, as those of EKS, GKE and AKS."""
    cluster = {"server": access.server, "insecure-skip-tls-verify": access.insecure}
    if access.certificate:
        cluster["certificate-authority-data"] = base64.b64encode(access.certificate.encode()).decode()
    version = entry.get("apiVersion", "client.authentication.k8s.io/v1")
    info = {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False, "cluster": cluster}}
    environment = {**os.environ, **{each["name"]: each["value"] for each in entry.get("env") or []}}
    command = [entry["command"], *(entry.get("args") or [])]
    try:
        done = subprocess.run(
            command,
            env={**environment, "KUBERNETES_EXEC_INFO": json.dumps(info)},
            cwd=access.folder,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_EXEC_TIMEOUT_S,
            check=True,
        )
        status = json.loads(done.stdout)["status"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        words = getattr(error, "stderr", b"") or str(error).encode()
        reason = words.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise UsageError(f"{command[0]}, which the kubeconfig names for credentials, has failed: {reason[0]}") from None
    return Credentials(
        token=status.get("token", ""),
        certificate=status.get("clientCertificateData", ""),
        key=status.get("clientKeyData", ""),
    )
