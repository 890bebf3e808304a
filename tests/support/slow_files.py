"""A file server beside the cluster that is slow and breaks off as told, and remembers what it was asked for."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHUNK_BYTES = 1 << 18


class SlowFiles:
    """Serves one file with byte ranges and an entity tag."""

    def __init__(self, host: str, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size
        self.bytes_per_second = 0
        """0: as fast as it goes."""
        self.silent_after: list[int] = []
        """Position in the file after which an answer goes silent, one for each of the next answers."""
        self.ranges: list[str] = []
        """The Range header of each request for the file, empty without one."""
        self.released = threading.Event()
        with path.open("rb") as file:
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(ConnectionError):
                    files.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer((host, 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://{host}:{self._http.server_address[1]}/{path.name}"
        threading.Thread(
            target=self._http.serve_forever, args=(0.02,), name="slow files", daemon=True
        ).start()

    def close(self) -> None:
        """End; answers that are silent end too."""
        self.released.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Send the file, or what is asked of it, at the wanted speed."""
        asked = str(request.headers.get("Range") or "")
        self.ranges.append(asked)
        position = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        end = self.silent_after.pop(0) if self.silent_after else self.size
        request.send_response(206 if asked else 200)
        request.send_header("ETag", f'"{self.sha256}"')
        request.send_header("Content-Length", str(self.size - position))
        if asked:
            request.send_header("Content-Range", f"bytes {position}-{self.size - 1}/{self.size}")
        request.end_headers()
        with self.path.open("rb") as file:
            file.seek(position)
            while position < end:
                chunk = file.read(min(CHUNK_BYTES, end - position))
                request.wfile.write(chunk)
                position += len(chunk)
                if self.bytes_per_second:
                    time.sleep(len(chunk) / self.bytes_per_second)
        if end < self.size:
            self.released.wait()
