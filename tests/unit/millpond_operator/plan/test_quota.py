"""The API server's words about a quota."""

from __future__ import annotations

import pytest

from millpond_operator.plan.quota import is_quota_full

PREFIX = 'pods "chat-6a3f344ce0-58544b7b55-rjv2s" is forbidden: '


@pytest.mark.parametrize(
    ("message", "full"),
    [
        ("exceeded quota: q, requested: pods=1, used: pods=2, limited: pods=2", True),
        (
            "exceeded quota: q, requested: cpu=1,memory=1Gi, used: cpu=2,memory=2Gi, limited: cpu=2500m,memory=2Gi",
            True,
        ),
        ("exceeded quota: q, requested: limits.cpu=1, used: limits.cpu=0, limited: limits.cpu=500m", False),
        ("exceeded quota: q, requested: pods=x, used: pods=2, limited: pods=2", False),
        ("exceeded quota: q, requested: pods=1, used: pods=2, limited: cpu=2", False),
        ("failed quota: q: must specify limits.memory", False),
        ("exceeded quota", False),
        ("", False),
    ],
)
def test_whether_one_more_pod_would_fit_once_another_has_left(message: str, full: bool) -> None:
    assert is_quota_full(PREFIX + message) is full
