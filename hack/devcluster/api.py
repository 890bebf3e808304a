"""The few calls the driver itself makes to the API server, as administrator."""

import http.client
import json
import ssl
from typing import Any

from devcluster.errors import StartError
from devcluster.paths import Layout

MANAGER = "millpond-devcluster"


class ApiClient:
    """A connection per call: the driver makes a handful, some of them before anyone listens."""

    def __init__(self, layout: Layout, host: str, port: int) -> None:
        self._address = (host, port)
        self._tls = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        self._tls.load_cert_chain(layout.pki / "admin.crt", layout.pki / "admin.key")

    def try_get(self, path: str) -> tuple[int, bytes]:
        """Get a path; status 0 means that nobody answered."""
        try:
            return self._call("GET", path)
        except (OSError, http.client.HTTPException):
            return 0, b""

    def is_ready(self) -> bool:
        """Whether the API server calls itself ready."""
        return self.try_get("/readyz")[0] == 200

    def exists(self, path: str) -> bool:
        """Whether an object is there."""
        return self.try_get(path)[0] == 200

    def is_node_ready(self, name: str) -> bool:
        """Whether the node's Ready condition is true."""
        status, body = self.try_get(f"/api/v1/nodes/{name}")
        conditions = json.loads(body)["status"].get("conditions", []) if status == 200 else []
        return any(found["type"] == "Ready" and found["status"] == "True" for found in conditions)

    def apply(self, path: str, manifest: dict[str, Any]) -> None:
        """Server-side apply one object."""
        query = f"{path}?fieldManager={MANAGER}&force=true"
        status, body = self._call("PATCH", query, json.dumps(manifest), "application/apply-patch+yaml")
        if status not in {200, 201}:
            raise StartError(f"the API server refused {path} with status {status}: {_message(body)}")

    def delete(self, path: str) -> None:
        """Delete one object; it may be gone already."""
        status, body = self._call("DELETE", path)
        if status not in {200, 202, 404}:
            raise StartError(
                f"the API server refused to delete {path} with status {status}: {_message(body)}"
            )

    def _call(
        self, method: str, path: str, body: str | None = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(*self._address, timeout=10.0, context=self._tls)
        try:
            connection.request(method, path, body, {"Content-Type": kind, "Accept": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]
