"""Downloading one file: into a part file that survives a restart, with retries, digest and progress."""

from __future__ import annotations

import errno
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from millpond_engine.fetch.errors import ChangedError, FetchError, FetchReason, LocalError, UnreachableError
from millpond_engine.fetch.sources import Opened, RemoteFile

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with (file name, bytes so far, total if known)."""
_HASH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How often and how long to try again; an attempt that brought bytes starts the count anew."""

    max_attempts: int = 6
    base_seconds: float = 1.0
    max_seconds: float = 30.0

    def delay(self, attempt: int, told_seconds: float, jitter: float) -> float:
        """Pause before attempt number `attempt` (2, 3, ..); `jitter` lies in [0, 1)."""
        backoff = min(self.max_seconds, self.base_seconds * 2.0 ** (attempt - 2))
        return max(min(told_seconds, 4 * self.max_seconds), backoff * (0.5 + jitter / 2))


@dataclass(frozen=True, slots=True)
class Fetched:
    """A complete file."""

    name: str
    size_bytes: int
    sha256: str


class _Part:
    """The part file, its running digest, and the identity of the content it belongs to."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(target.name + ".part")
        self._note = target.with_name(target.name + ".part.json")
        self.digest = hashlib.sha256()
        self.size = 0
        self.etag = ""
        if self.path.exists():
            self.etag = self._read_note()
            with self.path.open("rb") as file:
                while chunk := file.read(_HASH_BYTES):
                    self._count(chunk)

    def begin(self, opened: Opened) -> BinaryIO:
        """Open for appending at the answer's offset, starting over when that is 0."""
        if opened.offset != self.size:
            if opened.offset:
                raise UnreachableError(
                    FetchReason.UNREACHABLE, f"asked for byte {self.size}, got {opened.offset}"
                )
            self.restart()
        if opened.etag != self.etag:
            self.etag = opened.etag
            self._note.write_text(json.dumps({"etag": self.etag}), encoding="utf-8")
        return self.path.open("ab")

    def append(self, file: BinaryIO, chunk: bytes) -> None:
        file.write(chunk)
        self._count(chunk)

    def restart(self) -> None:
        """Forget what is there."""
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)
        self.digest, self.size, self.etag = hashlib.sha256(), 0, ""

    def finish(self, target: Path) -> None:
        self.path.rename(target)
        self._note.unlink(missing_ok=True)

    def _count(self, chunk: bytes) -> None:
        self.digest.update(chunk)
        self.size += len(chunk)

    def _read_note(self) -> str:
        try:
            return str(json.loads(self._note.read_text(encoding="utf-8")).get("etag", ""))
        except (OSError, ValueError, AttributeError):
            return ""


def download(
    file: RemoteFile,
    directory: Path,
    *,
    retry: RetrySettings,
    progress: ProgressCallback,
    say: Callable[[str], None] = lambda _line: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Fetched:
    """Bring one file below `directory`, resuming what an earlier run left.

    Raises:
        FetchError: refused, unreachable after every attempt, changed, or no room.
    """
    target = directory / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _Part(target)
    attempt, fresh_start_done = 1, False
    while True:
        before = part.size
        try:
            _read_on(file, part, progress)
            _check_digest(file, part)
        except UnreachableError as error:
            attempt = 2 if part.size > before else attempt + 1
            if attempt > retry.max_attempts:
                raise type(error)(
                    error.reason, f"{error} (gave up after {retry.max_attempts} attempts)"
                ) from error
            say(f"{error.reason}: {error}; trying again from byte {part.size}")
            sleep(retry.delay(attempt, error.retry_after_seconds, random.random()))  # noqa: S311 - jitter
            continue
        except ChangedError:
            resumed, fresh_start_done = before > 0 and not fresh_start_done, True
            part.restart()
            if not resumed:
                raise
            continue  # the part of an earlier run may have belonged to other content: once from the beginning
        part.finish(target)
        return Fetched(file.name, part.size, part.digest.hexdigest())


def _read_on(file: RemoteFile, part: _Part, progress: ProgressCallback) -> None:
    if file.size_bytes is not None and part.size == file.size_bytes and part.size:
        return
    too_long = file.size_bytes is not None and part.size > file.size_bytes
    if too_long or not (
        part.etag or file.sha256
    ):  # nothing would tell whether the rest belongs to what is here
        part.restart()
    try:
        with file.reader(part.size, part.etag) as opened, part.begin(opened) as sink:
            total = opened.total_bytes if file.size_bytes is None else file.size_bytes
            _check_room(part.path.parent, file.name, total, part.size)
            for chunk in opened.chunks:
                part.append(sink, chunk)
                progress(file.name, part.size, total)
    except OSError as error:
        raise _local_error(error, file.name) from error
    if total is not None and part.size != total:
        if part.size > total:
            part.restart()
        raise UnreachableError(FetchReason.UNREACHABLE, f"{file.name} ended at byte {part.size} of {total}")


def _check_room(directory: Path, name: str, total: int | None, have: int) -> None:
    free = shutil.disk_usage(directory).free
    if total is not None and total - have > free:
        message = f"{name} needs {total - have} more bytes and {directory} has {free} free; raise spec.model.cache.sizeLimit"
        raise LocalError(FetchReason.DISK_FULL, message)


def _local_error(error: OSError, name: str) -> FetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LocalError(
            FetchReason.DISK_FULL, f"no room left while writing {name}; raise spec.model.cache.sizeLimit"
        )
    return LocalError(FetchReason.LOCAL_FILE, f"cannot write {name}: {error.strerror or error}")


def _check_digest(file: RemoteFile, part: _Part) -> None:
    found = part.digest.hexdigest()
    if file.sha256 and found != file.sha256:
        message = f"{file.name} has sha256 {found}, expected {file.sha256}: the file was changed or damaged"
        raise ChangedError(FetchReason.CHECKSUM_MISMATCH, message)
