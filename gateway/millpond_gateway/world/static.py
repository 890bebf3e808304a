"""Endpoints from flags: `--static NAME=URL[,URL...]`, for use without Kubernetes."""

from __future__ import annotations

from urllib.parse import urlsplit

from millpond_gateway.routing.records import Policy
from millpond_gateway.world.records import PoolView, Replica


class StaticError(ValueError):
    """A `--static` flag cannot be used; the message says what is allowed."""


def parse_static(
    flag: str, *, policy: Policy = Policy.AUTO, price_of_recompute: float = 5.0
) -> tuple[PoolView, tuple[Replica, ...]]:
    """One pool and its replicas.

    Raises:
        StaticError: the flag has another form.
    """
    name, separator, addresses = flag.partition("=")
    urls = [url for url in addresses.split(",") if url]
    if not separator or not name or not urls:
        raise StaticError(f"{flag!r}: write NAME=URL[,URL...], for example smollm2=http://127.0.0.1:8000")
    replicas = tuple(_make_replica(name, url) for url in urls)
    if len({replica.uid for replica in replicas}) < len(replicas):
        raise StaticError(f"{flag!r}: the same address twice")
    return PoolView(name=name, model=name, policy=policy, price_of_recompute=price_of_recompute), replicas


def _make_replica(pool: str, url: str) -> Replica:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname or parts.path not in {"", "/"}:
        raise StaticError(f"{url!r}: write http://HOST:PORT; TLS towards engines is not served")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    address = f"{host}:{parts.port or 80}"
    return Replica(uid=address, pod=address, pool=pool, address=address, static=True)
