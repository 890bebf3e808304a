"""Start and stop the node: registry, containerd, kubelet, kube-proxy, CoreDNS."""

import contextlib
import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from devcluster import cgroups, namespaces, pki
from devcluster.controlplane import make_client, write_kubeconfig
from devcluster.decision import CONTROL_PLANE_ROLES, LINK_ROLE
from devcluster.errors import NotRunningError, StartError
from devcluster.images import make_pause_archive
from devcluster.paths import Layout
from devcluster.process import Process, find_marked, is_alive, run_tool, spawn, stop, wait_until
from devcluster.record import Record
from devcluster.render import node as render
from devcluster.render.controlplane import render_flags
from devcluster.render.manifests import make_dns_manifests
from devcluster.steps import step
from devcluster.tools import find_cni_dir, find_tool

Save = Callable[[Record], None]
CAP_SYS_RESOURCE = 24
READY_SECONDS = 120.0


@dataclass
class _Starter:
    """Starts the node's programs and keeps the record current."""

    layout: Layout
    record: Record
    save: Save
    prefix: tuple[str, ...] = ()

    def add(self, process: Process) -> Process:
        self.record = self.record.with_process(process)
        self.save(self.record)
        return process

    def start_inside(self, role: str, argv: Sequence[str]) -> Process:
        return self.add(spawn(self.layout, role, [*self.prefix, *argv], extra_env={"PATH": _node_path()}))

    def run_inside(self, argv: Sequence[str], stdin: bytes | None = None) -> str:
        return run_tool([*self.prefix, *argv], stdin=stdin)


def start_node(layout: Layout, record: Record, save: Save) -> Record:
    """Add a node to a running control plane and wait until pods can run on it.

    Raises:
        StartError: a program ended or did not get ready.
    """
    starter = _Starter(layout, record, save)
    programs = Path(record.programs)
    link = record.find(LINK_ROLE)
    if link is None:
        raise NotRunningError(
            "this control plane was started without root: run `down`, then `up --node` as root"
        )
    with step("node: certificates, configuration, namespaces"):
        _write_files(layout, record)
        cgroups.create_cgroups(layout.cgroup)
        holder = starter.add(namespaces.create_node(layout, link, programs / "pause"))
        starter.prefix = tuple(namespaces.enter_node(layout, holder))
        namespaces.route_cluster(layout, record.network)
    with step("node: registry and containerd"):
        registry = starter.add(
            spawn(
                layout,
                "registry",
                [find_tool("docker-registry"), "serve", str(layout.config / "registry.json")],
            )
        )
        _start_containerd(starter, programs)
    with step("node: kubelet, kube-proxy and DNS ready"):
        _start_kubernetes(starter, programs, registry)
    finished = replace(starter.record, node_started=True)
    save(finished)
    return finished


def stop_node(layout: Layout, record: Record) -> Record:
    """End the node and all its pods; the control plane goes on.

    Raises:
        StartError: something would not end.
    """
    kept = tuple(process for process in record.processes if process.role in {LINK_ROLE, *CONTROL_PLANE_ROLES})
    alive = {process.pid for process in kept if is_alive(process)}
    stuck = stop(set(find_marked(layout)) - alive, grace_seconds=0.5)
    if stuck:
        raise StartError(
            f"processes {', '.join(map(str, stuck))} do not end: see what they wait for in /proc/PID/stack"
        )
    cgroups.delete_cgroups(layout.cgroup)
    for folder in render.BIND_MOUNTS.values():
        shutil.rmtree(layout.run / folder, ignore_errors=True)
    return replace(record, processes=kept, node_started=False)


