"""The cluster's addresses: which private range it takes, and who has which address in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network

from devcluster.errors import PortInUseError

CANDIDATES = tuple(IPv4Network(f"10.{second}.0.0/16") for second in range(210, 240))
LOOPBACK = "127.0.0.1"
# Below the range the kernel hands out for outgoing connections, so none of those can take a chosen port meanwhile.
FREE_PORTS = range(20000, 32000)
API_SERVER_PORT = 6443
REGISTRY_PORT = 5000


@dataclass(frozen=True)
class Network:
    """One /16: pods in the lower half, services in the third quarter, the veth pair at the very end."""

    range: str
    pod_cidr: str
    service_cidr: str
    link_prefix: int
    host_address: str
    node_address: str
    api_service_address: str
    dns_address: str


@dataclass(frozen=True)
class Ports:
    """Ports on the host side; the node has all of its own."""

    api_server: int
    registry: int
    etcd: int
    etcd_peer: int
    controller_manager: int
    scheduler: int


def make_network(whole: IPv4Network, *, with_link: bool) -> Network:
    """Lay a /16 out. Without a link (no root, so no node) the host side is loopback."""
    halves = list(whole.subnets(new_prefix=17))
    services = next(halves[1].subnets(new_prefix=20))
    link = list(whole.subnets(new_prefix=30))[-1]
    return Network(
        range=str(whole),
        pod_cidr=str(halves[0]),
        service_cidr=str(services),
        link_prefix=link.prefixlen,
        host_address=str(link[1]) if with_link else LOOPBACK,
        node_address=str(link[2]),
        api_service_address=str(services[1]),
        dns_address=str(services[10]),
    )


def choose_range(wanted: str | None, routed: Iterable[IPv4Network]) -> IPv4Network:
    """Choose the first candidate that overlaps nothing the host already routes, or check the wanted one.

    Raises:
        PortInUseError: the wanted range is taken or malformed, or every candidate is taken.
    """
    taken = [network for network in routed if network.prefixlen > 0]
    if wanted is not None:
        return _check_range(wanted, taken)
    free = (whole for whole in CANDIDATES if not any(whole.overlaps(network) for network in taken))
    chosen = next(free, None)
    if chosen is None:
        raise PortInUseError(
            f"every range from {CANDIDATES[0]} to {CANDIDATES[-1]} is routed on this host:"
            " set MILLPOND_CLUSTER_CIDR to a free /16"
        )
    return chosen


def _check_range(wanted: str, taken: Iterable[IPv4Network]) -> IPv4Network:
    try:
        whole = IPv4Network(wanted)
    except ValueError as error:
        raise PortInUseError(f"MILLPOND_CLUSTER_CIDR={wanted} is no network: {error}") from error
    if whole.prefixlen != 16:
        raise PortInUseError(f"MILLPOND_CLUSTER_CIDR={wanted}: a /16 is needed")
    clash = next((network for network in taken if whole.overlaps(network)), None)
    if clash is not None:
        raise PortInUseError(
            f"MILLPOND_CLUSTER_CIDR={wanted} overlaps {clash}, which this host routes: choose another /16"
        )
    return whole


def choose_ports(
    host_address: str, *, wanted_api_server: int | None, offset: int, is_free: Callable[[str, int], bool]
) -> Ports:
    """Choose free ports: the well-known ones on an address of our own if they are, others from `offset` on.

    Clusters that start at the same time look at different offsets, so they rarely want the same port.

    Raises:
        PortInUseError: the wanted API server port is taken, or too few are free.
    """
    candidates = [*FREE_PORTS[offset % len(FREE_PORTS) :], *FREE_PORTS[: offset % len(FREE_PORTS)]]
    free = (port for port in candidates if is_free(LOOPBACK, port) and is_free(host_address, port))

    def prefer(port: int) -> int:
        return port if host_address != LOOPBACK and is_free(host_address, port) else next(free)

    try:
        if wanted_api_server is not None and not is_free(host_address, wanted_api_server):
            raise PortInUseError(
                f"port {wanted_api_server} on {host_address} is in use: end the program that listens there,"
                " or set MILLPOND_API_SERVER_PORT to a free port"
            )
        return Ports(
            api_server=wanted_api_server or prefer(API_SERVER_PORT),
            registry=prefer(REGISTRY_PORT),
            etcd=next(free),
            etcd_peer=next(free),
            controller_manager=next(free),
            scheduler=next(free),
        )
    except StopIteration:
        message = f"too few free ports on {LOOPBACK} from {FREE_PORTS.start} to {FREE_PORTS.stop}: end some listeners"
        raise PortInUseError(message) from None
