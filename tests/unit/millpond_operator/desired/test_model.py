"""Where models end up: fetched, mounted, or already there."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.support.operator_builders import BUILD, get_role, make_pool

from millpond_common.contract.engine_config import parse_engine_config
from millpond_engine.fetch.sources import file_name_of
from millpond_operator.desired.children import list_claims, list_key_secrets, list_secrets
from millpond_operator.desired.model import place_model
from millpond_operator.desired.workload import make_record


def render(**spec: Any) -> Any:
    pool = make_pool(**spec)
    return make_record(pool, get_role(pool), BUILD)


def test_a_repository_is_fetched_into_a_directory_of_its_own() -> None:
    place = place_model(make_pool(model={"source": "hf://owner/repo", "revision": "abc"}))
    assert place.fetch is not None
    assert place.path == place.fetch.directory
    assert place.fetch.make_args() == [
        "fetch",
        "--source",
        "hf://owner/repo",
        "--to",
        place.path,
        "--revision",
        "abc",
    ]


def test_a_single_file_is_the_path_itself() -> None:
    sha = "a" * 64
    place = place_model(make_pool(model={"source": "https://host/dir/tiny.gguf", "sha256": sha}))
    assert place.fetch is not None
    assert place.path == f"{place.fetch.directory}/tiny.gguf"
    assert place.fetch.make_args()[-2:] == ["--sha256", sha]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("https://host/dir/tiny.gguf?X-Signature=a.b/c&e=1", "tiny.gguf"),
        ("https://host/my%20model.gguf#x", "my model.gguf"),
        ("http://host/download/model", "model"),
        ("hf://owner/repo/sub/a.gguf", "a.gguf"),
        ("hf://owner/repo/weights", "weights"),
        ("s3://bucket/models/a.gguf", "a.gguf"),
        ("s3://bucket/models/llama-3.1", None),
        ("hf://owner/repo", None),
    ],
)
def test_the_engine_reads_the_file_that_the_fetch_step_leaves(source: str, name: str | None) -> None:
    """One rule on both sides; a folder of a bucket may have dots in its name."""
    place = place_model(make_pool(model={"source": source}))
    assert place.fetch is not None
    assert place.path == (f"{place.fetch.directory}/{name}" if name else place.fetch.directory)
    if source.startswith("http"):
        assert file_name_of(source) == name


def test_other_revisions_get_other_directories() -> None:
    one, two = (
        place_model(make_pool(model={"source": "hf://owner/repo", "revision": r})).path for r in ("a", "b")
    )
    assert one != two


def test_op_096_a_claim_is_used_where_it_lies() -> None:
    spec = render(model={"source": "pvc://weights/llama"}).template["spec"]
    (look,) = spec["initContainers"]
    assert (look["name"], look["args"]) == ("inspect-model", ["inspect", "--path", "/model-files/llama"])
    assert "/models" not in [mount["mountPath"] for mount in look["volumeMounts"]], "nothing to copy into"
    mounted = [v for v in spec["volumes"] if "persistentVolumeClaim" in v]
    assert [v["persistentVolumeClaim"] for v in mounted] == [{"claimName": "weights", "readOnly": True}]
    assert list_claims(make_pool(model={"source": "pvc://weights/llama"})) == ("weights",)


def test_op_098_a_file_is_looked_for_where_it_was_said_to_be() -> None:
    record = render(model={"source": "file:///models/x"})
    assert yaml.safe_load(record.engine_yaml)["modelPath"] == "/models/x"
    assert "initContainers" not in record.template["spec"]
    assert "/models" not in [m["mountPath"] for m in record.template["spec"]["containers"][0]["volumeMounts"]]


def test_an_image_is_mounted() -> None:
    spec = render(model={"source": "oci://registry.example/models/llama:1"}).template["spec"]
    assert {"reference": "registry.example/models/llama:1"} in [v.get("image") for v in spec["volumes"]]


def test_op_095_a_shared_claim_holds_one_directory_per_model() -> None:
    model = {"source": "hf://owner/repo", "cache": {"type": "Claim", "claimName": "models"}}
    record = render(model=model)
    assert {"claimName": "models"} in [
        v.get("persistentVolumeClaim") for v in record.template["spec"]["volumes"]
    ]
    assert len(record.template["spec"]["initContainers"]) == 1


def test_a_node_directory_is_opened_to_the_engines_user_first() -> None:
    model = {"source": "hf://owner/repo", "cache": {"type": "Node"}}
    inits = render(model=model).template["spec"]["initContainers"]
    assert [container["name"] for container in inits] == ["prepare-cache", "fetch-model"]
    assert inits[0]["securityContext"]["runAsUser"] == 0
    assert inits[1]["securityContext"].get("runAsUser") is None


def test_adapters_are_fetched_after_the_model_and_told_to_the_engine() -> None:
    model = {"source": "hf://owner/repo", "adapters": [{"name": "sql", "source": "hf://owner/sql"}]}
    record = render(model=model)
    inits = record.template["spec"]["initContainers"]
    assert [container["name"] for container in inits] == ["fetch-model", "fetch-adapter-0"]
    config = parse_engine_config(yaml.safe_load(record.engine_yaml))
    assert config.adapters[0].name == "sql"
    assert config.adapters[0].path in inits[1]["args"]


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ({"model": {"source": "hf://o/r", "secretRef": {"name": "hf"}}}, ("hf",)),
        (
            {"engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
            ("s",),
        ),
        (
            {
                "engine": {
                    "env": [
                        {
                            "name": "A",
                            "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}},
                        }
                    ]
                }
            },
            (),
        ),
        ({}, ()),
    ],
)
def test_op_004_the_secrets_a_pod_cannot_start_without(spec: dict[str, Any], names: tuple[str, ...]) -> None:
    assert list_secrets(make_pool(**spec)) == names


def test_secrets_of_keys_are_listed_once_and_only_where_a_gateway_reads_them() -> None:
    tenants = [{"name": f"t{number}", "apiKeySecretRef": {"name": name}} for number, name in enumerate("abb")]
    spec = {"scheduling": {"tenants": [*tenants, {"name": "keyless"}]}}
    assert list_key_secrets(make_pool(**spec)) == ("a", "b")
    assert list_key_secrets(make_pool(**spec, gateway={"enabled": False})) == ()
