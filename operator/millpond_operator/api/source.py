"""Where model files come from: the parts of `model.source`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond_operator.api.errors import SpecError

Scheme = Literal["hf", "pvc", "s3", "oci", "http", "https", "file"]
SCHEMES: tuple[Scheme, ...] = ("hf", "pvc", "s3", "oci", "http", "https", "file")
_HAS_HOST = ("pvc", "s3", "http", "https")


@dataclass(frozen=True)
class ModelSource:
    """A parsed source.

    Attributes:
        uri: the text as the user wrote it.
        scheme: what comes before `://`.
        location: claim, bucket, host, hub repository (OWNER/REPO) or image; empty for `file`.
        path: what follows, without a leading slash except for `file`; may be empty.
    """

    uri: str
    scheme: Scheme
    location: str
    path: str

    @property
    def needs_fetch(self) -> bool:
        """Whether files are copied before the engine starts; a claim, an image and its own files are used in place."""
        return self.scheme in ("hf", "s3", "http", "https")


def parse_source(uri: str, path: str = "spec.model.source") -> ModelSource:
    """Split a source.

    Args:
        uri: the text.
        path: field path for the error.

    Raises:
        SpecError: when the scheme is unknown or nothing follows it.
    """
    scheme, separator, rest = uri.partition("://")
    if scheme not in SCHEMES or not separator or not rest:
        raise SpecError(path, f"{uri!r} is no model source; write one of {', '.join(SCHEMES)} before '://'")
    if scheme == "file":
        return ModelSource(uri, scheme, "", rest)
    if scheme == "oci":
        return ModelSource(uri, scheme, rest, "")
    if scheme in _HAS_HOST:
        location, _, tail = rest.partition("/")
        return ModelSource(uri, scheme, location, tail)
    owner, _, tail = rest.partition("/")
    repository, _, file = tail.partition("/")
    if not repository:
        raise SpecError(path, f"{uri!r} names no repository; write hf://OWNER/REPO or hf://OWNER/REPO/FILE")
    return ModelSource(uri, scheme, f"{owner}/{repository}", file)
