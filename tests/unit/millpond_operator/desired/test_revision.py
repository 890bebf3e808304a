"""What rolls a pool, and what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.operator_builders import BUILD, get_role, make_pool, make_revision

from millpond_operator.api.pool import list_roles
from millpond_operator.desired.children import make_owner
from millpond_operator.desired.names import make_workload_name
from millpond_operator.desired.revision import compute_revision
from millpond_operator.desired.workload import make_record, make_record_manifest, parse_record

BASE = make_revision(make_pool())
RESOURCES = {"limits": {"cpu": "1", "memory": "1Gi"}}


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 7},
        {"scaling": {"maxReplicas": 9}},
        {"gateway": {"routing": "RoundRobin"}},
        {"rollout": {"strategy": "Surge", "maxUnavailable": 2}},
        {"scheduling": {"pricing": {"inputPerMillion": "1", "outputPerMillion": "2"}}},
        {"engine": {"maxModelTokens": 8192}},
        {"model": {"source": "file:///models/tiny.gguf", "name": "smol"}},
    ],
    ids=["count", "scaling", "routing", "strategy", "prices", "a default written out", "the default name"],
)
def test_numbers_and_defaults_roll_nothing(spec: dict[str, Any]) -> None:
    assert make_revision(make_pool(**spec)) == BASE


def test_what_only_gateways_know_of_a_tenant_rolls_nothing() -> None:
    def revise(**tenant: Any) -> str:
        return make_revision(make_pool(scheduling={"tenants": [{"name": "acme", **tenant}]}))

    assert revise(tokensPerMinute=1000) == revise(apiKeySecretRef={"name": "keys"}) == revise()
    assert revise(weight=3) != revise()


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"source": "file:///models/other.gguf"}},
        {"engine": {"image": "engine:2"}},
        {"engine": {"maxModelTokens": 4096}},
        {"resources": {"limits": {"cpu": "2", "memory": "1Gi"}}},
        {"scheduling": {"maxSequences": 8}},
        {"rollout": {"drainSeconds": 60}},
        {"template": {"nodeSelector": {"a": "b"}}},
    ],
    ids=["model", "image", "tokens", "resources", "scheduling", "drain", "template"],
)
def test_what_shapes_the_pod_rolls(spec: dict[str, Any]) -> None:
    assert make_revision(make_pool(**spec)) != BASE


def test_the_api_keys_of_tenants_roll_nothing() -> None:
    tenant = {"name": "acme", "weight": 3}
    one = make_revision(make_pool(scheduling={"tenants": [tenant]}))
    two = make_revision(make_pool(scheduling={"tenants": [tenant | {"apiKeySecretRef": {"name": "keys"}}]}))
    assert one == two


def test_the_revision_is_the_same_in_every_release() -> None:
    """Golden: another value here would roll every pool of every user on the next operator upgrade."""
    assert BASE == "784e61e4aa"


def test_op_025_each_role_has_a_revision_of_its_own() -> None:
    def split(memory: str) -> list[str]:
        pool = make_pool(
            disaggregation={
                "prefill": {"replicas": 1, "resources": RESOURCES},
                "decode": {"replicas": 1, "resources": {"limits": {"cpu": "1", "memory": memory}}},
            }
        )
        return [compute_revision(pool, role) for role in list_roles(pool)]

    before, after = split("1Gi"), split("2Gi")
    assert before[0] == after[0]
    assert before[1] != after[1]
    assert before[0] != before[1]


def test_a_record_reads_back_as_it_was_made() -> None:
    pool = make_pool(engine={"env": [{"name": "A", "value": "ü"}]})
    record = make_record(pool, get_role(pool), BUILD)
    body = make_record_manifest(make_owner(pool), record).body
    again = parse_record(body, pool="smol", role="both", revision=record.revision)
    assert again == record


def test_op_032_a_record_holds_the_spec_that_made_it() -> None:
    pool = make_pool(engine={"image": "engine:7"}, replicas=3)
    spec = json.loads(make_record(pool, get_role(pool), BUILD).spec_json)["spec"]
    assert spec["engine"] == {"image": "engine:7"}
    assert spec["replicas"] == 3


def test_a_broken_record_is_none() -> None:
    assert parse_record({"data": {"pod-template.json": "{"}}, pool="p", role="both", revision="r") is None
    assert parse_record({}, pool="p", role="both", revision="r") is None


@pytest.mark.parametrize("length", [1, 40, 63])
def test_names_fit_a_label_and_tell_revisions_apart(length: int) -> None:
    pool = "p" * length
    names = {
        make_workload_name(pool, role, rev)
        for role in ("both", "prefill")
        for rev in ("aaaaaaaaaa", "bbbbbbbbbb")
    }
    assert len(names) == 4
    assert all(len(name) <= 63 for name in names)