def _write_files(layout: Layout, record: Record) -> None:
    network, ports = record.network, record.ports
    pki.create_certificates(layout.pki, pki.make_node_certificates(network, record.node_name))
    for user in ("kubelet", "kube-proxy", "coredns"):
        path = layout.config / f"{user}.kubeconfig"
        write_kubeconfig(layout, network, ports, certificate=user, path=path)
    cni_dir = find_cni_dir()
    assert cni_dir is not None, "ensure_tools looked"
    files = {
        "containerd.toml": render.render_containerd_config(
            layout, cni_dir=cni_dir, may_raise_oom_score=_has_capability(CAP_SYS_RESOURCE)
        ),
        f"certs.d/{render.REGISTRY_NAME}/hosts.toml": render.render_registry_hosts(network, ports.registry),
        "cni/10-devcluster.conflist": json.dumps(render.make_cni_config(network)),
        "kubelet.json": json.dumps(render.make_kubelet_config(layout, network, cgroup_v1=cgroups.is_v1())),
        "kube-proxy.json": json.dumps(render.make_kube_proxy_config(layout, network)),
        "Corefile": render.render_corefile(layout, network),
        "registry.json": json.dumps(render.make_registry_config(layout, network, ports.registry)),
        "resolv.conf": f"nameserver {network.dns_address}\n",
    }
    for name, text in files.items():
        path = layout.config / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _start_containerd(starter: _Starter, programs: Path) -> None:
    ctr = [find_tool("ctr"), "--address", render.CONTAINERD_SOCKET, "--namespace", "k8s.io"]
    _launch_containerd(starter)
    left = starter.run_inside([*ctr, "containers", "list", "--quiet"]).split()
    if left:
        # Containers of an earlier node, which died with it. containerd has already taken them over as its own, so
        # it starts again without them.
        starter.run_inside([*ctr, "containers", "delete", *left])
        _end_containerd(starter)
        _launch_containerd(starter)
    archive = make_pause_archive((programs / "pause").read_bytes(), render.PAUSE_IMAGE)
    starter.run_inside([*ctr, "images", "import", "-"], stdin=archive)


def _launch_containerd(starter: _Starter) -> None:
    config = str(starter.layout.config / "containerd.toml")
    process = starter.start_inside("containerd", [find_tool("containerd"), "--config", config])
    probe = [find_tool("ctr"), "--address", render.CONTAINERD_SOCKET, "--timeout", "2s", "version"]

    def answers() -> bool:
        with contextlib.suppress(StartError):
            return bool(starter.run_inside(probe))
        return False

    wait_until("containerd", answers, layout=starter.layout, watched=[process], deadline_seconds=30.0)


def _end_containerd(starter: _Starter) -> None:
    wrapper = starter.record.find("containerd")
    assert wrapper is not None
    children = Path(f"/proc/{wrapper.pid}/task/{wrapper.pid}/children").read_text().split()
    stop(map(int, children), grace_seconds=5.0)
    stop([wrapper.pid], grace_seconds=5.0)
    others = tuple(process for process in starter.record.processes if process.role != "containerd")
    starter.record = replace(starter.record, processes=others)


def _start_kubernetes(starter: _Starter, programs: Path, registry: Process) -> None:
    layout, network = starter.layout, starter.record.network
    client = make_client(layout, starter.record)
    for path, manifest in make_dns_manifests(network).items():
        client.apply(path, manifest)
    watched = [
        registry,
        starter.start_inside(
            "coredns", [str(programs / "coredns"), "-conf", str(layout.config / "Corefile")]
        ),
        starter.start_inside(
            "kube-proxy", render_flags(programs / "kube-proxy", {"config": layout.config / "kube-proxy.json"})
        ),
        starter.start_inside(
            "kubelet", render_flags(programs / "kubelet", render.make_kubelet_flags(layout, network))
        ),
    ]
    address = network.node_address
    checks = {
        "the node": lambda: client.is_node_ready(starter.record.node_name),
        "kube-proxy": lambda: _answers(f"http://{address}:{render.PROXY_HEALTH_PORT}/healthz"),
        "cluster DNS": lambda: _answers(f"http://{address}:{render.DNS_READY_PORT}/ready"),
        "the registry": lambda: _answers(
            f"http://{network.host_address}:{starter.record.ports.registry}/v2/"
        ),
    }
    for what, ready in checks.items():
        wait_until(what, ready, layout=layout, watched=watched, deadline_seconds=READY_SECONDS)


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text().splitlines()
    effective = next(line.split()[1] for line in status if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> number & 1)


def _node_path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
