"""Fetching a whole model into a directory, once for all who share it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import msgspec

from millpond_common.contract.model_facts import FETCHED, LINE_PREFIX, dump_facts
from millpond_engine.fetch.download import Fetched, ProgressCallback, RetrySettings, download
from millpond_engine.fetch.errors import FetchError, FetchReason, LocalError, SourceError, UnreachableError
from millpond_engine.fetch.facts import CONFIG_NAME, estimate_facts, read_facts
from millpond_engine.fetch.http import make_client, make_reader
from millpond_engine.fetch.hub import list_hub
from millpond_engine.fetch.sources import Listing, ModelSource, RemoteFile, file_name_of, parse_source
from millpond_engine.termination import write_termination_message

NOTE_NAME = ".millpond-model.json"
LOCK_NAME = ".millpond-model.lock"
DEFAULT_REVISION = "main"
_LOCK_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """Bounds of one fetch."""

    stall_seconds: float = 60.0
    """Longest silence of a connection."""
    lock_seconds: float = 6 * 3600.0
    """Longest wait for another pod that fetches the same model."""
    retry: RetrySettings = field(default_factory=RetrySettings)


def fetch_model(
    source: str,
    directory: Path,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    settings: FetchSettings | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Fetched, ...]:
    """Bring a model's files into `directory`; nothing is done when they are already there.

    Args:
        source: file://, http(s)://, hf:// or s3://.
        directory: made if absent; may be shared by several pods, of which one downloads.
        revision: of a hub repository; a branch, tag or commit.
        sha256: of the file, for sources that name one.
        settings: bounds.
        say: gets progress lines.

    Raises:
        FetchError: with its reason.
    """
    settings, say = settings or FetchSettings(), say or _say
    parsed = parse_source(source)
    wanted = {"source": source, "revision": revision or DEFAULT_REVISION, "sha256": sha256}
    _make_directory(directory)
    with _lock(directory, settings.lock_seconds, say):
        done = _read_note(directory, wanted)
        if done is not None:
            say(f"{source} is already in {directory}")
            return done
        if parsed.scheme == "file":
            return _link_local(parsed, directory, sha256)
        with make_client(settings.stall_seconds) as client:
            listing = _list_with_retries(client, parsed, revision or DEFAULT_REVISION, settings, say)
            fetched = _download_all(listing, directory, sha256, settings, say)
        _write_note(directory, wanted, listing.revision, fetched)
    say(f"{source} is in {directory}: {len(fetched)} files, {_gib(sum(file.size_bytes for file in fetched))}")
    return fetched


def run_fetch(
    source: str,
    directory: Path,
    *,
    revision: str | None,
    sha256: str | None,
    termination_message: Path | None,
) -> int:
    """The command's body: fetch, and on failure leave one JSON line for the operator. Returns the exit code."""
    try:
        fetched = fetch_model(source, directory, revision=revision, sha256=sha256)
    except FetchError as error:
        _say(f"{error.reason}: {error}")
        write_termination_message(termination_message, str(error.reason), str(error))
        return 1
    _tell_facts(directory / fetched[0].name if len(fetched) == 1 else directory, termination_message)
    return 0


def run_inspect(path: Path, *, termination_message: Path | None) -> int:
    """The body of `inspect`: like a fetch of what is already here. Returns the exit code."""
    if not path.exists():
        text = f"{path}: no such file or directory in the volume"
        _say(f"{FetchReason.LOCAL_FILE}: {text}")
        write_termination_message(termination_message, str(FetchReason.LOCAL_FILE), text)
        return 1
    _tell_facts(path, termination_message)
    return 0


def _tell_facts(place: Path, termination_message: Path | None) -> None:
    """Leave the model's size, if it can be read."""
    facts = read_facts(place)
    if facts is not None:
        write_termination_message(termination_message, FETCHED, str(place), model=msgspec.to_builtins(facts))


def _list(client: httpx.Client, source: ModelSource, revision: str, stall_seconds: float) -> Listing:
    if source.scheme == "hf":
        return list_hub(client, source, revision)
    if source.scheme in ("http", "https"):
        reader = make_reader(client, source.uri)
        return Listing("", (RemoteFile(file_name_of(source.uri), None, None, reader),))
    if source.scheme == "s3":
        from millpond_engine.fetch.bucket import list_bucket  # noqa: PLC0415 - a compiled library, for this scheme only

        return list_bucket(source, stall_seconds)
    message = f"{source.uri} is mounted into the pod, not fetched; {source.scheme}:// needs no fetch command"
    raise SourceError(FetchReason.NOT_SUPPORTED, message)


