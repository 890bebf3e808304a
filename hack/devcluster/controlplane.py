"""Start the control plane: etcd, API server, controller manager, scheduler."""

import errno
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from devcluster import pki
from devcluster.api import ApiClient
from devcluster.errors import PortInUseError
from devcluster.lock import hold_lock
from devcluster.namespaces import create_link, list_routes
from devcluster.network import Network, Ports, choose_ports, choose_range, make_network
from devcluster.paths import Layout
from devcluster.process import Process, spawn, wait_until
from devcluster.record import Record, read_boot_id
from devcluster.render import controlplane as render
from devcluster.render.node import NODE_NAME
from devcluster.steps import step
from devcluster.tools import find_tool

Save = Callable[[Record], None]
READY_SECONDS = 120.0
# Everything a namespaced object needs is there once a pod could be admitted: controllers made these two.
FIRST_OBJECTS = (
    "/api/v1/namespaces/default/serviceaccounts/default",
    "/api/v1/namespaces/default/configmaps/kube-root-ca.crt",
    "/api/v1/namespaces/kube-system",
)


def start_control_plane(
    layout: Layout, programs: Path, version: str, environ: Mapping[str, str], save: Save
) -> Record:
    """Start everything on the host side and wait until it serves. `save` is called after each new process.

    Raises:
        PortInUseError: an address or port is taken.
        StartError: a program ended or did not get ready.
    """
    for folder in (layout.run, layout.config, layout.logs, layout.images):
        folder.mkdir(parents=True, exist_ok=True)
    # Two clusters that start at the same time must not choose the same range: one looks after the other has taken.
    with hold_lock(layout.cache / "network.lock", deadline_seconds=60.0), step("network range and ports"):
        record = _reserve(layout, programs, version, environ)
        if os.geteuid() == 0:
            record = record.with_process(create_link(layout, record.network, programs / "pause"))
            save(record)
        record = replace(record, ports=_choose_ports(layout, record.network, environ))
    with step("certificates and configuration"):
        _write_files(layout, record.network, record.ports)
    record = _start_servers(layout, programs, record, save)
    record = replace(record, started=True)
    save(record)
    return record


def make_client(layout: Layout, record: Record) -> ApiClient:
    """A client for a record's API server."""
    return ApiClient(layout, record.network.host_address, record.ports.api_server)


def write_kubeconfig(
    layout: Layout, record_network: Network, ports: Ports, *, certificate: str, path: Path
) -> None:
    """Write a kubeconfig for one of the certificates."""
    path.write_text(
        render.render_kubeconfig(
            server=f"https://{record_network.host_address}:{ports.api_server}",
            user=certificate,
            authority=(layout.pki / "ca.crt").read_bytes(),
            certificate=(layout.pki / f"{certificate}.crt").read_bytes(),
            key=(layout.pki / f"{certificate}.key").read_bytes(),
        )
    )
    path.chmod(0o600)


def is_port_free(address: str, port: int) -> bool:
    """Whether one could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                return False
            raise
    return True


def _reserve(layout: Layout, programs: Path, version: str, environ: Mapping[str, str]) -> Record:
    is_root = os.geteuid() == 0
    routed = list_routes() if is_root else ()
    whole = choose_range(environ.get("MILLPOND_CLUSTER_CIDR") or None, routed)
    nothing_yet = Ports(api_server=0, registry=0, etcd=0, etcd_peer=0, controller_manager=0, scheduler=0)
    return Record(
        version=version,
        boot_id=read_boot_id(),
        programs=str(programs),
        network=make_network(whole, with_link=is_root),
        ports=nothing_yet,
        node_name=NODE_NAME,
        processes=(),
    )


def _choose_ports(layout: Layout, network: Network, environ: Mapping[str, str]) -> Ports:
    wanted = environ.get("MILLPOND_API_SERVER_PORT") or None
    if wanted is not None and not (wanted.isdecimal() and 0 < int(wanted) < 65536):
        raise PortInUseError(f"MILLPOND_API_SERVER_PORT={wanted} is no port: give a number from 1 to 65535")
    number = int(wanted) if wanted else None
    offset = int(layout.instance, 16) % 997 * 12
    return choose_ports(network.host_address, wanted_api_server=number, offset=offset, is_free=is_port_free)


def _write_files(layout: Layout, network: Network, ports: Ports) -> None:
    pki.create_authorities(layout.pki)
    pki.create_certificates(layout.pki, pki.make_control_plane_certificates(network))
    (layout.config / "audit-policy.json").write_text(json.dumps(render.make_audit_policy()))
    for certificate in ("controller-manager", "scheduler"):
        path = layout.config / f"{certificate}.kubeconfig"
        write_kubeconfig(layout, network, ports, certificate=certificate, path=path)
    write_kubeconfig(layout, network, ports, certificate="admin", path=layout.admin_kubeconfig)


def _start_servers(layout: Layout, programs: Path, record: Record, save: Save) -> Record:
    network, ports = record.network, record.ports
    client = make_client(layout, record)

    def start(role: str, program: str | Path, flags: render.Flags) -> Process:
        nonlocal record
        process = spawn(layout, role, render.render_flags(program, flags))
        record = record.with_process(process)
        save(record)
        return process

    with step("etcd and API server"):
        etcd = start("etcd", find_tool("etcd"), render.make_etcd_flags(layout, ports))
        server = start(
            "kube-apiserver",
            programs / "kube-apiserver",
            render.make_api_server_flags(layout, network, ports),
        )
        wait_until("the API server", client.is_ready,
                   layout=layout, watched=[etcd, server], deadline_seconds=READY_SECONDS)  # fmt: skip
    with step("controller manager and scheduler"):
        manager_flags = render.make_controller_manager_flags(layout, network, ports)
        manager = start("kube-controller-manager", programs / "kube-controller-manager", manager_flags)
        scheduler = start(
            "kube-scheduler", programs / "kube-scheduler", render.make_scheduler_flags(layout, ports)
        )
        wait_until("the first namespaces", lambda: all(map(client.exists, FIRST_OBJECTS)),
                   layout=layout, watched=[server, manager, scheduler], deadline_seconds=READY_SECONDS)  # fmt: skip
    return record
