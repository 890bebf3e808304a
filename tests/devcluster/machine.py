"""What a cluster could leave on its machine, as a snapshot to compare."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from devcluster import cgroups
from devcluster.paths import Layout
from devcluster.process import find_marked
from devcluster.render.node import KERNEL_SETTINGS

NAMESPACE_KINDS = ("net", "mnt", "pid", "ipc")


@dataclass(frozen=True)
class Machine:
    """State that has no owner: other programs of this machine do not change it while a test runs."""

    settings: dict[str, str]
    firewall: str
    addresses: frozenset[str]
    routes: frozenset[str]


def look(layout: Layout) -> Machine:
    """Take a snapshot; addresses and routes are those of this cluster's link."""
    names = [
        *KERNEL_SETTINGS,
        "net/ipv4/ip_forward",
        "net/netfilter/nf_conntrack_max",
        "net/ipv4/conf/all/route_localnet",
    ]
    return Machine(
        settings={name: read(Path("/proc/sys") / name) for name in names},
        firewall=list_firewall(),
        addresses=frozenset(
            line for line in run("ip", "-oneline", "address").splitlines() if layout.link in line
        ),
        routes=frozenset(
            line for line in run("ip", "route", "show", "table", "all").splitlines() if layout.link in line
        ),
    )


def read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else "absent"


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


def list_firewall() -> str:
    """The host's rules, without counters and dates."""
    lines = run("iptables-save").splitlines()
    return "\n".join(line.partition(" [")[0] for line in lines if not line.startswith("#"))


def list_processes(layout: Layout) -> frozenset[int]:
    """Every process of the cluster: marked ones, and all within a namespace that a marked one holds."""
    namespaces = list_namespaces(layout)
    others = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return frozenset(find_marked(layout)) | {pid for pid in others if fetch_namespaces(pid) & namespaces}


def list_namespaces(layout: Layout) -> frozenset[str]:
    """Namespaces of the cluster's marked processes that are not the host's."""
    host = fetch_namespaces("self")
    found: frozenset[str] = frozenset()
    for pid in find_marked(layout):
        found |= fetch_namespaces(pid)
    return found - host


def fetch_namespaces(pid: int | str) -> frozenset[str]:
    """A process's namespaces, such as `net:[4026532000]`; nothing for one that has ended."""
    try:
        return frozenset(str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in NAMESPACE_KINDS)
    except OSError:
        return frozenset()


def list_all_namespaces() -> frozenset[str]:
    """Namespaces of every process on the machine."""
    every = (entry.name for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return frozenset().union(*(fetch_namespaces(pid) for pid in every))


def list_mounts(layout: Layout) -> list[str]:
    """Mounts on the host that name the cluster's folders, and named network namespaces."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    return [
        line for line in mounts if str(layout.state) in line or " /run/netns" in line or "kubelet" in line
    ]


def list_cgroups(layout: Layout) -> tuple[Path, ...]:
    return cgroups.list_cgroups(layout.cgroup)
