from __future__ import annotations

import pytest

from millpond_operator.api import ModelSource, SpecError, parse_source


@pytest.mark.parametrize(
    ("uri", "scheme", "location", "path"),
    [
        ("hf://owner/repo", "hf", "owner/repo", ""),
        ("hf://owner/repo/sub/model.gguf", "hf", "owner/repo", "sub/model.gguf"),
        ("pvc://weights", "pvc", "weights", ""),
        ("pvc://weights/llama/8b", "pvc", "weights", "llama/8b"),
        ("s3://bucket/key/x", "s3", "bucket", "key/x"),
        ("oci://ghcr.io/o/m@sha256:ab", "oci", "ghcr.io/o/m@sha256:ab", ""),
        ("https://host:8443/a/b.gguf?x=1", "https", "host:8443", "a/b.gguf?x=1"),
        ("http://host/m.gguf", "http", "host", "m.gguf"),
        ("file:///models/x.gguf", "file", "", "/models/x.gguf"),
    ],
)
def test_splits_each_scheme(uri: str, scheme: str, location: str, path: str) -> None:
    source = parse_source(uri)
    assert (source.uri, source.scheme, source.location, source.path) == (uri, scheme, location, path)


@pytest.mark.parametrize("scheme", ["pvc", "oci", "file"])
def test_what_lies_ready_is_not_fetched(scheme: str) -> None:
    assert not parse_source(f"{scheme}:///x" if scheme == "file" else f"{scheme}://x/y").needs_fetch


@pytest.mark.parametrize("uri", ["hf://a/b", "s3://b/k", "http://h/f", "https://h/f"])
def test_the_rest_is_fetched(uri: str) -> None:
    assert parse_source(uri).needs_fetch


@pytest.mark.parametrize(
    "uri", ["", "owner/repo", "ftp://h/f", "hf://", "hf:/a/b", "hf://owner", "hf://owner/"]
)
def test_an_unusable_source_names_the_field(uri: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_source(uri, "spec.model.adapters[0].source")
    assert caught.value.path == "spec.model.adapters[0].source"
    assert "write" in caught.value.problem


def test_a_source_is_a_value() -> None:
    assert parse_source("hf://a/b") == ModelSource("hf://a/b", "hf", "a/b", "")
