"""Compile the cluster's programs from their Go modules into a cache keyed by everything that shapes them."""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from devcluster.errors import BuildError, NoSpaceError
from devcluster.golang import GO_SERIES, find_go, pick_toolchain
from devcluster.lock import hold_lock
from devcluster.paths import SOURCE_DIR, Layout
from devcluster.steps import say, step

GO_DIR = SOURCE_DIR / "go"
KUBERNETES_PROGRAMS = (
    "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet",
)  # fmt: skip
RELEASED = "2026-07-22T18:07:38Z"
# Module and build caches of the first build, and the binaries.
BUILD_SPACE_BYTES = 8 << 30
BUILD_DEADLINE_SECONDS = 45 * 60
PROGRESS_SECONDS = 15.0


@dataclass(frozen=True)
class Module:
    """One Go module under go/ and the names its binary is started under."""

    name: str
    programs: tuple[str, ...]


MODULES = (
    Module("pause", ("pause",)),
    Module("coredns", ("coredns",)),
    Module("kubernetes", KUBERNETES_PROGRAMS),
)


def read_version(module: str, package: str) -> str:
    """Read which version of `package` a module requires."""
    text = (GO_DIR / module / "go.mod").read_text()
    found = re.search(rf"^\s*(?:require\s+)?{re.escape(package)} (v\S+)$", text, re.MULTILINE)
    assert found is not None, f"go/{module}/go.mod does not require {package}"
    return found[1]


def compute_version_key(files: Mapping[str, bytes], machine: str, kubernetes: str) -> str:
    """Compute the cache key of a set of sources: readable version first, then a hash of everything."""
    digest = hashlib.sha256(f"{machine}\0{GO_SERIES}\0{RELEASED}\0".encode())
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return f"{kubernetes}-{digest.hexdigest()[:12]}"


def find_version_key() -> str:
    """The key of this checkout's sources on this machine."""
    sources = [path for module in MODULES for path in sorted((GO_DIR / module.name).iterdir())]
    files = {str(path.relative_to(GO_DIR)): path.read_bytes() for path in sources}
    return compute_version_key(files, platform.machine(), read_version("kubernetes", "k8s.io/kubernetes"))


def find_programs(layout: Layout) -> Path | None:
    """The folder of this checkout's programs if they are built. A half-finished build has no such folder."""
    folder = layout.cache / find_version_key()
    return folder if folder.is_dir() else None


def build(layout: Layout) -> Path:
    """Build what is missing and return the folder of the programs.

    Raises:
        BuildError, LockTimeoutError, MissingToolError, NoSpaceError: with what to do.
    """
    return build_once(
        layout.cache / find_version_key(), _build_all, what="Kubernetes", lock="lock", space=BUILD_SPACE_BYTES
    )


def build_once(target: Path, make: Callable[[str, Path], None], *, what: str, lock: str, space: int) -> Path:
    """Let `make(go, folder)` fill a new folder, once among processes; it gets its name when it is whole.

    Raises:
        BuildError, LockTimeoutError, MissingToolError, NoSpaceError: with what to do.
    """
    cache, prefix = target.parent, f".building-{lock}-"
    with hold_lock(cache / lock, deadline_seconds=BUILD_DEADLINE_SECONDS):
        if target.is_dir():
            return target
        go = find_go(cache)
        check_space(cache, space, f"build {what}")
        for stale in cache.glob(f"{prefix}*"):  # the lock is ours, so whoever made these is gone
            shutil.rmtree(stale)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as scratch:
            made = Path(scratch) / "bin"
            made.mkdir()
            make(go, made)
            made.chmod(0o755)
            made.rename(target)
    return target


def make_go_environ(go: str) -> dict[str, str]:
    """Environment of a build that depends on the pinned modules only."""
    return {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-mod=readonly",
        "GOWORK": "off",
        **pick_toolchain(go),
    }


def check_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse to begin what the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise NoSpaceError(
            f"{free >> 20} MiB free below {folder}, {needed_bytes >> 20} MiB needed to {purpose}:"
            " free some space, or point MILLPOND_CACHE_DIR and MILLPOND_STATE_DIR at a larger disk"
        )


def _build_all(go: str, made: Path) -> None:
    for module in MODULES:
        with step(f"built {module.name} {_describe(module)}"):
            _build_module(go, module, made)


def _describe(module: Module) -> str:
    packages = {"kubernetes": "k8s.io/kubernetes", "coredns": "github.com/coredns/coredns"}
    return read_version(module.name, packages[module.name]) if module.name in packages else ""


def _build_module(go: str, module: Module, made: Path) -> None:
    binary = made / module.name
    argv = [
        go,
        "build",
        "-v",
        "-trimpath",
        "-buildvcs=false",
        f"-ldflags={_linker_flags(module)}",
        "-o",
        str(binary),
        ".",
    ]
    run_go(argv, GO_DIR / module.name, make_go_environ(go), module.name)
    for program in module.programs:
        if program != module.name:
            (made / program).symlink_to(module.name)


def _linker_flags(module: Module) -> str:
    flags = ["-s", "-w"]
    if module.name == "kubernetes":
        version = read_version("kubernetes", "k8s.io/kubernetes")
        major, minor, _ = version[1:].split(".", 2)
        facts = {
            "gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "archive",
            "buildDate": RELEASED,
        }  # fmt: skip
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            flags += [f"-X {package}.{name}={value}" for name, value in facts.items()]
    return " ".join(flags)


def run_go(argv: list[str], folder: Path, environ: Mapping[str, str], name: str) -> None:
    """Run the compiler; it names each package as it gets to it, which is the progress we show."""
    child = subprocess.Popen(
        argv, cwd=folder, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    watchdog = threading.Timer(BUILD_DEADLINE_SECONDS, _end_group, [child])
    watchdog.start()
    try:
        said = _show_progress(child, name)
        status = child.wait()
    finally:
        watchdog.cancel()
        _end_group(child)
        child.wait()
    if status != 0:
        raise BuildError(f"building {name} failed with status {status}: {' | '.join(said) or 'no output'}")


def _end_group(child: "subprocess.Popen[str]") -> None:
    """End the compiler with all it started; its own session makes that one group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _show_progress(child: "subprocess.Popen[str]", name: str) -> list[str]:
    assert child.stderr is not None
    last: list[str] = []
    shown = time.monotonic()
    for num_packages, line in enumerate(child.stderr, start=1):
        last = [*last[-4:], line.strip()]
        if time.monotonic() - shown > PROGRESS_SECONDS:
            say(f"  {name}: {num_packages} packages so far")
            shown = time.monotonic()
    return last
