"""A thin asynchronous client of the Kubernetes API: plain objects in, plain objects out, typed errors.

It never retries: the task that asked knows whether the wish still stands, so it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import aiohttp
import msgspec
from lightkube.config.kubeconfig import SingleConfig

from millpond_operator.clients.connection import Credentials, make_ssl_context
from millpond_operator.desired.kinds import DEPLOYMENT, POD, Kind
from millpond_operator.errors import (
    ConflictError,
    ForbiddenError,
    InvalidObjectError,
    KubeError,
    NotFoundError,
    ThrottledError,
    UnreachableError,
)

TYPE_JSON = "application/json"
TYPE_APPLY = "application/apply-patch+yaml"
TYPE_MERGE = "application/merge-patch+json"
TYPE_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

MAX_LOG_BYTES = 16_384
PAGE_SIZE = 500
MAX_CONNECTIONS = 32
KEEP_IDLE_SECONDS = 45.0
"""An idle connection is kept this long, since a handshake costs as much as the call; the API server keeps it for 90."""
WHOLE_CALL_FACTOR = 4.0
"""An answer that keeps coming may take this many times the time-out of a silence: full lists are long."""

Obj = dict[str, Any]
CallObserver = Callable[[str, str, int, float], None]
"""Told after every call: verb, kind, HTTP status (0: no answer), seconds."""


@dataclass(frozen=True, slots=True)
class ObjectList:
    """Objects of one kind at one resource version."""

    items: tuple[Obj, ...]
    resource_version: int


@dataclass(frozen=True, slots=True)
class Response:
    """An answer of the API server, read to its end."""

    status: int
    body: bytes
    retry_after: str | None = None

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8", "replace")


class KubeClient:
    """Verbs of the API server on plain objects. Every method raises a KubeError subclass when refused."""

    def __init__(
        self, connection: SingleConfig, *, timeout_seconds: float = 15.0, observer: CallObserver | None = None
    ) -> None:
        self._server = connection.cluster.server.rstrip("/")
        self._credentials = Credentials(connection, monotonic)
        self._ssl = make_ssl_context(connection) if self._server.startswith("https") else True
        self._timeout = aiohttp.ClientTimeout(
            total=timeout_seconds * WHOLE_CALL_FACTOR, connect=timeout_seconds, sock_read=timeout_seconds
        )
        self._session: aiohttp.ClientSession | None = None
        self._observer = observer

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        """The session, made at the first call since it belongs to the loop that runs then."""
        if self._session is None:
            connector = aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, ssl=self._ssl, keepalive_timeout=KEEP_IDLE_SECONDS
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=self._timeout,
                headers={"user-agent": "millpond-operator"},
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Obj:
        """Fetch one object."""
        return await self._call("get", kind, kind.make_path(namespace, name))

    async def get_metadata(self, kind: Kind, namespace: str | None, name: str) -> Obj:
        """Fetch only the metadata of one object: all that is ever read of a Secret."""
        path = kind.make_path(namespace, name)
        return await self._call("get", kind, path, accept=f"{TYPE_METADATA},{TYPE_JSON}")

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str | None = None, fields: str | None = None
    ) -> ObjectList:
        """Fetch all objects of a kind, page by page, in one namespace or in all."""
        params = {"limit": str(PAGE_SIZE)}
        params |= {"labelSelector": labels} if labels else {}
        params |= {"fieldSelector": fields} if fields else {}
        items: list[Obj] = []
        while True:
            page = await self._call("list", kind, kind.make_path(namespace), params=params)
            # Inside a list the API server leaves these two out of built-in kinds; a watch sends them.
            items += [
                {"apiVersion": kind.api_version, "kind": kind.name, **item}
                for item in page.get("items") or ()
            ]
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return ObjectList(tuple(items), int(metadata.get("resourceVersion") or 0))
            params["continue"] = metadata["continue"]

    async def create(
        self, kind: Kind, namespace: str | None, body: Mapping[str, Any], *, manager: str
    ) -> Obj:
        """Create an object; ConflictError when the name is taken."""
        params = {"fieldManager": manager, **_choose_validation(kind)}
        return await self._call("create", kind, kind.make_path(namespace), params=params, body=body)

    async def apply(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        body: Mapping[str, Any],
        *,
        manager: str,
        force: bool,
        subresource: str | None = None,
    ) -> Obj:
        """Server-side apply: the body holds exactly the fields this manager owns."""
        params = {
            "fieldManager": manager,
            "force": "true" if force else "false",
            **_choose_validation(kind),
        }
        path = kind.make_path(namespace, name, subresource)
        return await self._call("apply", kind, path, params=params, body=body, content_type=TYPE_APPLY)

    async def merge(
        self, kind: Kind, namespace: str | None, name: str, body: Mapping[str, Any], *, manager: str
    ) -> Obj:
        """Merge-patch a few fields of an object that is not ours to apply (labels of a pod, a finalizer)."""
        path = kind.make_path(namespace, name)
        return await self._call(
            "patch", kind, path, params={"fieldManager": manager}, body=body, content_type=TYPE_MERGE
        )

    async def replace(self, kind: Kind, namespace: str | None, name: str, body: Mapping[str, Any]) -> Obj:
        """Replace an object; the resource version in the body makes it a compare-and-swap."""
        return await self._call("update", kind, kind.make_path(namespace, name), body=body)

    async def delete(self, kind: Kind, namespace: str | None, name: str, *, uid: str | None = None) -> None:
        """Delete in the background, only the object with this uid; not found is success."""
        body: Obj = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._call("delete", kind, kind.make_path(namespace, name), body=body)
        except NotFoundError:
            return

    async def fetch_log(self, namespace: str, pod: str, container: str, *, tail_lines: int = 20) -> str:
        """Last lines of a container; while it waits to be started again, of the instance before."""
        path = POD.make_path(namespace, pod, "log")
        params = {"container": container, "tailLines": str(tail_lines), "limitBytes": str(MAX_LOG_BYTES)}
        response = await self._send("log", POD, "GET", path, params=params, headers={})
        return response.text

    async def _call(
        self,
        verb: str,
        kind: Kind,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = TYPE_JSON,
        accept: str = TYPE_JSON,
    ) -> Obj:
        headers = {"accept": accept} | ({"content-type": content_type} if body is not None else {})
        content = None if body is None else msgspec.json.encode(body)
        method = _METHODS[verb]
        response = await self._send(verb, kind, method, path, params=params, headers=headers, content=content)
        decoded = msgspec.json.decode(response.body)
        assert isinstance(decoded, dict), "the API server answers objects"
        return decoded

    async def _send(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str],
        content: bytes | None = None,
    ) -> Response:
        started = monotonic()
        status = 0
        try:
            authorization = self._credentials.get_header()
            sent = {**headers, "authorization": authorization} if authorization else headers
            async with self._open().request(
                method,
                f"{self._server}{path}",
                params=params,
                data=content,
                headers=sent,
                allow_redirects=False,
            ) as answer:
                response = Response(answer.status, await answer.read(), answer.headers.get("retry-after"))
            status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"no answer from the API server to {verb} {path}: {type(error).__name__}: {error}"
            raise UnreachableError(message) from error
        finally:
            if self._observer is not None:
                self._observer(verb, kind.name, status, monotonic() - started)
        if status == 401:
            self._credentials.forget()
        if status >= 400:
            raise make_error(f"{verb} {path}", response)
        return response


_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "apply": "PATCH",
    "patch": "PATCH",
    "update": "PUT",
    "delete": "DELETE",
}


def make_error(what: str, response: Response) -> KubeError:
    """Turn a refusal into its typed error, with the server's own words."""
    try:
        status = msgspec.json.decode(response.body)
    except msgspec.DecodeError:
        status = {}
    status = status if isinstance(status, dict) else {}
    code, reason = response.status, str(status.get("reason") or "")
    message = f"{what}: HTTP {code}: {status.get('message') or response.text[:300]}"
    if code == 429:
        return ThrottledError(message, retry_after_seconds=_parse_seconds(response.retry_after))
    kinds: dict[int, type[KubeError]] = {
        400: InvalidObjectError,
        401: ForbiddenError,
        403: ForbiddenError,
        404: NotFoundError,
        409: ConflictError,
        422: InvalidObjectError,
    }
    return kinds.get(code, UnreachableError if code >= 500 else KubeError)(
        message, status=code, reason=reason
    )


def _parse_seconds(value: str | None) -> float:
    return float(value) if value and value.isdigit() else 1.0


def _choose_validation(kind: Kind) -> dict[str, str]:
    """Pods hold parts that users wrote freely: a field that nobody knows is refused there, where the API server would drop it.

    A toleration without its misspelled effect tolerates all of them.
    """
    return {"fieldValidation": "Strict"} if kind == DEPLOYMENT else {}
