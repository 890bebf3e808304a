"""What the API server stores: every field survives, defaults are those of the view, the smallest pool is enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.cluster.crd.conftest import Judge
from tests.cluster.crd.schema import SPEC, walk
from tests.support.kube import Manifest
from tests.support.pools import changed, make_full_pool, make_pool, make_scaled_pool, make_split_pool

from millpond_operator.api import parse_pool
from millpond_operator.api.spec import PoolSpec

pytestmark = pytest.mark.cluster


def find_lost(sent: Any, stored: Any, path: str = "") -> list[str]:
    """Paths of what was sent and is not stored."""
    if isinstance(sent, dict):
        missing = [f"{path}.{key}" for key in sent if not isinstance(stored, dict) or key not in stored]
        kept = [key for key in sent if isinstance(stored, dict) and key in stored]
        return missing + [lost for key in kept for lost in find_lost(sent[key], stored[key], f"{path}.{key}")]
    if isinstance(sent, list):
        if len(sent) != len(stored):
            return [path]
        return [
            lost
            for n, pair in enumerate(zip(sent, stored, strict=True))
            for lost in find_lost(*pair, f"{path}.{n}")
        ]
    return [] if sent == stored else [path]


@pytest.mark.parametrize("make", [make_pool, make_full_pool, make_scaled_pool, make_split_pool])
def test_each_field_is_stored_as_sent(judge: Judge, make: Callable[[], Manifest]) -> None:
    answer = judge.create(make())
    assert answer.accepted, answer.causes
    assert answer.stored is not None
    assert find_lost(make()["spec"], answer.stored["spec"]) == []


@pytest.mark.parametrize("make", [make_pool, make_full_pool, make_scaled_pool, make_split_pool])
def test_the_view_reads_the_stored_object_as_it_reads_the_sent_one(
    judge: Judge, make: Callable[[], Manifest]
) -> None:
    """So defaults of server and view agree also where they nest."""
    stored = judge.create(make()).stored
    assert stored is not None
    stored["metadata"] |= {"uid": "u", "generation": 1}
    sent = make()
    sent["metadata"] |= {"uid": "u", "generation": 1, "namespace": "default"}
    assert parse_pool(stored).spec == parse_pool(sent).spec
    assert isinstance(parse_pool(stored).spec, PoolSpec)


def test_the_full_pools_together_hold_every_field(judge: Judge) -> None:
    """A field nobody sends here would be untested above and in the test of bounds."""
    sent: set[str] = set()
    for make in (make_full_pool, make_scaled_pool, make_split_pool):
        sent |= list_paths(make()["spec"])
    assert list_schema_paths() - sent == set()


def test_a_misspelt_field_is_refused(judge: Judge) -> None:
    answer = judge.create(changed(make_pool(), "spec.engine.maxModelToken", 1))
    assert [cause for cause in answer.causes if "maxModelToken" in cause.message]


def test_free_parts_of_the_template_keep_what_kubernetes_may_add(judge: Judge) -> None:
    odd = {"somethingNew": {"deep": [1, {"x": "y"}]}}
    pool = make_pool(template={"affinity": odd, "tolerations": [odd], "securityContext": odd})
    stored = judge.create(pool).stored
    assert stored is not None
    assert stored["spec"]["template"] == pool["spec"]["template"]


def test_neither_replicas_nor_scaling_leaves_the_count_open(judge: Judge) -> None:
    """A schema default of 1 would make `scaling` impossible to add; the operator reads absence as one replica."""
    stored = judge.create(make_pool()).stored
    assert stored is not None
    assert "replicas" not in stored["spec"]
    assert "scaling" not in stored["spec"]


def list_paths(value: Any, path: str = "spec") -> set[str]:
    if isinstance(value, dict):
        return {path}.union(*(list_paths(inner, f"{path}.{key}") for key, inner in value.items()))
    if isinstance(value, list):
        return {path}.union(*(list_paths(inner, path) for inner in value))
    return {path}


def list_schema_paths() -> set[str]:
    """Paths of the CRD's spec, without those whose schema stands at another place that the full pools send."""
    alike = (
        "spec.disaggregation.prefill.scaling",
        "spec.disaggregation.decode.replicas",
        "spec.model.cache.claimName",
    )
    return {path for path, _ in walk(SPEC) if not path.startswith(alike)}
