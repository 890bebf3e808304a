"""Addresses and ports: what is chosen, and what is refused."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest

from devcluster.errors import PortInUseError
from devcluster.network import CANDIDATES, FREE_PORTS, LOOPBACK, choose_ports, choose_range, make_network


def test_the_parts_of_a_range_do_not_overlap() -> None:
    network = make_network(CANDIDATES[0], with_link=True)
    pods, services = IPv4Network(network.pod_cidr), IPv4Network(network.service_cidr)
    host, node = IPv4Address(network.host_address), IPv4Address(network.node_address)
    assert not pods.overlaps(services)
    assert all(address not in part for part in (pods, services) for address in (host, node))
    assert node in IPv4Network(f"{host}/{network.link_prefix}", strict=False)
    assert {IPv4Address(network.dns_address), IPv4Address(network.api_service_address)} <= set(services)


def test_without_a_link_the_host_side_is_loopback() -> None:
    assert make_network(CANDIDATES[0], with_link=False).host_address == LOOPBACK


def test_a_routed_range_is_skipped_and_a_default_route_is_not_in_the_way() -> None:
    routed = [IPv4Network("0.0.0.0/0"), IPv4Network("10.210.3.0/24"), IPv4Network("10.208.0.0/14")]
    assert choose_range(None, routed) == IPv4Network("10.212.0.0/16")


def test_when_all_ranges_are_taken_the_message_names_the_variable() -> None:
    with pytest.raises(PortInUseError, match="MILLPOND_CLUSTER_CIDR"):
        choose_range(None, [IPv4Network("10.0.0.0/8")])


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("10.9.0.0/24", "a /16 is needed"), ("10.0.0.0/16", "overlaps 10.0.3.0/24"), ("10.9.0.1/16", "is no network"), ("x", "is no network")],
)  # fmt: skip
def test_a_wanted_range_is_checked(wanted: str, message: str) -> None:
    with pytest.raises(PortInUseError, match=message):
        choose_range(wanted, [IPv4Network("10.0.3.0/24")])


def test_a_free_wanted_range_is_taken() -> None:
    assert choose_range("10.9.0.0/16", []) == IPv4Network("10.9.0.0/16")


def test_ports_are_distinct_and_free() -> None:
    taken = {FREE_PORTS.start, FREE_PORTS.start + 2}
    ports = choose_ports(
        "10.210.0.1", wanted_api_server=None, offset=0, is_free=lambda _, port: port not in taken
    )
    chosen = [
        ports.api_server,
        ports.registry,
        ports.etcd,
        ports.etcd_peer,
        ports.controller_manager,
        ports.scheduler,
    ]
    assert len(set(chosen)) == len(chosen)
    assert not taken & set(chosen)
    assert (ports.api_server, ports.registry) == (6443, 5000)


def test_a_well_known_port_that_something_holds_everywhere_is_replaced() -> None:
    ports = choose_ports(
        "10.210.0.1", wanted_api_server=None, offset=0, is_free=lambda _, port: port not in {6443, 5000}
    )
    assert {ports.api_server, ports.registry} <= set(FREE_PORTS)


def test_offsets_wrap_around() -> None:
    ports = choose_ports(
        LOOPBACK, wanted_api_server=None, offset=len(FREE_PORTS) - 1, is_free=lambda *_: True
    )
    assert {ports.api_server, ports.registry} == {FREE_PORTS.stop - 1, FREE_PORTS.start}


def test_a_wanted_port_in_use_is_refused_with_the_variable_to_set() -> None:
    with pytest.raises(PortInUseError, match=r"port 7000 on 127.0.0.1 is in use.*MILLPOND_API_SERVER_PORT"):
        choose_ports(LOOPBACK, wanted_api_server=7000, offset=0, is_free=lambda _, port: port != 7000)


def test_no_free_port_at_all_is_refused() -> None:
    with pytest.raises(PortInUseError, match="too few free ports"):
        choose_ports(LOOPBACK, wanted_api_server=None, offset=0, is_free=lambda *_: False)
