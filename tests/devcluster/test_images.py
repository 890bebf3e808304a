"""The sandbox image: what another program must find in it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

from devcluster.images import make_pause_archive


def read_archive(blob: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def test_every_blob_is_what_its_name_says() -> None:
    files = read_archive(make_pause_archive(b"binary", "registry/pause:1"))
    blobs = {name: blob for name, blob in files.items() if name.startswith("blobs/")}
    assert len(blobs) == 3
    assert all(hashlib.sha256(blob).hexdigest() == name.rpartition("/")[2] for name, blob in blobs.items())


def test_the_image_runs_the_binary_as_nobody() -> None:
    files = read_archive(make_pause_archive(b"binary", "registry/pause:1"))
    described = json.loads(files["index.json"])["manifests"][0]
    assert described["annotations"] == {"io.containerd.image.name": "registry/pause:1"}

    def follow(digest: str) -> bytes:
        return files[f"blobs/{digest.replace(':', '/')}"]

    manifest = json.loads(follow(described["digest"]))
    config = json.loads(follow(manifest["config"]["digest"]))
    assert config["config"] == {"Entrypoint": ["/pause"], "User": "65535:65535"}
    layer = follow(manifest["layers"][0]["digest"])
    assert read_archive(layer) == {"pause": b"binary"}
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]


def test_the_same_binary_makes_the_same_image() -> None:
    assert make_pause_archive(b"binary", "n") == make_pause_archive(b"binary", "n")
