"""What the API server says when a namespace's quota has no room for one more pod, read from its words.

The only trace is the ReplicaFailure condition of the Deployment, with the refusal as its message.
"""

from __future__ import annotations

import re

from millpond_operator.api.errors import QuantityError
from millpond_operator.api.quantity import parse_quantity

_REFUSAL = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<asked>\S+), used: \S+, limited: (?P<limit>\S+)"
)


def is_quota_full(message: str) -> bool:
    """Whether one more pod is refused that would be admitted once another has left.

    False for every other refusal, and where one pod alone asks for more than the quota allows: then it helps nobody
    that a pod which serves leaves.
    """
    found = _REFUSAL.search(message)
    if found is None:
        return False
    asked, limit = _parse_amounts(found["asked"]), _parse_amounts(found["limit"])
    try:
        return bool(asked) and all(
            parse_quantity(amount) <= parse_quantity(limit[name]) for name, amount in asked.items()
        )
    except (QuantityError, KeyError):
        return False


def _parse_amounts(text: str) -> dict[str, str]:
    """Amounts by resource, from "pods=1,requests.memory=2Gi"."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name: amount for name, found, amount in pairs if found}
