"""Endpoints from flags: `--static NAME=URL[,URL...]`, for use without Kubernetes.

A URL may carry a query: `events` and `replay`, where the engine publishes its KV events and answers for missed ones
(`HOST:PORT`, or a port of the same host), and `revision`, which `--weights` may name. Its path goes in front of each path of the
engine; `/v1` at the end of it is the engine's own, as in the base URLs that clients write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import parse_qs, urlsplit

from millpond_gateway.routing.records import Policy
from millpond_gateway.world.parse import parse_weights
from millpond_gateway.world.records import PoolView, Replica

_PREFIX = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")
_QUERY = frozenset({"events", "replay", "revision"})


class StaticError(ValueError):
    """A `--static` flag cannot be used; the message says what is allowed."""


def parse_static(
    flag: str,
    *,
    policy: Policy = Policy.AUTO,
    price_of_recompute: float = 5.0,
    weights: Iterable[str] = (),
) -> tuple[PoolView, tuple[Replica, ...]]:
    """One pool and its replicas; `weights` are those of all pools, `NAME=REVISION=WEIGHT[,...]`.

    Raises:
        StaticError: a flag has another form.
    """
    name, separator, addresses = flag.partition("=")
    urls = [url for url in addresses.split(",") if url]
    if not separator or not name or not urls:
        raise StaticError(f"{flag!r}: write NAME=URL[,URL...], for example smollm2=http://127.0.0.1:8000")
    replicas = tuple(_make_replica(name, url) for url in urls)
    if len({replica.uid for replica in replicas}) < len(replicas):
        raise StaticError(f"{flag!r}: the same address twice")
    pool = PoolView(
        name=name,
        model=name,
        policy=policy,
        price_of_recompute=price_of_recompute,
        revision_weights=_find_weights(name, weights, {replica.revision for replica in replicas}),
    )
    return pool, replicas


def _find_weights(pool: str, flags: Iterable[str], revisions: set[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for flag in flags:
        name, _, text = flag.partition("=")
        try:
            weights = parse_weights(text)
        except ValueError as error:
            raise StaticError(f"{flag!r}: {error}") from error
        if name == pool:
            found |= weights
    if unknown := found.keys() - revisions:
        raise StaticError(
            f"no address of {pool} has revision {min(unknown)!r}: write http://HOST:PORT?revision=..."
        )
    return found


def _make_replica(pool: str, url: str) -> Replica:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    name = parts.hostname if parts.scheme == "http" and parts.username is None else None
    if not name or parts.fragment or not _PREFIX.fullmatch(prefix) or query.keys() - _QUERY:
        raise StaticError(
            f"{url!r}: write http://HOST:PORT[/PATH][?events=PORT&replay=PORT&revision=NAME]; TLS towards engines is not served"
        )
    host = f"[{name}]" if ":" in name else name
    address = f"{host}:{parts.port or 80}"
    return Replica(
        uid=address + prefix,
        pod=address + prefix,
        pool=pool,
        address=address,
        prefix=prefix,
        revision=query.get("revision", ""),
        static=True,
        events=_make_event_address(host, query.get("events")),
        replay=_make_event_address(host, query.get("replay")),
    )


def _make_event_address(host: str, text: str | None) -> str | None:
    """ZeroMQ address from a port of the engine's host or a `HOST:PORT`."""
    if text is None:
        return None
    address = text.removeprefix("tcp://")
    address = address if ":" in address else f"{host}:{address}"
    port = address.rpartition(":")[2]
    if not port.isdigit() or not 0 < int(port) <= 65_535:
        raise StaticError(f"{text!r}: write a port, or HOST:PORT, of the engine's KV events")
    return f"tcp://{address}"
