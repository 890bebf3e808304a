"""The node's Linux namespaces: a network of its own behind a veth pair, and private mounts and processes.

Both are held by a sleeping process. When it ends, the kernel takes everything inside along: addresses, firewall
rules, mounts, and every process of every pod. Nothing has to be undone one by one, not even after a SIGKILL.
"""

import json
import re
import shlex
import subprocess
import time
from ipaddress import IPv4Network
from pathlib import Path

from devcluster.decision import LINK_ROLE, NODE_ROLE
from devcluster.errors import StartError
from devcluster.network import Network
from devcluster.paths import Layout, find_hidden_dir
from devcluster.process import Process, find_marked, run_tool, spawn, wait_until
from devcluster.render.node import BIND_MOUNTS, KERNEL_SETTINGS
from devcluster.tools import find_tool

MOUNT_SCRIPT = """
{releases}
mount --make-rshared /
mount -t tmpfs -o mode=0755 node-run /run
mount -t tmpfs -o mode=0755 node-lib /var/lib
mount -t tmpfs -o mode=0755 node-log /var/log
mkdir -p /run/lock {targets}
{binds}
"""

# Spaces and backslashes in a mount point, as /proc/mounts writes them.
_ESCAPED = re.compile(r"\\([0-7]{3})")


def list_routes() -> tuple[IPv4Network, ...]:
    """List every IPv4 network the host routes, the default route included."""
    ip = find_tool("ip")
    rows = json.loads(run_tool([ip, "-json", "-4", "route", "show", "table", "main"]) or "[]")
    return tuple(IPv4Network("0.0.0.0/0" if row["dst"] == "default" else row["dst"]) for row in rows)


