"""Programs the cluster takes from the system, installed from Debian when that is possible."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import MissingToolError, NotRootError
from devcluster.steps import say, step

CNI_DIRS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
CNI_PLUGINS = ("host-local", "loopback", "ptp")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\n# No service starts while the development cluster's packages install.\nexit 101\n"
APT_SECONDS = 900.0


@dataclass(frozen=True)
class Tool:
    """A program (or `cni`, the plugin folder) and the Debian package that brings it."""

    program: str
    package: str
    unit: str | None = None


CONTROL_PLANE_TOOLS = (Tool("openssl", "openssl"), Tool("etcd", "etcd-server", "etcd.service"))
LINK_TOOLS = (Tool("ip", "iproute2"), Tool("unshare", "util-linux"), Tool("nsenter", "util-linux"))
NODE_TOOLS = (
    Tool("containerd", "containerd", "containerd.service"),
    Tool("ctr", "containerd", "containerd.service"),
    Tool("runc", "runc"),
    Tool("cni", "containernetworking-plugins"),
    Tool("docker-registry", "docker-registry", "docker-registry.service"),
    Tool("iptables", "iptables"),
    Tool("buildah", "buildah"),
    Tool("debootstrap", "debootstrap"),
)


def find_tool(program: str) -> str:
    """Find a program, also in the system folders that a user's PATH may lack.

    Raises:
        MissingToolError: it is not installed.
    """
    found = _find(program)
    if found is None:
        raise MissingToolError(
            f"{program} is not installed: run `python -m devcluster up --node` as root to install it"
        )
    return found


def find_cni_dir() -> Path | None:
    """Find the folder with the CNI plugins."""
    return next(
        (folder for folder in CNI_DIRS if all((folder / name).exists() for name in CNI_PLUGINS)), None
    )


def find_missing(tools: Sequence[Tool], find: Callable[[str], object]) -> tuple[Tool, ...]:
    """Pick the tools that `find` does not find."""
    return tuple(tool for tool in tools if find(tool.program) is None)


def select_tools(*, is_root: bool, node: bool) -> tuple[Tool, ...]:
    """Say what is needed: a user without root gets the control plane on loopback only."""
    return CONTROL_PLANE_TOOLS + (LINK_TOOLS if is_root else ()) + (NODE_TOOLS if node else ())


def ensure_tools(*, node: bool) -> None:
    """Install what is missing, or say how to.

    Raises:
        MissingToolError: with the command to run.
        NotRootError: a node needs root.
    """
    is_root = os.geteuid() == 0
    if node and not is_root:
        raise NotRootError(
            "a node needs root (namespaces, mounts): run it as root, or set MILLPOND_KUBECONFIG"
        )
    missing = find_missing(select_tools(is_root=is_root, node=node), _find)
    if not missing:
        return
    packages = sorted({tool.package for tool in missing})
    names = ", ".join(tool.program for tool in missing)
    apt = shutil.which("apt-get", path=SYSTEM_PATH)
    if apt is None or not is_root:
        how = (
            f"apt-get install {' '.join(packages)}"
            if apt
            else f"install your system's counterparts of {packages}"
        )
        raise MissingToolError(f"not installed: {names}; as root, {how}")
    with step(f"installed {' '.join(packages)}"):
        _install(apt, packages, {tool.unit for tool in missing if tool.unit})
    still = find_missing(missing, _find)
    if still:
        raise MissingToolError(
            f"still missing after installing {packages}: {', '.join(tool.program for tool in still)}"
        )


def _find(program: str) -> str | None:
    if program == "cni":
        folder = find_cni_dir()
        return str(folder) if folder else None
    return shutil.which(program) or shutil.which(program, path=SYSTEM_PATH)


def _install(apt: str, packages: Sequence[str], units: set[str]) -> None:
    say(f"installing {' '.join(packages)}")
    install = [
        apt,
        "-qq",
        "-o",
        "DPkg::Lock::Timeout=300",
        "install",
        "-y",
        "--no-install-recommends",
        *packages,
    ]
    with _no_service_starts():
        if _run_apt(install).returncode != 0:
            _run_apt([apt, "-qq", "update"])
            second = _run_apt(install)
            if second.returncode != 0:
                said = (second.stderr or second.stdout).strip().splitlines() or ["no output"]
                raise MissingToolError(f"apt-get could not install {' '.join(packages)}: {said[-1]}")
    if Path("/run/systemd/system").is_dir() and units:
        # We run our own; the packages' services would otherwise start with the next boot.
        subprocess.run(["systemctl", "disable", "--quiet", *sorted(units)], check=False, timeout=60)


def _run_apt(argv: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": SYSTEM_PATH}
    try:
        return subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=APT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingToolError(
            f"apt-get took longer than {APT_SECONDS:.0f} s: check the package mirror"
        ) from error


@contextmanager
def _no_service_starts() -> Iterator[None]:
    """Debian's own switch: a policy that forbids package scripts to start services."""
    if POLICY.exists():
        yield
        return
    POLICY.write_text(POLICY_TEXT)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
