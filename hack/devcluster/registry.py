"""Push local images to the cluster's registry."""

import os
import shutil
import subprocess

from devcluster.errors import MissingToolError, NotRunningError, StartError
from devcluster.process import run_tool
from devcluster.record import Record
from devcluster.render.node import REGISTRY_NAME
from devcluster.steps import step

PUSH_SECONDS = 1200.0


def make_cluster_name(image: str) -> str:
    """Name an image as pods do: the same path and tag below the cluster's registry.

    `localhost/millpond/engine:dev` and `millpond/engine:dev` both become
    `registry.millpond.local:5000/millpond/engine:dev`.
    """
    first, slash, rest = image.partition("/")
    is_host = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    path = rest if is_host else image
    has_tag = ":" in path.rpartition("/")[2]
    return f"{REGISTRY_NAME}/{path}{'' if has_tag else ':latest'}"


def push(record: Record, image: str) -> str:
    """Push a buildah or docker image and return the name under which pods find it.

    Raises:
        MissingToolError: buildah is not installed.
        StartError: there is no such image, or the registry did not take it.
    """
    buildah = shutil.which("buildah")
    if buildah is None:
        raise MissingToolError("buildah is not installed: as root, apt-get install buildah")
    if os.geteuid() != 0:
        raise NotRunningError("push needs root, as the node does")
    if not _has_image([buildah, "inspect", "--type", "image", image]):
        _take_from_docker(buildah, image)
    name = make_cluster_name(image)
    address = f"{record.network.host_address}:{record.ports.registry}"
    target = f"docker://{address}{name.removeprefix(REGISTRY_NAME)}"
    with step(f"pushed {name}"):
        # buildah compresses whatever it pushes (its --disable-compression means something else), so let it do so in
        # the way that costs this machine least; Docker's own manifest format has no zstd.
        fast = ["--format", "oci", "--compression-format", "zstd", "--compression-level", "1"]
        run_tool(
            [buildah, "push", "--quiet", "--tls-verify=false", *fast, image, target],
            deadline_seconds=PUSH_SECONDS,
        )
    return name


def _take_from_docker(buildah: str, image: str) -> None:
    docker = shutil.which("docker")
    if docker is None or not _has_image([docker, "image", "inspect", image]):
        raise StartError(f"no local image {image}: build it first (buildah images lists what is there)")
    run_tool([buildah, "pull", "--quiet", f"docker-daemon:{image}"], deadline_seconds=PUSH_SECONDS)


def _has_image(argv: list[str]) -> bool:
    return (
        subprocess.run(
            argv, capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL
        ).returncode
        == 0
    )
