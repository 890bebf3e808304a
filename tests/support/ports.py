"""Ports for programs that must be told theirs."""

from __future__ import annotations

import random
import socket

RANGE = range(10_000, 20_000)
"""Below the ports that the kernel gives to connections and to listeners at port 0, and below the cluster's own."""
_given: set[int] = set()


def find_port() -> int:
    """A port of loopback that nobody listens on, and that nobody gets by chance before it is used."""
    for port in random.sample(RANGE, len(RANGE)):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise OSError(f"no free port within {RANGE}")
