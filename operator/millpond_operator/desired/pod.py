"""The pod of one engine: restricted, read-only root, probes sized for loading, grace that covers the drain."""

from __future__ import annotations

from typing import Any

from millpond_common.contract import labels, ports
from millpond_operator.api.pool import InferencePool, RoleView
from millpond_operator.api.spec import TemplateSpec
from millpond_operator.desired import volumes
from millpond_operator.desired.env import make_env, make_field_env
from millpond_operator.desired.merge import merge
from millpond_operator.desired.names import make_account_name, make_workload_labels, make_workload_selector
from millpond_operator.desired.revision import strip_defaults
from millpond_operator.desired.settings import BuildSettings

USER_ID = 65532
GRACE_MARGIN_SECONDS = 30
"""Between the engine's own drain deadline and the kubelet's: time to send the last error events and to exit."""
STARTUP_PERIOD_SECONDS = 2
DEFAULT_REQUESTS = {"cpu": "1", "memory": "2Gi"}
"""Set aside for an engine whose resources name neither; a GPU engine still needs a core and host memory."""

POD_FIELDS = {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid", "POD_IP": "status.podIP"}

CONTAINER_SECURITY: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def make_pod_template(
    pool: InferencePool,
    role: RoleView,
    *,
    revision: str,
    config_name: str,
    config_digest: str,
    settings: BuildSettings,
) -> dict[str, Any]:
    """The pod template of one role and revision, the user's additions merged over it."""
    name, role_label = pool.metadata.name, role.role.lower()
    spec = _make_spec(pool, role, revision=revision, config_name=config_name, settings=settings)
    for template in role.templates:
        spec = _add_template(spec, template)
    user_labels = {k: v for t in role.templates for k, v in t.metadata.labels.items()}
    user_annotations = {k: v for t in role.templates for k, v in t.metadata.annotations.items()}
    return {
        "metadata": {
            "labels": user_labels | make_workload_labels(name, role_label, revision),
            "annotations": user_annotations
            | {
                labels.CONFIG_HASH: config_digest,
                "kubectl.kubernetes.io/default-container": labels.ENGINE_CONTAINER,
            },
        },
        "spec": spec,
    }


def _make_spec(
    pool: InferencePool, role: RoleView, *, revision: str, config_name: str, settings: BuildSettings
) -> dict[str, Any]:
    spread = make_workload_selector(pool.metadata.name, role.role.lower(), revision)
    secrets = [s.name for s in pool.spec.engine.image_pull_secrets] or list(settings.image_pull_secrets)
    parts = {
        "serviceAccountName": make_account_name(pool.metadata.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": pool.spec.rollout.drain_seconds + GRACE_MARGIN_SECONDS,
        "securityContext": dict(POD_SECURITY),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": spread},
            }
        ],
        "initContainers": volumes.make_init_containers(
            pool, make_base=lambda: _make_base(pool, settings), resources=_make_fetch_resources(role)
        ),
        "containers": [_make_engine(pool, role, settings)],
        "volumes": volumes.make_volumes(pool, config_name=config_name, settings=settings),
    }
    parts |= {"imagePullSecrets": [{"name": secret} for secret in secrets]} if secrets else {}
    return {key: value for key, value in parts.items() if value != []}


def _make_base(pool: InferencePool, settings: BuildSettings) -> dict[str, Any]:
    """What engine and fetch containers share."""
    policy = pool.spec.engine.image_pull_policy or settings.image_pull_policy
    base: dict[str, Any] = {
        "image": pool.spec.engine.image or settings.engine_image,
        "securityContext": dict(CONTAINER_SECURITY),
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return base | ({"imagePullPolicy": policy} if policy else {})


def _make_engine(pool: InferencePool, role: RoleView, settings: BuildSettings) -> dict[str, Any]:
    engine = pool.spec.engine
    return {
        "name": labels.ENGINE_CONTAINER,
        **_make_base(pool, settings),
        "args": ["serve", "--config", "/etc/millpond/engine.yaml", *engine.extra_args],
        "ports": [
            {"name": "http", "containerPort": ports.ENGINE_HTTP, "protocol": "TCP"},
            {"name": "admin", "containerPort": ports.ENGINE_ADMIN, "protocol": "TCP"},
            {"name": "kv-events", "containerPort": ports.ENGINE_KV_EVENTS, "protocol": "TCP"},
            {"name": "kv-replay", "containerPort": ports.ENGINE_KV_REPLAY, "protocol": "TCP"},
        ],
        "env": [*make_field_env(POD_FIELDS), *make_env(engine.env)],
        "resources": _make_resources(role),
        "volumeMounts": volumes.make_engine_mounts(pool),
        **_make_probes(engine.startup_seconds),
    }


def _make_probes(startup_seconds: int) -> dict[str, Any]:
    ready = {"path": "/ready", "port": "http"}
    alive = {"path": "/health", "port": "http"}
    return {
        "startupProbe": {
            "httpGet": ready,
            "periodSeconds": STARTUP_PERIOD_SECONDS,
            "timeoutSeconds": 2,
            "failureThreshold": -(-startup_seconds // STARTUP_PERIOD_SECONDS),
        },
        "readinessProbe": {"httpGet": ready, "periodSeconds": 2, "timeoutSeconds": 2, "failureThreshold": 2},
        "livenessProbe": {"httpGet": alive, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def _make_resources(role: RoleView) -> dict[str, Any]:
    own = role.resources
    # As the API server does: what has a limit and no request gets the limit as request. Written out, so that a
    # missing CPU or memory gets a floor without hiding the other limits.
    requests = {**DEFAULT_REQUESTS, **own.limits, **own.requests}
    resources: dict[str, Any] = {"limits": dict(own.limits), "requests": requests}
    if own.claims:
        resources["claims"] = [strip_defaults(claim) for claim in own.claims]
    return resources


def _make_fetch_resources(role: RoleView) -> dict[str, Any]:
    """CPU and memory of the engine: an init container's room is reused by it, so fetching costs nothing extra."""
    full = _make_resources(role)
    return {
        part: {k: v for k, v in full[part].items() if k in DEFAULT_REQUESTS}
        for part in ("limits", "requests")
    }


def _add_template(spec: dict[str, Any], template: TemplateSpec) -> dict[str, Any]:
    patch = strip_defaults(template)
    patch.pop("metadata", None)
    mounts = patch.pop("volumeMounts", [])
    merged = merge(spec, patch)
    if mounts:
        engine = {"name": labels.ENGINE_CONTAINER, "volumeMounts": mounts}
        merged = merge(merged, {"containers": [engine]})
    return merged
