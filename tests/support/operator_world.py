"""One namespace with an operator of this checkout, a fake kubelet and fake gateways, and words to act in it."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kubernetes.client.exceptions import ApiException
from tests.support.fake_gateway import FakeGateway
from tests.support.kube import WAIT_SECONDS, Kube, wait_for
from tests.support.kubelet import Behaviour, FakeKubelet
from tests.support.pools import make_pool
from tests.support.running_operator import RunningOperator, make_settings

from millpond_common.contract import labels

Manifest = dict[str, Any]
POOL_API = ("millpond.dev/v1alpha1", "InferencePool")


class World:
    """Pools of one namespace. Each test takes a pool name of its own."""

    def __init__(self, kubeconfig: Path, *, start_operator: bool = True) -> None:
        self.kubeconfig = kubeconfig
        self.namespace = f"op-{uuid.uuid4().hex[:8]}"
        self.kube = Kube(kubeconfig, self.namespace)
        self.kube.core.create_namespace(
            {"metadata": {"name": self.namespace, "labels": {"millpond.dev/test": "true"}}}
        )
        self.behaviours: dict[str, Callable[[Manifest], Behaviour]] = {}
        self.kubelet = FakeKubelet(self.kube, behave=self._behave)
        self.kubelet.start()
        self.gateway = FakeGateway(self.kubelet)
        self.operators: list[RunningOperator] = []
        if start_operator:
            self.start_operator()

    @property
    def operator(self) -> RunningOperator:
        """The instance that was started last."""
        return self.operators[-1]

    def start_operator(self, *, kubeconfig: Path | None = None, **settings: Any) -> RunningOperator:
        """Start another instance, by another way to the API server if one is given."""
        running = RunningOperator(
            kubeconfig or self.kubeconfig, make_settings(self.namespace, **settings), self.gateway
        )
        self.operators.append(running.start())
        return running

    def close(self) -> None:
        """Stop everything and delete the namespace, the latter whatever the former says."""
        try:
            for running in self.operators:
                running.stop()
        finally:
            self.kubelet.stop()
            for pool in self.kube.list(*POOL_API):
                with _unless_gone():
                    self.patch(pool["metadata"]["name"], {"metadata": {"finalizers": None}})
            with _unless_gone():
                self.kube.core.delete_namespace(self.namespace, grace_period_seconds=0)

    def _behave(self, pod: Manifest) -> Behaviour:
        pool = (pod["metadata"].get("labels") or {}).get(labels.POOL, "")
        return self.behaviours[pool](pod) if pool in self.behaviours else Behaviour()

    # --- act -----------------------------------------------------------------------------------------------------

    def create(self, name: str, **spec: Any) -> Manifest:
        """Create a pool whose pods no real node takes."""
        template = {"nodeSelector": {"millpond.dev/test-node": self.kubelet.node}}
        return self.kube.create(make_pool(name, **{"template": template, **spec}))

    def patch(self, name: str, body: Manifest) -> Manifest:
        """Merge-patch a pool."""
        resource = self.kube.resource(*POOL_API)
        done = resource.patch(
            name=name, namespace=self.namespace, body=body, content_type="application/merge-patch+json"
        )
        return dict(done.to_dict())

    def delete(self, name: str) -> None:
        """Delete a pool."""
        self.kube.delete(*POOL_API, name)

    # --- look ----------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Manifest:
        """A pool."""
        return self.kube.get(*POOL_API, name)

    def exists(self, name: str) -> bool:
        """Whether a pool is there."""
        return self.kube.exists(*POOL_API, name)

    def get_condition(self, name: str, kind: str = "Ready") -> Manifest:
        """A condition, empty values where it is not there yet."""
        return find_condition(self.get(name), kind)

    def list_workloads(self, name: str) -> list[Manifest]:
        """Engine Deployments of a pool."""
        return self.kube.list("apps/v1", "Deployment", label_selector=f"{labels.POOL}={name}")

    def list_pods(self, name: str, *, leaving: bool = False) -> list[Manifest]:
        """Engine pods of a pool."""
        pods = self.kube.list("v1", "Pod", label_selector=f"{labels.POOL}={name}")
        return [pod for pod in pods if leaving or not pod["metadata"].get("deletionTimestamp")]

    def list_events(self, name: str, reason: str | None = None) -> list[Manifest]:
        """Events about a pool."""
        events = self.kube.list("v1", "Event", field_selector=f"involvedObject.name={name}")
        own = [e for e in events if e["involvedObject"]["kind"] == "InferencePool"]
        return [event for event in own if reason is None or event["reason"] == reason]

    def wait_event(self, name: str, reason: str) -> Manifest:
        """Wait for an event with a reason; it is posted after the status. That there is no other is not said."""
        found = wait_for(f"event {reason} of {name}", lambda: self.list_events(name, reason))
        return dict(found[0])

    def fetch_table(self, name: str) -> Manifest:
        """A pool as kubectl shows it."""
        path = f"/apis/millpond.dev/v1alpha1/namespaces/{self.namespace}/inferencepools/{name}"
        accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
        response = self.kube.api_client.call_api(
            *self.kube.api_client.param_serialize(
                "GET", path, header_params=accept, auth_settings=["BearerToken"]
            )
        )
        response.read()
        return dict(json.loads(response.data))

    def count_calls(self) -> Counter[tuple[str, str]]:
        """Calls of the operator to the API server so far, by verb and kind."""
        operator = self.operator.operator
        assert operator is not None
        found: Counter[tuple[str, str]] = Counter()
        for family in operator.metrics.api_requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    found[sample.labels["verb"], sample.labels["kind"]] += int(sample.value)
        return found

    # --- wait ----------------------------------------------------------------------------------------------------

    def look(self, name: str, *, times: int = 1) -> None:
        """Wait until the operator has looked at the pool anew, with everything it writes: then nothing is under way."""
        self.operator.look(name, times=times)

    def wait_ready(self, name: str, *, seconds: float = WAIT_SECONDS) -> Manifest:
        """Wait until the pool is Ready at its current generation; how soon is no matter, unless the test says so.

        What the returned status says was written together. It may be older than a change that is not one of the spec.
        """

        def ready() -> Manifest | None:
            pool = self.get(name)
            for condition in pool.get("status", {}).get("conditions") or []:
                current = condition.get("observedGeneration") == pool["metadata"]["generation"]
                if condition["type"] == "Ready" and condition["status"] == "True" and current:
                    return pool
            return None

        return self._wait(name, f"pool {name} is Ready", ready, seconds)

    def wait_reason(
        self, name: str, reason: str, *, kind: str = "Ready", seconds: float = WAIT_SECONDS
    ) -> Manifest:
        """Wait for the reason of a condition."""
        pool = self.wait_pool(
            name,
            f"{kind} has reason {reason}",
            lambda pool: find_condition(pool, kind)["reason"] == reason,
            seconds=seconds,
        )
        return find_condition(pool, kind)

    def wait_pool(
        self,
        name: str,
        what: str,
        holds: Callable[[Manifest], object],
        *,
        seconds: float = WAIT_SECONDS,
    ) -> Manifest:
        """Wait until the pool is as wanted, and return it as it was then: one status is one write."""

        def there() -> Manifest | None:
            pool = self.get(name)
            return pool if holds(pool) else None

        return dict(self._wait(name, f"pool {name}: {what}", there, seconds))

    def wait_status(self, name: str, what: str, holds: Callable[[Manifest], object]) -> Manifest:
        """As `wait_pool`, by the status alone, which is returned."""
        status = self.wait_pool(name, what, lambda pool: holds(pool.get("status") or {}))["status"]
        return dict(status)

    def wait_pods(
        self, name: str, what: str, holds: Callable[[list[Manifest]], object], *, leaving: bool = False
    ) -> list[Manifest]:
        """Wait until the engine pods are as wanted, and return them as they were then."""

        def there() -> tuple[list[Manifest]] | None:
            pods = self.list_pods(name, leaving=leaving)
            return (pods,) if holds(pods) else None

        (pods,) = self._wait(name, f"pods of {name}: {what}", there, WAIT_SECONDS)
        return list(pods)

    def _wait(self, name: str, what: str, ready: Callable[[], Any], seconds: float) -> Any:
        def see() -> str:
            condition = self.get_condition(name)
            return f"Ready is {condition['status']} {condition['reason']}: {condition['message']}"

        return wait_for(what, ready, seconds=seconds, seen=see)


def find_condition(pool: Manifest, kind: str = "Ready") -> Manifest:
    """A condition of a pool that was read, empty values where it is not there yet."""
    conditions = pool.get("status", {}).get("conditions") or []
    empty = {"status": "", "reason": "", "message": "", "observedGeneration": 0}
    return next((c for c in conditions if c["type"] == kind), empty)


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """What the test, or the namespace's end, has taken away already needs no removal."""
    try:
        yield
    except ApiException as error:
        if error.status != 404:
            raise
