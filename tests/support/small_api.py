"""An API server small enough for a gateway: lists, watches and Secrets of one namespace, over plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
NAMESPACE = "apps"


@dataclass
class SmallApi:
    """Objects by plural; `secret_status` answers instead of a Secret."""

    objects: dict[str, dict[str, Object]] = field(default_factory=lambda: {"inferencepools": {}, "pods": {}})
    secrets: dict[str, list[str]] = field(default_factory=dict)
    secret_status: int | None = None
    num_secret_reads: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._version = 1
        self._server: asyncio.Server | None = None
        self._watches: list[tuple[str, asyncio.Queue[Object]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, folder: Path) -> Path:
        """Serve; the path of a kubeconfig."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x", "namespace": NAMESPACE}}],
            "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "x", "user": {}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def put(self, plural: str, obj: Object) -> None:
        """Create or change an object."""
        name = obj["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects[plural] else "ADDED"
        self.objects[plural][name] = obj
        self._tell(plural, kind, obj)

    def remove(self, plural: str, name: str) -> None:
        """Delete an object."""
        self._tell(plural, "DELETED", self.objects[plural].pop(name))

    def _tell(self, plural: str, kind: str, obj: Object) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        for watched, queue in self._watches:
            if watched == plural:
                queue.put_nowait({"type": kind, "object": obj})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await self._answer(writer, head.split(b" ", 2)[1].decode())
        writer.close()
        self._tasks.discard(task)

    async def _answer(self, writer: asyncio.StreamWriter, target: str) -> None:
        parts = urlsplit(target)
        names, query = parts.path.split("/"), parse_qs(parts.query)
        if "secrets" in names:
            self.num_secret_reads += 1
            self._answer_secret(writer, names[-1])
        elif "watch" in query:
            await self._watch(writer, names[-1])
        elif "gateway" in query.get("labelSelector", [""])[0]:
            self._write(writer, 200, {"metadata": {"resourceVersion": str(self._version)}, "items": []})
        else:
            items = list(self.objects[names[-1]].values())
            self._write(writer, 200, {"metadata": {"resourceVersion": str(self._version)}, "items": items})

    def _answer_secret(self, writer: asyncio.StreamWriter, name: str) -> None:
        if self.secret_status is not None or name not in self.secrets:
            self._write(writer, self.secret_status or 404, {"kind": "Status"})
            return
        text = "\n".join(self.secrets[name]).encode()
        self._write(writer, 200, {"kind": "Secret", "data": {"keys": base64.b64encode(text).decode()}})

    def _write(self, writer: asyncio.StreamWriter, status: int, value: Object) -> None:
        body = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    async def _watch(self, writer: asyncio.StreamWriter, plural: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        queue: asyncio.Queue[Object] = asyncio.Queue()
        watch = (plural, queue)
        self._watches.append(watch)
        try:
            while True:
                line = json.dumps(await queue.get()).encode() + b"\n"
                writer.write(b"%x\r\n%b\r\n" % (len(line), line))
                await writer.drain()
        finally:
            self._watches.remove(watch)


def make_pool(name: str, *, tenants: list[Object] | None = None, **spec: Any) -> Object:
    """An InferencePool."""
    scheduling = {"tenants": tenants} if tenants else {}
    return {
        "metadata": {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": {}},
        "spec": {"model": {"source": "hf://a/b"}, "scheduling": scheduling, **spec},
    }


def make_pod(
    name: str, pool: str, port: int, *, revision: str = "r1", ready: bool = True, **metadata: Any
) -> Object:
    """A ready engine pod on this machine."""
    own = {"millpond.dev/pool": pool, "millpond.dev/revision": revision}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": own, **metadata},
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": port}]}]},
        "status": {
            "podIP": "127.0.0.1",
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
        },
    }
