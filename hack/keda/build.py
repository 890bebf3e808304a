"""Compile KEDA into the cluster's cache, keyed by version and sources, as hack/devcluster does with Kubernetes."""

import hashlib
import platform
import re
import shutil
import subprocess
from pathlib import Path

from devcluster.build import build_once, make_go_environ, run_go
from devcluster.errors import BuildError
from devcluster.golang import GO_SERIES
from devcluster.paths import Layout
from devcluster.steps import step

GO_DIR = Path(__file__).resolve().parent / "go"
MODULE = "github.com/kedacore/keda/v2"
PROGRAMS = {"keda-operator": "cmd/operator", "keda-adapter": "cmd/adapter"}
BUILD_SPACE_BYTES = 6 << 30


def read_version() -> str:
    """Which KEDA the module requires."""
    found = re.search(
        rf"^\s*(?:require\s+)?{re.escape(MODULE)} (v\S+)(?: // indirect)?$", _read("go.mod"), re.MULTILINE
    )
    assert found is not None, f"{GO_DIR}/go.mod does not require {MODULE}"
    return found[1]


def find_version_key() -> str:
    """Cache key of this checkout's KEDA on this machine: readable version first, then a hash of everything."""
    sources = "\0".join((platform.machine(), GO_SERIES, _read("go.mod"), _read("go.sum"), *PROGRAMS))
    return f"keda-{read_version()}-{hashlib.sha256(sources.encode()).hexdigest()[:12]}"


def find_programs(layout: Layout) -> Path | None:
    """The folder of the programs and of `config`, KEDA's manifests, if they are built."""
    folder = layout.cache / find_version_key()
    return folder if folder.is_dir() else None


def build(layout: Layout) -> Path:
    """Build what is missing and return its folder.

    Raises:
        BuildError, LockTimeoutError, MissingToolError, NoSpaceError: with what to do.
    """
    target = layout.cache / find_version_key()
    return build_once(target, _build_all, what="KEDA", lock="keda.lock", space=BUILD_SPACE_BYTES)


def _build_all(go: str, made: Path) -> None:
    environ = make_go_environ(go)
    for program, folder in PROGRAMS.items():
        with step(f"built {program} {read_version()}"):
            argv = [
                go,
                "build",
                "-v",
                "-trimpath",
                "-buildvcs=false",
                "-ldflags=-s -w",
                "-o",
                str(made / program),
            ]
            run_go([*argv, f"{MODULE}/{folder}"], GO_DIR, environ, program)
    shutil.copytree(_find_source(go, environ) / "config", made / "config")
    for path in (made / "config").rglob("*"):  # the module cache is read-only
        path.chmod(0o755 if path.is_dir() else 0o644)
    (made / "config").chmod(0o755)


def _find_source(go: str, environ: dict[str, str]) -> Path:
    """Where the compiler has unpacked KEDA's module."""
    argv = [go, "list", "-m", "-f", "{{.Dir}}", MODULE]
    done = subprocess.run(
        argv, cwd=GO_DIR, env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode != 0:
        raise BuildError(f"go list -m {MODULE} failed with status {done.returncode}: {done.stderr.strip()}")
    return Path(done.stdout.strip())


def _read(name: str) -> str:
    return (GO_DIR / name).read_text()
