"""Listening sockets and the descriptors they need."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path

import structlog

_log = structlog.get_logger("gateway")
_SPARE_DESCRIPTORS = 256


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A bound socket; IPv6 hosts are written with colons. With `reuse_port` several processes share the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((host, port))
    sock.setblocking(False)
    return sock


def find_local_host(host: str) -> str:
    """Where this machine reaches what listens on `host`, in brackets for IPv6."""
    if host in {"0.0.0.0", ""}:  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    bare = "::1" if host == "::" else host
    return f"[{bare}]" if ":" in bare else bare


def listen_locally(path: str) -> socket.socket:
    """A bound Unix socket; one that a former process left there is replaced."""
    with contextlib.suppress(FileNotFoundError):
        Path(path).unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    sock.setblocking(False)
    return sock


def warn_about_descriptors(max_connections: int) -> int:
    """Raise the descriptor limit to what twice the connections need, as far as allowed; warn when that is less.

    Returns how many connections to clients and engines together fit below it.
    """
    wanted = 2 * max_connections + _SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return 2 * max_connections
    _log.warning(
        "too few file descriptors: connections past them are refused; raise the limit or lower --max-connections",
        limit=soft,
        wanted=wanted,
    )
    return max(1, soft - _SPARE_DESCRIPTORS)
