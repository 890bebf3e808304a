"""Compile the gateway's hot modules with mypyc: `python gateway/compile.py FOLDER [--python INTERPRETER]`.

FOLDER becomes a copy of the package in which each of MODULES has, beside its source, the extension made of it; Python
prefers that. Put first on PYTHONPATH it is the gateway that images ship. Made again only when something changed.
`--python` names the interpreter whose packages tell the types of what the modules import.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import setuptools

PACKAGE = "millpond_gateway"
MODULES = (
    "app/access.py",
    "app/claims.py",
    "app/fleet.py",
    "app/hedges.py",
    "app/judgement.py",
    "app/metrics.py",
    "app/observer.py",
    "app/peer_book.py",
    "app/pool.py",
    "app/price.py",
    "app/prompt.py",
    "app/refusals.py",
    "app/requests.py",
    "app/tenants.py",
    "flow/admission.py",
    "flow/budget.py",
    "flow/demand.py",
    "flow/hedge.py",
    "flow/outliers.py",
    "flow/queue.py",
    "flow/trials.py",
    "proxy/attempts.py",
    "proxy/body.py",
    "proxy/client.py",
    "proxy/connections.py",
    "proxy/engine.py",
    "proxy/exchange.py",
    "proxy/headers.py",
    "proxy/hedged.py",
    "proxy/hedging.py",
    "proxy/http1.py",
    "proxy/phases.py",
    "proxy/relay.py",
    "proxy/reply.py",
    "proxy/retry.py",
    "proxy/sse.py",
    "proxy/summary.py",
    "proxy/usage.py",
    "routing/candidates.py",
    "routing/cost.py",
    "routing/demand.py",
    "routing/index.py",
    "routing/keys.py",
    "routing/load.py",
    "routing/packed.py",
    "routing/partition.py",
    "routing/policies.py",
    "routing/routed.py",
    "routing/router.py",
    "routing/score.py",
    "routing/sessions.py",
    "routing/shared.py",
    "routing/speed.py",
    "routing/splitmix.py",
    "routing/stability.py",
)
"""What a request passes. A module that defines a msgspec.Struct is left out: mypyc loses its options and field types."""

_LAYERS = ("routing", "flow", "proxy", "app")
"""Each one shared library, so that they compile side by side; calls inside one are plain calls of C."""
_HERE = Path(__file__).resolve().parent
_SOURCES = (_HERE / PACKAGE, _HERE.parent / "common" / "millpond_common")
_STAMP = ".compiled-from"
_BUILD = ".build"


def main() -> int:
    """Parse the arguments and compile unless the folder is current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args()
    folder: Path = given.folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a benchmark and a test may want it at once
        make_current(folder, given.python)
    return 0


def make_current(folder: Path, python: str) -> None:
    """Make the folder anew unless it came from what there is now."""
    stamp, digest = folder / _STAMP, compute_digest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_SOURCES[0], folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    compile_modules(folder, python)
    stamp.write_text(digest)


def compute_digest() -> str:
    """Digest of everything that decides the result: sources, this file, compiler and interpreter."""
    digest = hashlib.sha256(f"{sys.version} {platform.machine()} mypy {version('mypy')}".encode())
    files = [Path(__file__), *(path for folder in _SOURCES for path in folder.rglob("*.py"))]
    for path in sorted(files):
        digest.update(str(path.relative_to(_HERE.parent)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def compile_modules(folder: Path, python: str) -> None:
    """Build the extensions inside the copied package."""
    from mypyc.build import mypycify  # noqa: PLC0415 - after setuptools: it looks whether that is there

    os.environ["MYPYPATH"] = f"{folder}{os.pathsep}{_SOURCES[1].parent}"
    os.chdir(folder)
    options = ["--python-executable", python, "--config-file", "", "--cache-dir", f"{_BUILD}/types"]
    options += ["--ignore-missing-imports"]
    paths = [f"{PACKAGE}/{module}" for module in MODULES]
    groups: list[tuple[list[str], str | None]] = [
        ([path for path in paths if Path(path).parent.name == layer], f"gateway_{layer}") for layer in _LAYERS
    ]
    extensions = mypycify(
        [*options, *paths], opt_level="2", debug_level="0", separate=groups, target_dir=_BUILD
    )
    arguments = ["--quiet", "build_ext", "--inplace", "--parallel", str(os.cpu_count() or 1)]
    arguments += ["--build-temp", _BUILD, "--build-lib", _BUILD]
    setuptools.setup(name=PACKAGE, packages=[], py_modules=[], ext_modules=extensions, script_args=arguments)
    shutil.rmtree(folder / _BUILD)


if __name__ == "__main__":
    sys.exit(main())
