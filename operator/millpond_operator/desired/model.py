"""Where a pool's model ends up inside the engine's container, and what has to happen before."""

from __future__ import annotations

from dataclasses import dataclass
from posixpath import basename, join
from urllib.parse import unquote, urlsplit

from millpond_operator.api.pool import InferencePool
from millpond_operator.api.source import ModelSource, parse_source
from millpond_operator.desired.manifest import compute_digest

MODELS_PATH = "/models"
WEIGHT_SUFFIXES = (".gguf", ".safetensors")
FILES_PATH = "/model-files"
"""Where a claim or image that is used in place is mounted."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """One run of `millpond-engine fetch`."""

    source: str
    directory: str
    revision: str | None
    sha256: str | None

    def make_args(self) -> list[str]:
        """Arguments of the fetch container."""
        optional = (("--revision", self.revision), ("--sha256", self.sha256))
        extra = [word for flag, value in optional if value for word in (flag, value)]
        return ["fetch", "--source", self.source, "--to", self.directory, *extra]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one source's files are for the engine."""

    path: str
    fetch: Fetch | None = None
    mount: ModelSource | None = None
    """A claim or image to be mounted read-only."""
    mount_path: str = ""


def make_files_digest(pool: InferencePool) -> str:
    """Digest of what decides which files the base model is."""
    model = pool.spec.model
    return compute_digest([model.source, pool.model_revision, model.sha256])


def place_model(pool: InferencePool) -> Placement:
    """Placement of the base model."""
    model = pool.spec.model
    source = parse_source(model.source)
    return _place(source, revision=pool.model_revision, sha256=model.sha256, mount_path=FILES_PATH)


def place_adapters(pool: InferencePool) -> dict[str, Placement]:
    """Placement of each adapter, by name."""
    placements = {}
    for number, adapter in enumerate(pool.spec.model.adapters):
        source = parse_source(adapter.source, f"spec.model.adapters[{number}].source")
        mount_path = f"{FILES_PATH}-{number}"
        placements[adapter.name] = _place(source, revision=None, sha256=adapter.sha256, mount_path=mount_path)
    return placements


def _place(source: ModelSource, *, revision: str | None, sha256: str | None, mount_path: str) -> Placement:
    if source.scheme == "file":
        return Placement(path=source.path)
    if not source.needs_fetch:
        return Placement(path=join(mount_path, source.path).rstrip("/"), mount=source, mount_path=mount_path)
    # The directory is named after what it holds, so that pools sharing a cache share equal models and no others.
    directory = join(MODELS_PATH, compute_digest([source.uri, revision, sha256]))
    path = join(directory, find_file_name(source)) if _is_file(source) else directory
    return Placement(path=path, fetch=Fetch(source.uri, directory, revision, sha256))


def _is_file(source: ModelSource) -> bool:
    """Whether the source names one file: a URL and a path in a hub repository do, a bucket's key by its suffix."""
    if source.scheme == "s3":
        return source.path.endswith(WEIGHT_SUFFIXES)
    return source.scheme in ("http", "https") or bool(source.path)


def find_file_name(source: ModelSource) -> str:
    """Name of the file that a fetch leaves: a URL's query and escapes are not part of it."""
    path = unquote(urlsplit(source.uri).path) if source.scheme in ("http", "https") else source.path
    return basename(path)
