"""Everything the command line can set."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from millpond_common.contract import ports
from millpond_gateway.flow.records import FlowSettings
from millpond_gateway.proxy.settings import RelaySettings
from millpond_gateway.world.watch import WatchSettings


@dataclass(frozen=True, slots=True)
class Options:
    """One gateway process."""

    host: str = "0.0.0.0"  # noqa: S104 - a server for other pods
    port: int = ports.GATEWAY_HTTP
    admin_port: int = ports.GATEWAY_ADMIN
    static: tuple[str, ...] = ()
    """`NAME=URL[,URL...]`; with any, Kubernetes is not asked."""
    weights: tuple[str, ...] = ()
    """`NAME=REVISION=WEIGHT[,...]` of static pools."""
    routing: str = "Auto"
    """Of static pools."""
    price_of_recompute: float = 5.0
    """Of static pools."""
    namespace: str | None = None
    peer_port: int = ports.GATEWAY_PEERS
    peers: tuple[str, ...] = ()
    """`HOST:PORT` of other gateways; inside a cluster they are found by their labels."""
    peer_key_file: Path | None = None
    """Keys by which gateways know one another; inside a cluster the mounted Secret, where it is mounted."""
    any_peer: bool = False
    """Hear peers at any address, where the network rewrites those of pods."""
    kv_events: bool = True
    """Follow the engines' KV events, where their addresses are known: inside a cluster, or named by a flag."""
    poll_seconds: float = 1.0
    drain_delay_seconds: float = 3.0
    """After SIGTERM requests are still accepted this long, until no endpoint list names this pod any more."""
    grace_seconds: float = 300.0
    """Open streams may take this long to finish; with the delay it has to fit into the pod's own grace."""
    workers: int = 1
    """Processes that serve the port together; with more than one, another process supervises them."""
    access_log: bool = True
    seed: int | None = None
    flow: FlowSettings = field(default_factory=FlowSettings)
    relay: RelaySettings = field(default_factory=RelaySettings)
    watch: WatchSettings = field(default_factory=WatchSettings)
