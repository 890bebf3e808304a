"""Listing a repository of a Hugging Face hub, or of a mirror that speaks its API (HF_ENDPOINT)."""

from __future__ import annotations

import os
from typing import Any

import httpx

from millpond_engine.fetch.errors import FetchReason, RefusedError
from millpond_engine.fetch.http import check_status, make_reader, translate_errors
from millpond_engine.fetch.sources import Listing, ModelSource, RemoteFile, check_name

DEFAULT_ENDPOINT = "https://huggingface.co"
_WANTED = (".json", ".safetensors", ".jinja", ".model", ".txt")
_BELOW = "additional_chat_templates/tool_use.jinja"
"""What the engine reads below the top level."""
_NEVER = ("pytorch_model.bin.index.json", "tf_model.h5")


def list_hub(client: httpx.Client, source: ModelSource, revision: str) -> Listing:
    """All files of a repository that the engine can use, or the one named by the source.

    Raises:
        RefusedError: no such repository, revision or file, or not allowed.
        UnreachableError: no answer.
    """
    endpoint = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")
    token = os.environ.get("HF_TOKEN", "").strip()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"{endpoint}/api/models/{source.location}/revision/{revision}?blobs=true"
    with translate_errors(url):
        response = client.get(url, headers=headers)
        check_status(response, url)
    answer = response.json()
    commit = str(answer.get("sha") or revision)
    chosen = choose_files([str(entry["rfilename"]) for entry in answer.get("siblings", [])], source.path)
    if not chosen:
        what = (
            f"no file {source.path}"
            if source.path
            else "no safetensors file; name a GGUF file as hf://OWNER/REPO/FILE"
        )
        raise RefusedError(FetchReason.NOT_FOUND, f"{source.uri} at revision {commit} has {what}")
    base = f"{endpoint}/{source.location}/resolve/{commit}"
    files = [
        _remote_file(client, entry, f"{base}/{entry['rfilename']}", headers, single=bool(source.path))
        for entry in answer["siblings"]
        if entry["rfilename"] in chosen
    ]
    return Listing(commit, tuple(files))


def choose_files(names: list[str], path: str) -> set[str]:
    """Files worth fetching: the named one, or weights in safetensors with configuration and tokenizer at the top level."""
    if path:
        return {name for name in names if name == path}
    top = [name for name in names if "/" not in name]
    if not any(name.endswith(".safetensors") for name in top):
        return set()
    return {name for name in names if name == _BELOW} | {
        name for name in top if name.endswith(_WANTED) and name not in _NEVER
    }


def _remote_file(
    client: httpx.Client, entry: dict[str, Any], url: str, headers: dict[str, str], *, single: bool
) -> RemoteFile:
    name = check_name(str(entry["rfilename"]))
    large = entry.get("lfs") or {}
    return RemoteFile(
        name=name.rpartition("/")[2] if single else name,
        size_bytes=large.get("size") or entry.get("size"),
        sha256=large.get("sha256"),
        reader=make_reader(client, url, headers),
    )
