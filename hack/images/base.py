"""Base images from Debian's own packages: a Python runtime and, above it, a C++ compiler,
Python's headers and what images copy of Debian's libraries.

They stand in for the Dockerfiles' default bases where no registry can be reached; both are
ordinary values of the build arguments BASE_IMAGE and BUILD_IMAGE.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from images.errors import MissingToolError, NoSpaceError
from images.run import Step, run

SUITE = "bookworm"
RUNTIME_PACKAGES = ("ca-certificates", "python3", "python3-venv", "tzdata")
BUILD_PACKAGES = ("g++", "libpython3-dev", "libjemalloc2")
RECIPE = "3"
"""Raise when the recipe below changes: images are reused by this number."""
BUILD_RECIPE = "5"
"""The same for what the second image adds."""

RUNTIME_IMAGE = f"localhost/millpond/base-python:{SUITE}-{RECIPE}"
BUILD_IMAGE = f"localhost/millpond/base-build:{SUITE}-{BUILD_RECIPE}"


def ensure_bases() -> tuple[str, str]:
    """Return (runtime, build) base image names, made now if they are missing."""
    if not image_exists(RUNTIME_IMAGE):
        with Step("base image from Debian packages (debootstrap)"):
            _make(RUNTIME_IMAGE, RUNTIME_PACKAGES)
    if not image_exists(BUILD_IMAGE):
        with Step("build image with a C++ compiler"):
            _add_packages(BUILD_IMAGE, RUNTIME_IMAGE, BUILD_PACKAGES)
    return RUNTIME_IMAGE, BUILD_IMAGE


def image_exists(name: str) -> bool:
    """True when buildah's store holds the image."""
    listed = run(["buildah", "images", "--format", "{{.Name}}:{{.Tag}}"], what="buildah images")
    return name in listed.split()


def require_space(path: Path, gib: int) -> None:
    """Refuse early rather than fill the disk.

    Raises:
        NoSpaceError: with what is free and what is needed.
    """
    free = shutil.disk_usage(path).free / 2**30
    if free < gib:
        raise NoSpaceError(
            f"{free:.0f} GiB are free under {path} and this build needs {gib}: free some and run again"
        )


def _make(name: str, packages: tuple[str, ...]) -> None:
    if shutil.which("debootstrap") is None:
        raise MissingToolError("debootstrap is not installed: run apt-get install debootstrap")
    with tempfile.TemporaryDirectory(prefix="millpond-base-") as scratch:
        root = Path(scratch) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", SUITE, str(root)]
        run(command, what="debootstrap")
        _clean(root)
        container = run(
            ["buildah", "from", "--name", f"millpond-base-{Path(scratch).name}", "scratch"],
            what="buildah from",
        )
        try:
            run(["buildah", "copy", "--quiet", container.strip(), str(root), "/"], what="buildah copy")
            path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            run(
                ["buildah", "config", "--env", f"PATH={path}", "--env", "LANG=C.UTF-8", container.strip()],
                what="buildah config",
            )
            run(["buildah", "commit", "--quiet", container.strip(), name], what="buildah commit")
        finally:
            run(["buildah", "rm", container.strip()], what="buildah rm")


def _add_packages(name: str, base: str, packages: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix="millpond-base-") as scratch:
        recipe = Path(scratch) / "Dockerfile"
        install = f"apt-get update -q && apt-get install -qy --no-install-recommends {' '.join(packages)}"
        recipe.write_text(f"FROM {base}\nRUN {install} && rm -rf /var/lib/apt/lists/*\n", encoding="utf-8")
        command = ["buildah", "build", "--isolation", "chroot", "--network", "host", "--file", str(recipe)]
        run([*command, "--tag", name, scratch], what="adding the compiler")


def _clean(root: Path) -> None:
    """Drop package caches and lists: they are a fifth of the image and never used in it."""
    for folder in (
        "var/cache/apt",
        "var/lib/apt/lists",
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
    ):
        shutil.rmtree(root / folder, ignore_errors=True)
    (root / "var/lib/apt/lists").mkdir(parents=True, exist_ok=True)
    for device in (root / "dev").iterdir():
        if device.is_file() or device.is_char_device() or device.is_block_device():
            device.unlink()
