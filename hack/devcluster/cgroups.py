"""The one cgroup below which all pods live, in every hierarchy of cgroup v1 or in the unified one of v2."""

import time
from pathlib import Path

from devcluster.errors import StartError

V2_CONTROLLERS = ("cpu", "cpuset", "hugetlb", "io", "memory", "pids")


def parse_hierarchies(mounts: str) -> tuple[tuple[Path, str], ...]:
    """Parse /proc/mounts into (mount point, `cgroup` or `cgroup2`), one row per cgroup hierarchy."""
    rows = (line.split() for line in mounts.splitlines())
    return tuple((Path(row[1]), row[2]) for row in rows if len(row) > 2 and row[2] in {"cgroup", "cgroup2"})


def list_hierarchies() -> tuple[tuple[Path, str], ...]:
    """List this machine's cgroup hierarchies."""
    return parse_hierarchies(Path("/proc/mounts").read_text())


def is_v1() -> bool:
    """Whether controllers live in hierarchies of version 1 (also in a hybrid layout)."""
    return any(kind == "cgroup" for _, kind in list_hierarchies())


def create_cgroups(name: str) -> None:
    """Make the cgroup wherever pods may need it, with every controller the machine has."""
    for root, kind in list_hierarchies():
        if kind == "cgroup2" and is_v1():
            continue  # a hybrid layout's unified hierarchy has no controllers
        folder = root / name
        if kind == "cgroup2":
            _delegate(root)
        folder.mkdir(exist_ok=True)
        if kind == "cgroup2":
            _delegate(folder)
        for file in ("cpuset.cpus", "cpuset.mems"):
            # A new v1 cpuset has no processors, and takes no process until it has some.
            if kind == "cgroup" and (folder / file).exists():
                (folder / file).write_text((root / file).read_text())


def list_cgroups(name: str) -> tuple[Path, ...]:
    """List where the cgroup exists."""
    return tuple(root / name for root, _ in list_hierarchies() if (root / name).is_dir())


def delete_cgroups(name: str) -> None:
    """Remove the cgroup and all below it; its processes have ended.

    Raises:
        StartError: the kernel still counts a process in it after ten seconds.
    """
    deadline = time.monotonic() + 10.0
    while found := list_cgroups(name):
        for folder in found:
            _try_delete(folder)
        if time.monotonic() > deadline and list_cgroups(name):
            raise StartError(f"cgroup {found[0]} is busy: see which processes its cgroup.procs files name")
        time.sleep(0.02)


def _delegate(folder: Path) -> None:
    offered = set((folder / "cgroup.controllers").read_text().split())
    wanted = [f"+{controller}" for controller in V2_CONTROLLERS if controller in offered]
    (folder / "cgroup.subtree_control").write_text(" ".join(wanted))


def _try_delete(folder: Path) -> None:
    for child in sorted((path for path in folder.rglob("*") if path.is_dir()), key=_depth, reverse=True):
        _try_rmdir(child)
    _try_rmdir(folder)


def _try_rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # busy for another moment, or gone
        return


def _depth(path: Path) -> int:
    return len(path.parts)
