"""Ask the real API server about an object without storing it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException
from tests.fixtures.cluster import Cluster
from tests.support.kube import Kube, Manifest

POOLS = "/apis/millpond.dev/v1alpha1/namespaces/default/inferencepools"


@dataclass(frozen=True)
class Cause:
    """One reason of a refusal: the field the server blames and what it says."""

    field: str
    message: str


@dataclass(frozen=True)
class Answer:
    """What the API server said: the object as it would be stored, or the causes of the refusal."""

    stored: Manifest | None
    causes: tuple[Cause, ...] = ()

    @property
    def accepted(self) -> bool:
        return self.stored is not None


class Judge:
    """Creates objects in a dry run with strict field validation."""

    def __init__(self, kube: Kube) -> None:
        self._dynamic = kube.dynamic
        self._answers: dict[str, Answer] = {}

    def create(self, pool: Manifest) -> Answer:
        """The server's answer; the same object is asked about once."""
        key = json.dumps(pool, sort_keys=True)
        if key not in self._answers:
            self._answers[key] = self._ask(pool)
        return copy.deepcopy(self._answers[key])

    def _ask(self, pool: Manifest) -> Answer:
        query = [("dryRun", "All"), ("fieldValidation", "Strict")]
        try:
            done = self._dynamic.request("POST", POOLS, body=pool, query_params=query, serialize=False)
        except ApiException as error:
            return Answer(None, read_causes(error))
        return Answer(json.loads(done.data))


def read_causes(error: ApiException) -> tuple[Cause, ...]:
    """Causes in the body of a 422, or the message of another refusal as the only one."""
    status: dict[str, Any] = json.loads(error.body)
    causes = status.get("details", {}).get("causes", [])
    if not causes:
        return (Cause("", status["message"]),)
    return tuple(Cause(cause.get("field", ""), cause["message"]) for cause in causes)


@pytest.fixture(scope="session")
def judge(crds: Cluster) -> Judge:
    return Judge(Kube(crds.kubeconfig))
