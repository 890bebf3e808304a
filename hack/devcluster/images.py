"""The sandbox image, made from the pause binary alone, as an OCI archive that containerd imports."""

import hashlib
import io
import json
import platform
import tarfile
from typing import Any

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
OCI = "application/vnd.oci.image"


def make_pause_archive(binary: bytes, name: str) -> bytes:
    """Pack a static binary as a one-file image called `name`."""
    layer = _make_tar({"pause": (binary, 0o755)})
    config = _encode(
        {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _encode(
        {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": _describe(config, f"{OCI}.config.v1+json"),
            "layers": [_describe(layer, f"{OCI}.layer.v1.tar")],
        }
    )
    described = _describe(manifest, f"{OCI}.manifest.v1+json")
    index = {
        "schemaVersion": 2,
        "manifests": [{**described, "annotations": {"io.containerd.image.name": name}}],
    }
    files = {f"blobs/sha256/{_digest(blob)[7:]}": (blob, 0o644) for blob in (layer, config, manifest)}
    files["index.json"] = (_encode(index), 0o644)
    files["oci-layout"] = (_encode({"imageLayoutVersion": "1.0.0"}), 0o644)
    return _make_tar(files)


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _describe(blob: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}


def _make_tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, (blob, mode) in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(blob), mode
            archive.addfile(member, io.BytesIO(blob))
    return packed.getvalue()
