"""A client of the JSON API of Kubernetes: create, list, change and delete objects of one namespace."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

from culm.errors import RunError
from culm.machines.engines.kubernetes_access import (
    ClusterAccess,
    Credentials,
    find_credentials,
    make_ssl_context,
)
from culm.machines.machine_provider import EngineMissing

_TIMEOUT_S = 30.0
_PATHS = {"jobs": "apis/batch/v1", "pods": "api/v1", "secrets": "api/v1"}


class KubernetesRefusal(RunError):
    """The API server has refused a call."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        """Its HTTP status."""


class KubernetesApi:
    """The API of one cluster. A call opens one connection and closes it."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._credentials: Credentials | None = None

    async def create(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object. Raises KubernetesRefusal with status 409 if there is one of that name."""
        return await self._call("POST", self._path(kind), body=body)

    async def list_labelled(self, kind: str, selector: str) -> list[dict[str, Any]]:
        """All objects with these labels, as in "app=culm"."""
        found: list[dict[str, Any]] = []
        position = {"labelSelector": selector, "limit": "500"}
        while True:
            answer = await self._call("GET", self._path(kind), parameters=position)
            found += answer.get("items") or []
            following = (answer.get("metadata") or {}).get("continue", "")
            if not following:
                return found
            position = {**position, "continue": following}

    async def nodes(self) -> list[dict[str, Any]]:
        """All nodes of the cluster."""
        answer = await self._call("GET", "api/v1/nodes")
        return list(answer.get("items") or [])

    async def merge(self, kind: str, name: str, change: dict[str, Any]) -> None:
        """Change fields of an object (a JSON merge patch)."""
        await self._call("PATCH", f"{self._path(kind)}/{name}", body=change, media="application/merge-patch+json")

    async def delete(self, kind: str, name: str, *, grace_s: int | None = None) -> None:
        """Delete an object and what belongs to it. One that does not exist is no error. `grace_s`: for Pods."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self._call("DELETE", f"{self._path(kind)}/{name}", body=body)
        except KubernetesRefusal as refusal:
            if refusal.status != 404:
                raise

    def _path(self, kind: str) -> str:
        return f"{_PATHS[kind]}/namespaces/{self._access.namespace}/{kind}"

    async def _call(
        self,
        method: str,
        path: str,
        *,
        parameters: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
        media: str = "application/json",
    ) -> dict[str, Any]:
        """One request. Credentials that were refused are asked for again once: those of programs expire."""
        for is_last in (False, True):
            fresh = self._credentials is None
            if self._credentials is None:
                self._credentials = await asyncio.to_thread(find_credentials, self._access)
            status, text = await self._send(method, path, parameters, body, media, self._credentials)
            if status != 401 or fresh or is_last:
                break
            self._credentials = None
        if status >= 400:
            raise self._refusal(method, path, status, text)
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            raise RunError(f"{self._access.server} does not answer as a Kubernetes API ({text[:60]!r})") from None
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        parameters: dict[str, str] | None,
        body: dict[str, Any] | None,
        media: str,
        credentials: Credentials,
    ) -> tuple[int, str]:
        """Status and text of an answer."""
        encrypted = self._access.server.startswith("https:")
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as http,
                http.request(
                    method,
                    f"{self._access.server}/{path}",
                    params=parameters,
                    data=None if body is None else json.dumps(body).encode(),
                    headers={"Accept": "application/json", "Content-Type": media, **credentials.headers},
                    ssl=make_ssl_context(self._access, credentials) if encrypted else True,
                    server_hostname=(self._access.server_name or None) if encrypted else None,
                    allow_redirects=False,
                ) as response,
            ):
                return response.status, await response.text(errors="replace")
        except TimeoutError:
            raise RunError(f"Kubernetes at {self._access.server} did not answer in {_TIMEOUT_S:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RunError(f"Kubernetes at {self._access.server} cannot be reached ({error})") from None

    def _refusal(self, method: str, path: str, status: int, text: str) -> Exception:
        try:
            reason = str(json.loads(text)["message"])
        except (ValueError, KeyError, TypeError):
            reason = text[:200]
        if status == 401:
            return EngineMissing(f"Kubernetes at {self._access.server} refuses the credentials of the kubeconfig")
        return KubernetesRefusal(status, f"Kubernetes refuses {method} {path} (status {status}: {reason.rstrip('.')})")
