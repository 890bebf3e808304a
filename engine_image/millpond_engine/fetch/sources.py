"""Model sources as text, parsed; and the one shape in which every kind offers its files."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

from millpond_engine.fetch.errors import FetchReason, SourceError

SCHEMES = ("file", "http", "https", "hf", "s3", "oci", "pvc")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A parsed source."""

    uri: str
    scheme: str
    location: str
    """Host, bucket, claim or OWNER/REPO; empty for `file`."""
    path: str
    """What follows; for `file` with its leading slash."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An answer that is being read."""

    offset: int
    """Where its first byte belongs: the wanted offset, or 0 when the other side cannot resume."""
    total_bytes: int | None
    """Of the whole file, when told."""
    etag: str
    """Identity of this content (an entity tag or a date); empty when unknown."""
    chunks: Iterator[bytes]


class Reader(Protocol):
    """Reads one file from an offset on."""

    def __call__(self, offset: int, etag: str) -> AbstractContextManager[Opened]:
        """Open at `offset`, if the content still is `etag`.

        Raises:
            FetchError: see the module errors; while reading, too.
        """
        ...


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file that a source offers."""

    name: str
    """Path below the target directory."""
    size_bytes: int | None
    sha256: str | None
    reader: Reader


@dataclass(frozen=True, slots=True)
class Listing:
    """All files to fetch, at one revision."""

    revision: str
    files: tuple[RemoteFile, ...]


def parse_source(uri: str) -> ModelSource:
    """Split a source.

    Raises:
        SourceError: unknown scheme, or a part is missing.
    """
    scheme, separator, rest = uri.partition("://")
    if scheme not in SCHEMES or not separator or not rest:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise SourceError(
            FetchReason.INVALID_SOURCE, f"{uri!r} is no model source; it must begin with one of {known}"
        )
    if scheme == "file":
        if not rest.startswith("/"):
            raise SourceError(
                FetchReason.INVALID_SOURCE, f"{uri!r} needs an absolute path: file:///models/name"
            )
        return ModelSource(uri, scheme, "", rest)
    if scheme == "hf":
        owner, _, tail = rest.partition("/")
        repository, _, path = tail.partition("/")
        if not owner or not repository:
            message = f"{uri!r} names no repository; write hf://OWNER/REPO or hf://OWNER/REPO/FILE"
            raise SourceError(FetchReason.INVALID_SOURCE, message)
        return ModelSource(uri, scheme, f"{owner}/{repository}", path)
    location, _, path = rest.partition("/")
    return ModelSource(uri, scheme, location, path)


def file_name_of(uri: str) -> str:
    """Last part of the path of a URL.

    Raises:
        SourceError: the URL names no file.
    """
    name = posixpath.basename(unquote(urlsplit(uri).path))
    if name in {"", ".", ".."}:
        raise SourceError(FetchReason.INVALID_SOURCE, f"{uri!r} names no file; the path must end in one")
    return name


def check_name(name: str) -> str:
    """A file name that stays below the target directory.

    Raises:
        SourceError: it would escape, or is absolute.
    """
    parts = name.split("/")
    if not name or name.startswith("/") or any(part in {"", ".", ".."} for part in parts) or "\\" in name:
        raise SourceError(
            FetchReason.INVALID_SOURCE, f"the source offers a file named {name!r}, which is not a safe path"
        )
    return name
