"""Telling a client that only stopped sending from one that left, where TCP itself does not say which it was."""

from __future__ import annotations

import asyncio
import socket
import sys

_CLOSE_WAIT = 8
"""State of a Linux TCP connection whose peer sends no more and may still read."""


def has_left(transport: asyncio.BaseTransport) -> bool:
    """Whether a client that ended its half of the connection has reset the other; False where nobody tells."""
    sock = transport.get_extra_info("socket")
    if sys.platform != "linux" or sock is None:
        return False
    try:
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return True
    return bool(state != _CLOSE_WAIT)
