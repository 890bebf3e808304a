"""A demo that cannot go on names its step, the reason and what to do, never a traceback."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest

from demo import install
from demo.load import Verdict, run_load
from demo.steps import step
from images.errors import NoSpaceError


def test_a_full_disk_under_the_images_fails_the_step_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Mock(side_effect=NoSpaceError("18 GiB are free under /var/lib: free some and run again"))
    monkeypatch.setattr(install, "build", build)
    with pytest.raises(SystemExit), step("the three images"):
        install.push_images(Mock(host_address=None, registry="registry:5000", kubeconfig=Path("none")))
    said = capsys.readouterr().err
    assert "FAILED at step: the three images" in said
    assert "operator image: 18 GiB are free under /var/lib: free some and run again" in said


class _Shedding(BaseHTTPRequestHandler):
    """Refuses each stream once, then answers it whole."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.seen.count(body.decode()) == 0:
            answer, status, kind = b'{"error": {"message": "busy"}}', 503, "application/json"
        else:
            usage = {"choices": [{"delta": {"content": "one"}}], "usage": {"completion_tokens": 1}}
            answer, status, kind = (
                f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode(),
                200,
                "text/event-stream",
            )
        self.seen.append(body.decode())
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("retry-after", "0")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(("patience", "expected"), [(0, Verdict.FAILED), (2, Verdict.COMPLETE)])
def test_a_stream_that_is_shed_comes_back_as_often_as_it_has_patience(
    patience: int, expected: Verdict
) -> None:
    _Shedding.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Shedding)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        load = run_load(
            url,
            model="m",
            prompts=["a"],
            tokens=1,
            concurrency=1,
            stop=asyncio.Event(),
            limit=1,
            patience=patience,
        )
        tally = asyncio.run(load)
    finally:
        server.shutdown()
    assert tally.counts == {expected: 1}
    assert tally.num_waits == (1 if patience else 0)
