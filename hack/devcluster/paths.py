"""Where the driver keeps what it builds and what it runs."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent

# Covered inside the node's mount namespace, so that nothing a kubelet or container runtime writes there outlives
# the node; a state or cache folder below them would vanish from the node's sight.
NODE_PRIVATE_DIRS = ("/run", "/var/lib", "/var/log")


@dataclass(frozen=True)
class Layout:
    """The folders of one cluster. Two state folders are two independent clusters."""

    state: Path
    cache: Path

    @property
    def instance(self) -> str:
        """Eight hexadecimal digits that mark this cluster's processes, links and cgroups."""
        return hashlib.sha256(str(self.state).encode()).hexdigest()[:8]

    @property
    def link(self) -> str:
        """Name of the host's end of the veth pair (an interface name has at most 15 characters)."""
        return f"mpd{self.instance}"

    @property
    def cgroup(self) -> str:
        """Name of the cgroup that holds every pod, relative to each hierarchy's root."""
        return f"millpond-{self.instance}"

    @property
    def record(self) -> Path:
        """The record of what runs; absent when nothing does."""
        return self.state / "cluster.json"

    @property
    def lock(self) -> Path:
        """Held by the one command that changes the cluster."""
        return self.state / "lock"

    @property
    def run(self) -> Path:
        """Certificates, configuration and data of the running cluster; forgotten by `down`."""
        return self.state / "run"

    @property
    def pki(self) -> Path:
        """Keys and certificates."""
        return self.run / "pki"

    @property
    def config(self) -> Path:
        """Rendered configuration files."""
        return self.run / "config"

    @property
    def logs(self) -> Path:
        """One log per program; kept by `down` for a look afterwards, replaced by the next `up`."""
        return self.state / "logs"

    @property
    def images(self) -> Path:
        """Pulled and pushed images, kept by `down` so that the next node starts warm."""
        return self.state / "images"

    @property
    def users(self) -> Path:
        """One file per test session that uses the cluster."""
        return self.state / "users"

    @property
    def admin_kubeconfig(self) -> Path:
        """Kubeconfig of a cluster administrator."""
        return self.run / "admin.kubeconfig"


def find_layout(environ: Mapping[str, str], home: Path) -> Layout:
    """Resolve the folders from the environment; a relative path counts from `home`."""
    state = _root(environ, "MILLPOND_STATE_DIR", "XDG_STATE_HOME", home / ".local/state", home)
    cache = _root(environ, "MILLPOND_CACHE_DIR", "XDG_CACHE_HOME", home / ".cache", home)
    return Layout(state=state / "devcluster", cache=cache / "devcluster")


def _root(environ: Mapping[str, str], own: str, xdg: str, default: Path, home: Path) -> Path:
    if environ.get(own):
        return home / environ[own]
    return home / (environ.get(xdg) or default) / "millpond"


def find_hidden_dir(path: Path) -> str | None:
    """Name the node-private directory that would hide `path` inside the node, if any."""
    return next((top for top in NODE_PRIVATE_DIRS if path.is_relative_to(top)), None)
