"""Children a pool has once, whatever its revisions: account, Service, disruption budget, network policy, claim."""

from __future__ import annotations

from typing import Any

from millpond_common.contract import labels, ports
from millpond_operator.api.pool import InferencePool
from millpond_operator.desired import names
from millpond_operator.desired.kinds import (
    BUDGET,
    CLAIM,
    NETWORK_POLICY,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from millpond_operator.desired.manifest import Manifest, Owner, make_manifest
from millpond_operator.desired.model import place_adapters, place_model
from millpond_operator.desired.settings import BuildSettings

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def make_owner(pool: InferencePool) -> Owner:
    """The pool as owner of its children."""
    return Owner(pool.metadata.namespace, pool.metadata.name, pool.metadata.uid)


def make_children(pool: InferencePool, settings: BuildSettings) -> list[Manifest]:
    """All children that exist once per pool."""
    made = [make_account(pool), make_service(pool), make_budget(pool)]
    if settings.network_policies:
        made.append(make_network_policy(pool, settings))
    if needs_own_claim(pool):
        made.append(make_claim(pool))
    return made


def _make(pool: InferencePool, kind: Kind, name: str, content: dict[str, Any]) -> Manifest:
    owner = make_owner(pool)
    return make_manifest(
        kind,
        owner.namespace,
        name,
        own_labels=names.make_pool_labels(owner.name),
        owners=[owner.make_reference(controller=True)],
        content=content,
    )


def make_account(pool: InferencePool) -> Manifest:
    """The engines' service account: without permissions, its token never mounted."""
    name = names.make_account_name(pool.metadata.name)
    return _make(pool, SERVICE_ACCOUNT, name, {"automountServiceAccountToken": False})


def make_service(pool: InferencePool) -> Manifest:
    """Headless Service of the engine pods, for discovery and scraping; clients use the gateway."""
    spec = {
        "clusterIP": "None",
        "selector": names.make_pool_selector(pool.metadata.name),
        "ports": [{"name": "http", "port": ports.ENGINE_HTTP, "targetPort": "http", "protocol": "TCP"}],
    }
    return _make(pool, SERVICE, names.make_service_name(pool.metadata.name), {"spec": spec})


def make_budget(pool: InferencePool) -> Manifest:
    """Disruption budget: a node drain takes one replica at a time, and broken ones freely."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names.make_pool_selector(pool.metadata.name)},
    }
    return _make(pool, BUDGET, names.make_account_name(pool.metadata.name), {"spec": spec})


def make_network_policy(pool: InferencePool, settings: BuildSettings) -> Manifest:
    """Who may reach an engine: gateways its ports for requests and KV events, the operator its admin port."""
    gateway = {"podSelector": {"matchLabels": names.make_gateway_selector()}}
    engines = {"podSelector": {"matchLabels": names.make_pool_selector(pool.metadata.name)}}
    operator = make_operator_peer(settings)
    rules = [
        make_rule([gateway, engines], [ports.ENGINE_HTTP, ports.ENGINE_KV_EVENTS, ports.ENGINE_KV_REPLAY]),
        make_rule([operator], [ports.ENGINE_HTTP, ports.ENGINE_ADMIN]),
        make_rule(make_metrics_peers(settings), [ports.ENGINE_HTTP]),
    ]
    if not pool.spec.gateway.enabled:
        rules.append(make_rule([{"podSelector": {}}], [ports.ENGINE_HTTP]))
    spec = {
        "podSelector": {"matchLabels": names.make_pool_selector(pool.metadata.name)},
        "policyTypes": ["Ingress"],
        "ingress": [rule for rule in rules if rule["from"]],
    }
    return _make(pool, NETWORK_POLICY, names.make_account_name(pool.metadata.name), {"spec": spec})


def make_rule(peers: list[dict[str, Any]], allowed: list[int]) -> dict[str, Any]:
    """One ingress rule."""
    return {"from": peers, "ports": [{"port": port, "protocol": "TCP"} for port in allowed]}


def make_operator_peer(settings: BuildSettings) -> dict[str, Any]:
    """The operator's pods as a peer."""
    return {
        "namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: settings.operator_namespace}},
        "podSelector": {"matchLabels": {labels.COMPONENT: labels.OPERATOR_COMPONENT}},
    }


def make_metrics_peers(settings: BuildSettings) -> list[dict[str, Any]]:
    """Namespaces that scrape, as peers."""
    return [
        {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: name}}}
        for name in settings.metrics_namespaces
    ]


def needs_own_claim(pool: InferencePool) -> bool:
    """Whether the operator makes the cache claim."""
    cache = pool.spec.model.cache
    return cache.type == "Claim" and cache.claim_name is None


def list_claims(pool: InferencePool) -> tuple[str, ...]:
    """Claims of others that the pods mount, so that a missing one can be named."""
    cache = pool.spec.model.cache
    own = [cache.claim_name] if cache.type == "Claim" and cache.claim_name is not None else []
    placements = [place_model(pool), *place_adapters(pool).values()]
    mounted = [p.mount.location for p in placements if p.mount is not None and p.mount.scheme == "pvc"]
    return tuple(dict.fromkeys(own + mounted))


def list_key_secrets(pool: InferencePool) -> tuple[str, ...]:
    """Names of the Secrets with tenants' API keys, which the gateway reads."""
    if not pool.spec.gateway.enabled:
        return ()
    named = [entry.api_key_secret_ref for entry in pool.spec.scheduling.tenants]
    return tuple(dict.fromkeys(reference.name for reference in named if reference is not None))


def list_secrets(pool: InferencePool) -> tuple[str, ...]:
    """Secrets the engine pods cannot start without."""
    model, engine = pool.spec.model, pool.spec.engine
    wanted = [model.secret_ref.name] if model.secret_ref is not None else []
    for variable in (*model.env, *engine.env):
        reference = variable.value_from.secret_key_ref if variable.value_from is not None else None
        if reference is not None and not reference.optional:
            wanted.append(reference.name)
    return tuple(dict.fromkeys(wanted))


def make_claim(pool: InferencePool) -> Manifest:
    """The model cache claim; it goes with the pool."""
    cache = pool.spec.model.cache
    spec: dict[str, Any] = {
        "accessModes": [cache.access_mode or "ReadWriteMany"],
        "resources": {"requests": {"storage": cache.size_limit}},
    }
    if cache.storage_class_name is not None:
        spec["storageClassName"] = cache.storage_class_name
    return _make(pool, CLAIM, names.make_claim_name(pool.metadata.name), {"spec": spec})