def _list_with_retries(
    client: httpx.Client,
    source: ModelSource,
    revision: str,
    settings: FetchSettings,
    say: Callable[[str], None],
) -> Listing:
    attempt = 1
    while True:
        try:
            return _list(client, source, revision, settings.stall_seconds)
        except UnreachableError as error:
            attempt += 1
            if attempt > settings.retry.max_attempts:
                raise
            say(f"{error.reason}: {error}; trying again")
            time.sleep(settings.retry.delay(attempt, error.retry_after_seconds, 0.5))


def _download_all(
    listing: Listing, directory: Path, sha256: str | None, settings: FetchSettings, say: Callable[[str], None]
) -> tuple[Fetched, ...]:
    files = listing.files
    if sha256 is not None:
        if len(files) != 1:
            message = f"sha256 is for a source that names one file, this one has {len(files)}"
            raise SourceError(FetchReason.INVALID_SOURCE, message)
        files = (replace(files[0], sha256=sha256),)
    progress = _make_progress(say)
    fetched = []
    # The shape first: with the sizes of the listing it tells what memory the model needs, long before the weights are here.
    for file in sorted(files, key=lambda file: file.name != CONFIG_NAME):
        fetched.append(download(file, directory, retry=settings.retry, progress=progress, say=say))
        facts = (
            estimate_facts(directory, [(f.name, f.size_bytes) for f in files])
            if file.name == CONFIG_NAME
            else None
        )
        if facts is not None:
            say(LINE_PREFIX + dump_facts(facts))
    return tuple(fetched)


def _link_local(source: ModelSource, directory: Path, sha256: str | None) -> tuple[Fetched, ...]:
    """Link to a file or to the files of a directory that is already on this machine."""
    path = Path(source.path)
    if not path.exists():
        raise LocalError(FetchReason.LOCAL_FILE, f"{source.uri}: no such file or directory in this container")
    if sha256 is not None:
        _check_local(source, path, sha256)
    linked = []
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        link = directory / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
        linked.append(Fetched(file.name, file.stat().st_size, ""))
    return tuple(linked)


def _check_local(source: ModelSource, path: Path, sha256: str) -> None:
    if path.is_dir():
        message = f"{source.uri} is a directory and a checksum belongs to one file; name the file"
        raise SourceError(FetchReason.INVALID_SOURCE, message)
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256.lower():
        raise LocalError(
            FetchReason.CHECKSUM_MISMATCH, f"{source.uri}: sha256 is {found}, asked for {sha256}"
        )


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(FetchReason.LOCAL_FILE, f"cannot make {directory}: {error.strerror}") from error


@contextlib.contextmanager
def _lock(directory: Path, wait_seconds: float, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the directory's lock; the kernel drops it when the holder dies, and its part files are taken over."""
    deadline = time.monotonic() + wait_seconds
    told = False
    with (directory / LOCK_NAME).open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another process has been fetching into {directory} for {wait_seconds:g} s; is it stuck?"
                    raise LocalError(FetchReason.LOCK_TIMEOUT, message) from None
            if not told:
                say(f"waiting for another process that fetches into {directory}")
                told = True
            time.sleep(_LOCK_POLL_SECONDS)
        yield


def _read_note(directory: Path, wanted: dict[str, str | None]) -> tuple[Fetched, ...] | None:
    """What an earlier run completed, if it was for the same source and every file still has its size."""
    try:
        note = json.loads((directory / NOTE_NAME).read_text(encoding="utf-8"))
        files = tuple(Fetched(entry["name"], entry["size_bytes"], entry["sha256"]) for entry in note["files"])
        whole = all((directory / file.name).stat().st_size == file.size_bytes for file in files)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return files if whole and note.get("wanted") == wanted else None


def _write_note(
    directory: Path, wanted: dict[str, str | None], revision: str, files: tuple[Fetched, ...]
) -> None:
    entries = [{"name": file.name, "size_bytes": file.size_bytes, "sha256": file.sha256} for file in files]
    part = directory / f"{NOTE_NAME}.{os.getpid()}"
    part.write_text(
        json.dumps({"wanted": wanted, "revision": revision, "files": entries}, indent=1), encoding="utf-8"
    )
    part.rename(directory / NOTE_NAME)


def _make_progress(say: Callable[[str], None], every_seconds: float = 5.0) -> ProgressCallback:
    last, last_bytes, last_name = time.monotonic(), 0, ""

    def progress(name: str, count: int, total: int | None) -> None:
        nonlocal last, last_bytes, last_name
        now = time.monotonic()
        if name != last_name:
            last, last_bytes, last_name = now, count, name
        if now - last < every_seconds and count != total:
            return
        rate = max(0, count - last_bytes) / max(now - last, 1e-3)
        share = f"{100 * count // max(1, total)} %, {_gib(count)} of {_gib(total)}" if total else _gib(count)
        say(f"{name}: {share}, {rate / (1 << 20):.0f} MiB/s")
        last, last_bytes = now, count

    return progress


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def _say(line: str) -> None:
    print(f"fetch: {line}", file=sys.stderr, flush=True)
