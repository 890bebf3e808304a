"""The fetch step as the first process of its container."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond_engine.fetch.command import STOPPED

INSIDE = """
import signal, sys
from millpond_engine.cli import main
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as good as none, which is what the first process of a container has
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def silent_server() -> Iterator[tuple[socket.socket, str]]:
    """A web server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        yield listener, f"http://127.0.0.1:{listener.getsockname()[1]}/model.gguf"


def test_a_fetch_that_nobody_wants_any_more_ends_at_once(
    silent_server: tuple[socket.socket, str], tmp_path: Path
) -> None:
    listener, url = silent_server
    command = [sys.executable, "-c", INSIDE, "fetch", "--source", url, "--to", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            connection, _ = listener.accept()
            assert connection.recv(1024).startswith(b"GET /model.gguf")
            process.send_signal(signal.SIGTERM)
            _, told = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == STOPPED
    assert "asked to stop" in told
