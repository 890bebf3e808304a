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

REVISION_WEIGHTS = f"{GROUP}/revision-weights"
"""Annotation on a pool, `REVISION=WEIGHT[,REVISION=WEIGHT...]`: shares of new requests by revision; without it all
revisions share by load. A revision it does not name gets none while a named one can serve."""

APPLIED_DIGEST = f"{GROUP}/applied-digest"
"""Annotation on a child: digest of the manifest the operator applied last."""
REJECTED = f"{GROUP}/rejected"
"""Annotation on a revision's record: what its gate found, with the numbers. Removing it lets the revision try again."""
REJECTED_BY = f"{GROUP}/rejected-by"
"""Annotation on a revision's record: the gate that rejected it; under another gate it is tried again."""
FALLBACK_REVISION = f"{GROUP}/fallback-revision"
"""Annotation on a revision's record: the revision the pool went back to."""

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
INSPECT_CONTAINER = "inspect-model"
"""Init container that reads the size of a model that is used in place; its termination message is as the fetch's."""
FETCH_CONTAINER = "fetch-model"
"""Init container that brings the model; its termination message is the typed error of the fetch."""
