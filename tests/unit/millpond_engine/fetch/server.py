"""A file server on loopback with the faults that real ones have."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Faults:
    """What goes wrong, consumed as it happens."""

    cut_after: list[int] = field(default_factory=list)
    """Bytes after which answers break off, one per answer."""
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Answers given instead of the file."""
    stall_after: list[int] = field(default_factory=list)
    no_ranges: bool = False
    no_validator: bool = False
    redirect_to: str = ""


class FileServer:
    """Serves `files` by path; keeps the requests it got."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults = Faults()
        self.requests: list[tuple[str, dict[str, str]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def add_hub_repository(
        self, repository: str, commit: str, files: dict[str, bytes], *, large: str = ".safetensors"
    ) -> None:
        siblings = []
        for name, content in files.items():
            self.files[f"/{repository}/resolve/{commit}/{name}"] = content
            entry: dict[str, Any] = {"rfilename": name, "size": len(content)}
            if name.endswith(large):
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            siblings.append(entry)
        listing = json.dumps({"sha": commit, "siblings": siblings}).encode()
        self.files[f"/api/models/{repository}/revision/main"] = listing

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append((path, dict(request.headers.items())))
        if self.faults.statuses:
            code, headers = self.faults.statuses.pop(0)
            return self._send(request, code, b"", headers)
        if self.faults.redirect_to and not path.startswith("/api/"):
            return self._send(request, 302, b"", {"Location": self.faults.redirect_to + path})
        content = self.files.get(path)
        if content is None:
            return self._send(request, 404, b"no", {})
        return self._send_file(request, content)

    def _send_file(self, request: BaseHTTPRequestHandler, content: bytes) -> None:
        etag = f'"{hashlib.md5(content).hexdigest()}"'
        headers = {} if self.faults.no_validator else {"ETag": etag}
        wanted = request.headers.get("Range", "")
        same = request.headers.get("If-Range", etag) == etag
        if not wanted or self.faults.no_ranges or not same:
            return self._send(request, 200, content, headers)
        start = int(wanted.removeprefix("bytes=").rstrip("-"))
        if start >= len(content):
            return self._send(request, 416, b"", headers)
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(request, 206, content[start:], headers)

    def _send(self, request: BaseHTTPRequestHandler, code: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(code)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            request.send_header(name, value)
        request.end_headers()
        if code in (200, 206) and self.faults.cut_after:
            request.wfile.write(body[: self.faults.cut_after.pop(0)])
            request.close_connection = True
            return
        if code in (200, 206) and self.faults.stall_after:
            request.wfile.write(body[: self.faults.stall_after.pop(0)])
            request.wfile.flush()
            time.sleep(3)
            request.close_connection = True
            return
        request.wfile.write(body)