def create_link(layout: Layout, network: Network, pause: Path) -> Process:
    """Make a network namespace and join it to the host by a veth pair.

    The caller owns the process from its first moment: it is found by its mark even if this raises.
    """
    holder = spawn(layout, LINK_ROLE, [find_tool("unshare"), "--net", "--", str(pause)])
    _wait_for_program(layout, holder, holder.pid, pause)
    ip, inside = find_tool("ip"), ["nsenter", "--net", "--target", str(holder.pid), find_tool("ip")]
    host, node = (
        f"{address}/{network.link_prefix}" for address in (network.host_address, network.node_address)
    )
    run_tool(
        [ip, "link", "add", layout.link, "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid)]
    )
    run_tool([ip, "address", "add", host, "dev", layout.link])
    run_tool([ip, "link", "set", layout.link, "up"])
    run_tool([*inside, "address", "add", node, "dev", "eth0"])
    run_tool([*inside, "link", "set", "lo", "up"])
    run_tool([*inside, "link", "set", "eth0", "up"])
    # There is no route to anywhere outside, so a pod that tries fails at once instead of timing out. Service addresses
    # count as local: the kernel looks for a route before kube-proxy's rules see a packet, and what no rule takes is
    # refused instead of sent around in circles.
    run_tool(
        [*inside, "route", "add", "local", network.service_cidr, "dev", "lo", "src", network.node_address]
    )
    forward = f"--net=/proc/{holder.pid}/ns/net"
    run_tool(["nsenter", forward, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
    return holder


def has_link(layout: Layout) -> bool:
    """Whether the host's end of the veth pair exists."""
    return Path(f"/sys/class/net/{layout.link}").exists()


def delete_link(layout: Layout) -> None:
    """Delete the veth pair if it outlived its namespace, which the kernel takes down at its leisure."""
    if has_link(layout):
        subprocess.run(
            [find_tool("ip"), "link", "delete", layout.link], check=False, capture_output=True, timeout=30
        )
    deadline = time.monotonic() + 10.0
    while has_link(layout):
        if time.monotonic() > deadline:
            raise StartError(
                f"network link {layout.link} does not go away: delete it with `ip link delete {layout.link}`"
            )
        time.sleep(0.05)


def route_cluster(layout: Layout, network: Network) -> None:
    """Let the host reach pods and services through the node."""
    for cidr in (network.pod_cidr, network.service_cidr):
        run_tool([find_tool("ip"), "route", "replace", cidr, "via", network.node_address, "dev", layout.link])


def create_node(layout: Layout, link: Process, pause: Path) -> Process:
    """Make the node's mount, process and IPC namespaces within the link's network namespace."""
    argv = ["nsenter", "--net", "--target", str(link.pid), find_tool("unshare")]
    argv += [
        "--mount",
        "--ipc",
        "--pid",
        "--fork",
        "--kill-child=SIGKILL",
        "--mount-proc",
        "--propagation",
        "private",
    ]
    holder = spawn(layout, NODE_ROLE, [*argv, "--", str(pause)])
    wait_until("the node's namespaces", lambda: _find_init(layout, holder) is not None,
               layout=layout, watched=[holder], deadline_seconds=10.0)  # fmt: skip
    _wait_for_program(layout, holder, find_init(layout, holder), pause)
    _mount_all(layout, holder)
    return holder


def enter_node(layout: Layout, holder: Process) -> list[str]:
    """The command prefix that runs a program inside the node."""
    target = str(find_init(layout, holder))
    return ["nsenter", "--target", target, "--mount", "--net", "--ipc", "--pid", "--"]


def find_init(layout: Layout, holder: Process) -> int:
    """The host's number of the node's first process.

    Raises:
        StartError: the node has ended.
    """
    found = _find_init(layout, holder)
    if found is None:
        raise StartError(
            "the node's namespaces are gone: run `python -m devcluster up --node` to start it again"
        )
    return found


def _find_init(layout: Layout, holder: Process) -> int | None:
    return next((pid for pid in find_marked(layout) if _fetch_parent(pid) == holder.pid), None)


def _fetch_parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def _wait_for_program(layout: Layout, holder: Process, pid: int, program: Path) -> None:
    """Wait until the holder runs `program`: by then unshare has done its part."""

    def runs() -> bool:
        try:
            return Path(f"/proc/{pid}/exe").samefile(program)
        except OSError:
            return False

    wait_until(f"the {holder.role} namespace", runs, layout=layout, watched=[holder], deadline_seconds=10.0)


def _mount_all(layout: Layout, holder: Process) -> None:
    folders = {target: layout.run / name for target, name in BIND_MOUNTS.items()}
    folders["/var/lib/containerd"] = layout.images / "containerd"
    for source in folders.values():
        source.mkdir(parents=True, exist_ok=True)
    binds = {**folders, **_write_kernel_settings(layout.run / "kernel-settings")}
    lines = [f"mount --bind {shlex.quote(str(source))} {target}" for target, source in binds.items()]
    mounts = Path(f"/proc/{find_init(layout, holder)}/mounts").read_text()
    # A namespace starts with copies of all mounts; copies of those it covers, such as an image build's overlays,
    # would only keep what the host removes alive.
    releases = [f"umount --lazy {shlex.quote(target)}" for target in select_covered_mounts(mounts)]
    script = MOUNT_SCRIPT.format(
        releases="\n".join(releases), targets=" ".join(folders), binds="\n".join(lines)
    )
    run_tool([*enter_node(layout, holder), "sh", "-eu"], stdin=script.encode())


def select_covered_mounts(mounts: str) -> list[str]:
    """Select the mount points of a /proc/mounts text below the node's private folders, deepest first."""
    targets = [
        _ESCAPED.sub(lambda found: chr(int(found[1], 8)), line.split()[1]) for line in mounts.splitlines()
    ]
    return sorted((target for target in targets if find_hidden_dir(Path(target))), key=len, reverse=True)


def _write_kernel_settings(folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"/proc/sys/{name}": folder / name.replace("/", ".") for name in KERNEL_SETTINGS}
    for value, file in zip(KERNEL_SETTINGS.values(), files.values(), strict=True):
        file.write_text(f"{value}\n")
    return files
