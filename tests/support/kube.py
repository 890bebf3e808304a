"""A thin client that tests use to act on and look at a cluster."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes import client, config, dynamic
from kubernetes.client.exceptions import ApiException

Manifest = dict[str, Any]
FIELD_MANAGER = "millpond-tests"


WAIT_SECONDS = 120.0
"""Longest wait for what must happen sooner or later: how soon says more about the machine than about the code."""


def wait_for(
    what: str,
    ready: Callable[[], Any],
    *,
    seconds: float = WAIT_SECONDS,
    seen: Callable[[], object] | None = None,
) -> Any:
    """Poll until `ready` returns something true, and return that; fails the test at the deadline with what was `seen`."""
    deadline = time.monotonic() + seconds
    while not (result := ready()):
        if time.monotonic() >= deadline:
            last = f"; seen last: {seen()}" if seen is not None else ""
            raise AssertionError(f"not within {seconds:.0f} s: {what}{last}")
        time.sleep(0.1)
    return result


class Kube:
    """One user of one cluster. Without a namespace in call or manifest, the test's own is meant."""

    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self.api_client: client.ApiClient = config.new_client_from_config(str(kubeconfig))
        self.core = client.CoreV1Api(self.api_client)
        self._dynamic: dynamic.DynamicClient | None = None
        # The client keeps what it discovered in a file named after the server's address alone, which the next cluster
        # has too; ours goes with this object.
        self._discovered = tempfile.TemporaryDirectory(prefix="millpond-kube-")

    @property
    def dynamic(self) -> dynamic.DynamicClient:
        """The client for any kind; discovers the API on first use."""
        if self._dynamic is None:
            self._dynamic = dynamic.DynamicClient(
                self.api_client, cache_file=f"{self._discovered.name}/discovered.json"
            )
        return self._dynamic

    def resource(self, api_version: str, kind: str) -> Any:
        """The dynamic client's resource of a kind, also one that was defined a moment ago."""
        return self.dynamic.resources.get(api_version=api_version, kind=kind)

    def apply(self, manifest: Manifest, *, manager: str = FIELD_MANAGER, force: bool = True) -> Manifest:
        """Server-side apply; returns the object. Raises ApiException with the server's answer."""
        kind, namespace = self._place(manifest)
        done = kind.server_side_apply(
            body=manifest, name=manifest["metadata"]["name"], namespace=namespace,
            field_manager=manager, force_conflicts=force,
        )  # fmt: skip
        return dict(done.to_dict())

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create; with `dry_run` validate only."""
        kind, namespace = self._place(manifest)
        options = {"dry_run": "All"} if dry_run else {}
        return dict(kind.create(body=manifest, namespace=namespace, **options).to_dict())

    def patch_status(self, manifest: Manifest) -> Manifest:
        """Merge the manifest's status into the object's, as a controller would."""
        kind, namespace = self._place(manifest)
        done = kind.status.patch(
            body=manifest, name=manifest["metadata"]["name"], namespace=namespace,
            content_type="application/merge-patch+json",
        )  # fmt: skip
        return dict(done.to_dict())

    def get(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> Manifest:
        """Read one object. Raises ApiException 404."""
        found = self.resource(api_version, kind).get(name=name, namespace=namespace or self.namespace)
        return dict(found.to_dict())

    def list(self, api_version: str, kind: str, namespace: str | None = None, **query: str) -> list[Manifest]:
        """List objects of a kind; `label_selector` and `field_selector` narrow it."""
        found = self.resource(api_version, kind).get(namespace=namespace or self.namespace, **query)
        return [item.to_dict() for item in found.items]

    def fetch(self, path: str) -> Manifest:
        """Read a path of the API as it is, past what this client discovered. Raises ApiException."""
        where = self.api_client.param_serialize("GET", path, auth_settings=["BearerToken"])
        response = self.api_client.call_api(*where)
        data = response.read()
        if not 200 <= response.status < 300:
            raise ApiException(status=response.status, reason=response.reason)
        return dict(json.loads(data))

    def delete(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> None:
        """Delete one object, children in the background; it may be gone already."""
        try:
            self.resource(api_version, kind).delete(name=name, namespace=namespace or self.namespace)
        except ApiException as error:
            if error.status != 404:
                raise

    def exists(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> bool:
        """Whether an object is there."""
        try:
            self.get(api_version, kind, name, namespace)
        except ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def _place(self, manifest: Manifest) -> tuple[Any, str | None]:
        kind = self.resource(manifest["apiVersion"], manifest["kind"])
        return kind, manifest["metadata"].get("namespace", self.namespace) if kind.namespaced else None
