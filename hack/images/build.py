"""Run the Dockerfiles and name the results by what went into them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from images.base import ensure_bases, image_exists, require_space
from images.errors import MissingToolError
from images.run import Step, run

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "localhost/millpond"
CA_BUNDLE = Path("/etc/ssl/certs")


@dataclass(frozen=True, slots=True)
class Image:
    """One program's image: its Dockerfile and the tracked paths that decide its content."""

    name: str
    dockerfile: str
    inputs: tuple[str, ...]
    space_gib: int


IMAGES = {
    image.name: image
    for image in (
        Image("operator", "operator/Dockerfile", ("operator", "common", "requirements/operator.txt"), 4),
        Image(
            "gateway",
            "gateway/Dockerfile",
            ("gateway", "common", "requirements/gateway.txt", "requirements/compile.txt"),
            4,
        ),
        Image(
            "engine",
            "engine_image/Dockerfile",
            ("engine_image", "common", "requirements/engine.txt", "requirements/torch.txt"),
            16,
        ),
    )
}


def compute_tag(image: Image) -> str:
    """Digest over the content of every input file, so an unchanged tree builds nothing."""
    digest = hashlib.sha256((ROOT / image.dockerfile).read_bytes())
    for name in sorted(_files(image)):
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()[:12]


def build(image: Image, *, force: bool = False) -> str:
    """Build unless an image of this content exists; return its full local name."""
    name = f"{PREFIX}/{image.name}:{compute_tag(image)}"
    if docker_runs():
        return _build_with_docker(image, name)
    if shutil.which("buildah") is None:
        raise MissingToolError("neither docker nor buildah is here: run apt-get install buildah")
    if image_exists(name) and not force:
        print(f"{image.name} image is current ({name.rpartition(':')[2]})")
        return name
    require_space(Path("/var/lib"), image.space_gib if not _dependencies_cached(image) else 6)
    runtime, compiler = ensure_bases()
    with Step(f"{image.name} image"):
        run(_buildah_command(image, name, runtime, compiler), what=f"building {image.name}", log=_log(image))
    return name


def docker_runs() -> bool:
    """True when a docker engine answers; a client alone is not enough."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=20).returncode == 0


def _build_with_docker(image: Image, name: str) -> str:
    with Step(f"{image.name} image (docker)"):
        run(
            ["docker", "build", "-f", image.dockerfile, "-t", name, str(ROOT)],
            what=f"building {image.name}",
            log=_log(image),
        )
    return name


def _buildah_command(image: Image, name: str, runtime: str, compiler: str) -> list[str]:
    command = [
        "buildah",
        "build",
        "--isolation",
        "chroot",
        "--network",
        "host",
        "--layers",
        "--format",
        "docker",
    ]
    command += ["--build-arg", f"BASE_IMAGE={runtime}", "--build-arg", f"BUILD_IMAGE={compiler}"]
    for argument in ("PYTORCH_INDEX", "PIP_CERT", "PIP_INDEX_URL"):
        if value := os.environ.get(argument):
            command += ["--build-arg", f"{argument}={value}"]
    # The host's trust store and package cache serve the build steps only; nothing of them stays in a layer.
    command += [
        "--volume",
        f"{CA_BUNDLE}:{CA_BUNDLE}:ro",
        "--volume",
        "/usr/local/share/ca-certificates:/usr/local/share/ca-certificates:ro",
    ]
    cache = Path(os.environ.get("UV_CACHE_DIR", Path.home() / ".cache/uv"))
    cache.mkdir(parents=True, exist_ok=True)
    command += ["--volume", f"{cache}:/var/cache/uv"]
    command += ["--file", str(ROOT / image.dockerfile), "--tag", name, str(ROOT)]
    return command


def _dependencies_cached(image: Image) -> bool:
    listed = run(["buildah", "images", "--format", "{{.Name}}"], what="buildah images")
    return f"{PREFIX}/{image.name}" in listed.split()


def _files(image: Image) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *image.inputs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split("\n") if name and (ROOT / name).is_file()]


def _log(image: Image) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "millpond" / "logs" / f"build-{image.name}.log"
