"""Labels, annotations, field managers and finalizers that Millpond writes to Kubernetes objects."""

from __future__ import annotations

GROUP = "millpond.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferencePool"
PLURAL = "inferencepools"

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
PART_OF = "app.kubernetes.io/part-of"
MANAGED_BY = "app.kubernetes.io/managed-by"
APP_VERSION = "app.kubernetes.io/version"

POOL = f"{GROUP}/pool"
"""Name of the InferencePool a pod or child object belongs to."""
ROLE = f"{GROUP}/role"
"""Role of an engine pod, lower case: both, prefill or decode."""
REVISION = f"{GROUP}/revision"
"""Hash of the pod template an engine pod was made from."""
CORDONED = f"{GROUP}/cordoned"
"""Set to "true" on an engine pod: gateways stop choosing it the moment they see the label."""

PAUSED = f"{GROUP}/paused"
"""Annotation on a pool, "true": the operator observes and reports, and writes no child."""
CONFIG_HASH = f"{GROUP}/config-hash"
"""Annotation on a pod template: digest of the engine configuration file it starts with."""

APPLIED_DIGEST = f"{GROUP}/applied-digest"
"""Annotation on a child: digest of the manifest the operator applied last."""

MANAGER = "millpond-operator"
"""Field manager of every server-side apply of the operator."""
STATUS_MANAGER = "millpond-operator-status"
"""Field manager of status writes."""
FINALIZER = f"{GROUP}/drain"
"""Held on a pool while its replicas drain."""

ROLE_BOTH = "both"
ROLE_PREFILL = "prefill"
ROLE_DECODE = "decode"

ENGINE_COMPONENT = "engine"
GATEWAY_COMPONENT = "gateway"
OPERATOR_COMPONENT = "operator"
GATEWAY_NAME = "millpond-gateway"
"""Name of a namespace's gateway Deployment, Service and ServiceAccount."""
ENGINE_CONTAINER = "engine"
FETCH_CONTAINER = "fetch-model"
"""Init container that brings the model; its termination message is the typed error of the fetch."""
