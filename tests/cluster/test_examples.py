"""Every file of examples/ is accepted by the real API server, explains itself and is listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.kube import Kube

from millpond_operator.api import list_roles, parse_pool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))
FOREIGN = {"keda.sh/v1alpha1"}
"""APIs that a cluster has only when somebody installed them."""


def read(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text(encoding="utf-8")) if found]


@pytest.mark.cluster
@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_api_server_takes_the_example(crds: object, kube: Kube, path: Path) -> None:
    for document in read(path):
        if document["apiVersion"] in FOREIGN:
            continue
        stored = kube.apply(document)
        assert stored["metadata"]["namespace"] == kube.namespace
        if document["kind"] == "InferencePool":
            assert list_roles(parse_pool(stored))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_example_says_what_it_is_and_names_no_namespace(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")
    documents = read(path)
    assert [found for found in documents if found["kind"] == "InferencePool"]
    for document in documents:
        assert "namespace" not in document["metadata"]


def test_scalers_target_our_group() -> None:
    targets = [
        (document["spec"]["scaleTargetRef"], read(path))
        for path in FILES
        for document in read(path)
        if "scaleTargetRef" in document.get("spec", {})
    ]
    assert len(targets) == 2
    for target, documents in targets:
        assert target["apiVersion"] == "millpond.dev/v1alpha1"
        (pool,) = [
            found
            for found in documents
            if found["metadata"]["name"] == target["name"] and found["kind"] == target["kind"]
        ]
        assert "replicas" in pool["spec"], "the scale subresource needs a number to start from"
        assert "scaling" not in pool["spec"]


def test_the_quickstart_is_four_lines_of_spec() -> None:
    (pool,) = read(EXAMPLES / "01-quickstart.yaml")
    assert set(pool["spec"]) == {"model", "replicas", "resources"}
    assert pool["spec"]["replicas"] == 2


def test_every_example_is_listed() -> None:
    listed = re.findall(
        r"^\| \[([^\]]+)\]", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert listed == [path.name for path in FILES]
