"""Listing and reading an S3 bucket through obstore; credentials and endpoint come from the usual AWS variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store

from millpond_engine.fetch.errors import FetchReason, RefusedError, UnreachableError
from millpond_engine.fetch.sources import Listing, ModelSource, Opened, Reader, RemoteFile, check_name

CHUNK_BYTES = 4 << 20
MAX_FILES = 10_000


def list_bucket(source: ModelSource, stall_seconds: float) -> Listing:
    """Every object under the source's prefix, or the one object it names.

    Raises:
        RefusedError: nothing there, or not allowed.
        UnreachableError: no answer.
    """
    store = _make_store(source.location, stall_seconds)
    prefix = source.path.strip("/")
    with _translate(source.uri):
        pages = obstore.list(store, prefix or None, chunk_size=1000)
        entries = [entry for page in pages for entry in page][: MAX_FILES + 1]
    if len(entries) > MAX_FILES:
        raise RefusedError(
            FetchReason.REFUSED,
            f"{source.uri} holds more than {MAX_FILES} objects; name the model's own prefix",
        )
    if not entries:
        return Listing("", (_single_object(store, source, prefix),))
    files = [
        RemoteFile(
            check_name(_below(str(entry["path"]), prefix)),
            int(entry["size"]),
            None,
            _reader(store, str(entry["path"]), source.uri),
        )
        for entry in entries
        if not str(entry["path"]).endswith("/")
    ]
    return Listing("", tuple(files))


def _single_object(store: S3Store, source: ModelSource, key: str) -> RemoteFile:
    with _translate(source.uri):
        entry = obstore.head(store, key)
    return RemoteFile(
        check_name(key.rpartition("/")[2]), int(entry["size"]), None, _reader(store, key, source.uri)
    )


def _make_store(bucket: str, stall_seconds: float) -> S3Store:
    client: Any = {
        "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
        "timeout": timedelta(hours=12),
        "connect_timeout": timedelta(seconds=stall_seconds),
    }
    anonymous = not (os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"))
    return S3Store(
        bucket,
        skip_signature=anonymous,
        client_options=client,
        retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=stall_seconds)},
    )


def _below(key: str, prefix: str) -> str:
    return (
        key.removeprefix(prefix).lstrip("/")
        if prefix and key != prefix
        else key.rpartition("/")[2]
        if prefix
        else key
    )


def _reader(store: S3Store, key: str, uri: str) -> Reader:
    @contextmanager
    def read(offset: int, etag: str) -> Iterator[Opened]:
        options: Any = {"range": {"offset": offset}} if offset else {}
        if offset and etag:
            options["if_match"] = etag
        with _translate(uri):
            answer = obstore.get(store, key, options=options)
        yield Opened(
            offset=answer.range[0],
            total_bytes=int(answer.meta["size"]),
            etag=str(answer.meta["e_tag"] or ""),
            chunks=_chunks(answer, uri),
        )

    return read


def _chunks(answer: obstore.GetResult, uri: str) -> Iterator[bytes]:
    with _translate(uri):
        for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
            yield bytes(chunk)


@contextmanager
def _translate(uri: str) -> Iterator[None]:
    try:
        yield
    except (NotFoundError, FileNotFoundError) as error:
        raise RefusedError(FetchReason.NOT_FOUND, f"{uri}: no such bucket or object") from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        message = (
            f"{uri}: access denied; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in spec.model.secretRef"
        )
        raise RefusedError(FetchReason.UNAUTHORIZED, message) from error
    except (BaseError, OSError) as error:
        raise UnreachableError(FetchReason.UNREACHABLE, f"{uri}: {type(error).__name__}") from error
