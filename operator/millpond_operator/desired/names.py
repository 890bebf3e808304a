"""Names of children and the labels that tie pods to pools. One place makes both labels and selectors."""

from __future__ import annotations

import hashlib

from millpond_common.contract import labels

MAX_NAME = 63


def make_workload_name(pool: str, role: str, revision: str) -> str:
    """Name of the Deployment, and of the ConfigMap, of one role and revision."""
    part = "" if role == labels.ROLE_BOTH else role
    # The pool's part is cut first, so that two revisions of a long name stay distinct and readable.
    tail = "-".join(item for item in (part, revision) if item)
    return f"{make_short(pool, MAX_NAME - len(tail) - 1)}-{tail}"


def make_short(name: str, size: int) -> str:
    """The name, or its beginning with a hash when it is longer than `size`."""
    if len(name) <= size:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: size - 9].rstrip('-')}-{digest}"


def make_service_name(pool: str) -> str:
    """Name of the headless Service of a pool's engines."""
    return make_short(pool, MAX_NAME - 8) + "-engines"


def make_account_name(pool: str) -> str:
    """Name of the service account, disruption budget and network policy of a pool's engines."""
    return make_short(pool, MAX_NAME - 7) + "-engine"


def make_claim_name(pool: str) -> str:
    """Name of the model cache claim that the operator makes."""
    return make_short(pool, MAX_NAME - 7) + "-models"


def make_pool_labels(pool: str) -> dict[str, str]:
    """Labels of every child of a pool."""
    return {
        labels.NAME: "millpond",
        labels.INSTANCE: pool,
        labels.COMPONENT: labels.ENGINE_COMPONENT,
        labels.PART_OF: "millpond",
        labels.MANAGED_BY: labels.MANAGER,
        labels.POOL: pool,
    }


def make_workload_labels(pool: str, role: str, revision: str) -> dict[str, str]:
    """Labels of the objects and pods of one role and revision."""
    return make_pool_labels(pool) | {labels.ROLE: role, labels.REVISION: revision}


def make_pool_selector(pool: str) -> dict[str, str]:
    """Selector of all engine pods of a pool."""
    return {labels.POOL: pool, labels.COMPONENT: labels.ENGINE_COMPONENT}


def make_role_selector(pool: str, role: str) -> dict[str, str]:
    """Selector of the engine pods of one role."""
    return make_pool_selector(pool) | {labels.ROLE: role}


def make_workload_selector(pool: str, role: str, revision: str) -> dict[str, str]:
    """Selector of the engine pods of one role and revision."""
    return make_role_selector(pool, role) | {labels.REVISION: revision}


def make_gateway_labels() -> dict[str, str]:
    """Labels of the objects and pods of a namespace's gateway."""
    return {
        labels.NAME: labels.GATEWAY_NAME,
        labels.INSTANCE: labels.GATEWAY_NAME,
        labels.COMPONENT: labels.GATEWAY_COMPONENT,
        labels.PART_OF: "millpond",
        labels.MANAGED_BY: labels.MANAGER,
    }


def make_gateway_selector() -> dict[str, str]:
    """Selector of the gateway's pods."""
    return {labels.NAME: labels.GATEWAY_NAME, labels.COMPONENT: labels.GATEWAY_COMPONENT}


def format_selector(selector: dict[str, str]) -> str:
    """A selector in the string form of list calls and the scale subresource."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
