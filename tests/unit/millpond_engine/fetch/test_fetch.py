"""Fetching models from loopback servers that break off, stall, refuse and change their minds."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.millpond_engine.fetch.server import FileServer

from millpond_engine.fetch import FetchError, FetchReason, FetchSettings, fetch_model, run_fetch
from millpond_engine.fetch.download import RetrySettings
from millpond_engine.fetch.hub import choose_files

CONTENT = os.urandom(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FAST = FetchSettings(
    stall_seconds=0.5, lock_seconds=5, retry=RetrySettings(max_attempts=3, base_seconds=0.01)
)


@pytest.fixture
def server() -> Iterator[FileServer]:
    server = FileServer()
    server.files["/m/model.gguf"] = CONTENT
    yield server
    server.close()


def _fetch(source: str, directory: Path, **options: Any) -> Any:
    return fetch_model(source, directory, settings=FAST, say=lambda _: None, **options)


def _reason(source: str, directory: Path, **options: Any) -> FetchReason:
    with pytest.raises(FetchError) as caught:
        _fetch(source, directory, **options)
    return caught.value.reason


def test_a_file_arrives_whole_and_is_not_fetched_again(server: FileServer, tmp_path: Path) -> None:
    for _ in range(2):
        fetched = _fetch(f"{server.url}/m/model.gguf", tmp_path, sha256=SHA256)
        assert [(file.name, file.sha256) for file in fetched] == [("model.gguf", SHA256)]
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert server.paths() == ["/m/model.gguf"]
    assert not list(tmp_path.glob("*.part*"))


def test_a_broken_connection_resumes_where_it_ended(server: FileServer, tmp_path: Path) -> None:
    server.faults.cut_after = [100_000, 150_000]
    _fetch(f"{server.url}/m/model.gguf", tmp_path, sha256=SHA256)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    ranges = [headers.get("Range") for _, headers in server.requests]
    assert ranges == [None, "bytes=100000-", "bytes=250000-"]


def test_a_new_process_resumes_what_the_old_one_left(server: FileServer, tmp_path: Path) -> None:
    server.faults.cut_after = [100_000]
    server.faults.statuses = []
    one_try = FetchSettings(retry=RetrySettings(max_attempts=1))
    with pytest.raises(FetchError):
        fetch_model(f"{server.url}/m/model.gguf", tmp_path, settings=one_try, say=lambda _: None)
    _fetch(f"{server.url}/m/model.gguf", tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert server.requests[-1][1]["Range"] == "bytes=100000-"


def test_a_file_that_changed_meanwhile_is_not_spliced(server: FileServer, tmp_path: Path) -> None:
    server.faults.cut_after = [100_000]
    with pytest.raises(FetchError):
        fetch_model(
            f"{server.url}/m/model.gguf",
            tmp_path,
            settings=FetchSettings(retry=RetrySettings(max_attempts=1)),
            say=lambda _: None,
        )
    server.files["/m/model.gguf"] = other = os.urandom(250_000)
    _fetch(f"{server.url}/m/model.gguf", tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == other


@pytest.mark.parametrize("fault", ["no_ranges", "no_validator"])
def test_a_server_that_cannot_resume_safely_is_read_from_the_beginning(
    server: FileServer, tmp_path: Path, fault: str
) -> None:
    setattr(server.faults, fault, True)
    server.faults.cut_after = [100_000]
    _fetch(f"{server.url}/m/model.gguf", tmp_path)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    if fault == "no_validator":
        assert "Range" not in server.requests[-1][1]


def test_op_094_a_stalled_connection_is_given_up_and_resumed(server: FileServer, tmp_path: Path) -> None:
    server.faults.stall_after = [100_000]
    said: list[str] = []
    fetch_model(f"{server.url}/m/model.gguf", tmp_path, settings=FAST, say=said.append)
    assert [line for line in said if line.startswith("Stalled: ") and "again from byte 100000" in line]
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert server.requests[-1][1]["Range"] == "bytes=100000-"


def test_a_server_that_always_stalls_is_named_stalled(server: FileServer, tmp_path: Path) -> None:
    server.faults.stall_after = [0, 0, 0, 0]
    assert _reason(f"{server.url}/m/model.gguf", tmp_path) is FetchReason.STALLED


def test_passing_failures_are_tried_again(server: FileServer, tmp_path: Path) -> None:
    server.faults.statuses = [(503, {"Retry-After": "0"}), (429, {})]
    _fetch(f"{server.url}/m/model.gguf", tmp_path)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("status", "reason", "requests"),
    [
        (401, "Unauthorized", 1),
        (403, "Unauthorized", 1),
        (404, "NotFound", 1),
        (400, "Refused", 1),
        (500, "Unreachable", 3),
    ],
)
def test_lasting_failures_have_a_reason(
    server: FileServer, tmp_path: Path, status: int, reason: str, requests: int
) -> None:
    server.faults.statuses = [(status, {})] * 4
    assert _reason(f"{server.url}/m/model.gguf", tmp_path) == reason
    assert len(server.requests) == requests


def test_a_wrong_digest_is_an_error_and_leaves_nothing(server: FileServer, tmp_path: Path) -> None:
    assert _reason(f"{server.url}/m/model.gguf", tmp_path, sha256="0" * 64) is FetchReason.CHECKSUM_MISMATCH
    assert [path.name for path in tmp_path.iterdir()] == [".millpond-model.lock"]


def test_a_spoilt_part_is_fetched_once_more_from_the_beginning(server: FileServer, tmp_path: Path) -> None:
    (tmp_path / "model.gguf.part").write_bytes(b"x" * 5000)
    _fetch(f"{server.url}/m/model.gguf", tmp_path, sha256=SHA256)
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT


def test_nobody_listening_is_unreachable(tmp_path: Path) -> None:
    assert _reason("http://127.0.0.1:9/model.gguf", tmp_path) is FetchReason.UNREACHABLE


def test_a_full_disk_is_told_before_writing(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert _reason(f"{server.url}/m/model.gguf", tmp_path) is FetchReason.DISK_FULL


def test_a_disk_that_fills_while_writing_is_told(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from millpond_engine.fetch import download

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download._Part, "append", full)
    assert _reason(f"{server.url}/m/model.gguf", tmp_path) is FetchReason.DISK_FULL


def test_a_hub_repository_brings_weights_configuration_and_tokenizer(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "config.json": b"{}",
        "model-1.safetensors": b"a" * 1000,
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"no",
        "onnx/model.onnx": b"no",
        "README.md": b"no",
    }
    server.add_hub_repository("owner/repo", "c0ffee", files)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    _fetch("hf://owner/repo", tmp_path)
    found = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert found == {"config.json", "model-1.safetensors", "tokenizer.json"}
    assert all(headers["Authorization"] == "Bearer secret" for _, headers in server.requests)
    assert json.loads((tmp_path / ".millpond-model.json").read_text())["revision"] == "c0ffee"


def test_the_token_does_not_follow_a_redirect(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = FileServer()
    files = {"m.gguf": CONTENT, "model.safetensors": b"x"}
    other.add_hub_repository("owner/repo", "c0ffee", files)
    server.add_hub_repository("owner/repo", "c0ffee", files)
    server.faults.redirect_to = other.url.replace("127.0.0.1", "localhost")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    _fetch("hf://owner/repo/m.gguf", tmp_path)
    assert (tmp_path / "m.gguf").read_bytes() == CONTENT
    assert other.requests
    assert all("Authorization" not in headers for _, headers in other.requests)
    other.close()


def test_a_damaged_large_file_of_the_hub_is_noticed(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_hub_repository("owner/repo", "c0ffee", {"model.safetensors": b"a" * 1000})
    server.files["/owner/repo/resolve/c0ffee/model.safetensors"] = b"b" * 1000
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    assert _reason("hf://owner/repo", tmp_path) is FetchReason.CHECKSUM_MISMATCH


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("ftp://host/x", "InvalidSource"),
        ("hf://onlyowner", "InvalidSource"),
        ("http://127.0.0.1:9/", "InvalidSource"),
        ("file://relative", "InvalidSource"),
        ("oci://registry/model:1", "NotSupported"),
        ("pvc://claim/model", "NotSupported"),
        ("file:///no/such/model", "LocalFile"),
    ],
)
def test_sources_that_cannot_be_used_say_why(tmp_path: Path, source: str, reason: str) -> None:
    assert _reason(source, tmp_path) == reason


def test_a_hub_that_offers_a_path_outside_the_directory_is_refused(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add_hub_repository("owner/repo", "c0ffee", {"../evil.json": b"{}"})
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    assert _reason("hf://owner/repo/../evil.json", tmp_path / "models") is FetchReason.INVALID_SOURCE


def test_a_local_directory_is_linked(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model.gguf").write_bytes(CONTENT)
    _fetch(f"file://{tmp_path}/here", tmp_path / "there")
    assert (tmp_path / "there" / "model.gguf").read_bytes() == CONTENT


def test_several_processes_download_once(server: FileServer, tmp_path: Path) -> None:
    threads = [
        threading.Thread(
            target=_fetch, args=(f"{server.url}/m/model.gguf", tmp_path), kwargs={"sha256": SHA256}
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert server.paths() == ["/m/model.gguf"]


def test_waiting_for_another_process_is_bounded(server: FileServer, tmp_path: Path) -> None:
    with (tmp_path / ".millpond-model.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        settings = FetchSettings(lock_seconds=0.1)
        with pytest.raises(FetchError) as caught:
            fetch_model(f"{server.url}/m/model.gguf", tmp_path, settings=settings, say=lambda _: None)
    assert caught.value.reason is FetchReason.LOCK_TIMEOUT


def test_a_failure_leaves_one_json_line_for_the_operator(server: FileServer, tmp_path: Path) -> None:
    message = tmp_path / "termination-log"
    code = run_fetch(
        f"{server.url}/m/none.gguf?signature=secret",
        tmp_path / "models",
        revision=None,
        sha256=None,
        termination_message=message,
    )
    assert code == 1
    assert message.read_text().count("\n") == 1
    told = json.loads(message.read_text())
    assert told["reason"] == "NotFound"
    assert "none.gguf" in told["message"]
    assert "secret" not in told["message"]


def test_fetching_loads_neither_torch_nor_the_s3_library() -> None:
    code = "import millpond_engine.fetch, sys; print([m for m in ('torch', 'obstore') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_object_of_a_bucket_arrives_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = BucketServer()
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    bucket.files = {"/models/smol/config.json": b"{}", "/models/smol/model.safetensors": CONTENT}
    (tmp_path / "model.safetensors.part").write_bytes(CONTENT[:1000])
    etag = f'"{hashlib.md5(CONTENT).hexdigest()}"'
    (tmp_path / "model.safetensors.part.json").write_text(json.dumps({"etag": etag}))
    fetched = _fetch("s3://models/smol", tmp_path)
    bucket.close()
    assert sorted(file.name for file in fetched) == ["config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT
    assert any(headers.get("range") == "bytes=1000-" for _, headers in bucket.requests)


def test_an_empty_bucket_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = BucketServer()
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    assert _reason("s3://models/none", tmp_path) is FetchReason.NOT_FOUND
    bucket.close()


class BucketServer(FileServer):
    """Enough of S3's REST interface for listing, heads and ranged reads."""

    def answer(self, request: Any) -> None:
        request.do_HEAD = request.do_GET
        if "list-type" not in request.path:
            super().answer(request)
            return
        prefix = f"/{request.path.partition('/')[2].partition('?')[0].rstrip('/')}"
        contents = "".join(
            f"<Contents><Key>{path.removeprefix(prefix).lstrip('/')}</Key><Size>{len(content)}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for path, content in self.files.items()
        )
        body = f"<ListBucketResult><Name>models</Name><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        self._send(request, 200, body.encode(), {"Content-Type": "application/xml"})


def test_a_file_of_this_machine_is_held_to_its_checksum(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    source = f"file://{model}"
    with pytest.raises(FetchError, match="sha256 is"):
        fetch_model(source, tmp_path / "out", sha256="0" * 64)
    with pytest.raises(FetchError, match="name the file"):
        fetch_model(f"file://{tmp_path}", tmp_path / "out", sha256="0" * 64)
    digest = hashlib.sha256(b"weights").hexdigest()
    assert fetch_model(source, tmp_path / "out", sha256=digest)[0].name == "m.gguf"


def test_of_a_repository_only_what_the_engine_reads_is_chosen() -> None:
    read = ["config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"]
    left = [
        "README.md",
        "original/consolidated.00.pth",
        "additional_chat_templates/rag.jinja",
        "onnx/model.json",
    ]
    assert choose_files([*read, *left], "") == set(read)
    assert choose_files([*read, *left], "config.json") == {"config.json"}
    assert choose_files(left, "") == set()
