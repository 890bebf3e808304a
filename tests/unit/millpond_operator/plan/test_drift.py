"""Whether a live object still is what was applied."""

from __future__ import annotations

from typing import Any

import pytest

from millpond_operator.plan.drift import find_difference


@pytest.mark.parametrize(
    ("wanted", "live"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"cpu": "0.5"}, {"cpu": "500m"}),
        ({"cpu": 1, "memory": "1024Mi"}, {"cpu": "1", "memory": "1Gi"}),
        ({"replicas": 0, "flag": False, "text": ""}, {}),
        ({"emptyDir": {}}, {"emptyDir": None}),
        ({"list": []}, {}),
        (
            {"ports": [{"containerPort": 1}]},
            {"ports": [{"containerPort": 2}, {"containerPort": 1, "protocol": "TCP"}]},
        ),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "Z"}, {"name": "A", "value": "1"}]}),
        ({"args": ["a", "b"]}, {"args": ["a", "b"]}),
        (
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
        ),
        (
            {"volumeMounts": [{"name": "d", "mountPath": "/a"}, {"name": "d", "mountPath": "/b"}]},
            {"volumeMounts": [{"name": "d", "mountPath": "/b"}, {"name": "d", "mountPath": "/a"}]},
        ),
        (
            {"ports": [{"containerPort": 53, "protocol": "TCP"}, {"containerPort": 53, "protocol": "UDP"}]},
            {"ports": [{"containerPort": 53, "protocol": "TCP"}, {"containerPort": 53, "protocol": "UDP"}]},
        ),
        ({"rules": [{"from": [1]}, {"from": [2]}]}, {"rules": [{"from": [1]}, {"from": [2], "x": 1}]}),
    ],
)
def test_what_the_live_object_holds_is_no_difference(wanted: Any, live: Any) -> None:
    assert find_difference(wanted, live) is None


@pytest.mark.parametrize(
    ("wanted", "live", "path"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, ".a.b"),
        ({"a": {"b": 1}}, {"a": 3}, ".a"),
        ({"args": ["a", "b"]}, {"args": ["a"]}, ".args"),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}, ".args[0]"),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": []}, ".env[0]"),
        ({"flag": True}, {"flag": 1.5}, ".flag"),
        ({"cpu": "1"}, {"cpu": "1500m"}, ".cpu"),
        ({"name": "x"}, {}, ".name"),
        (
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}]},
            ".tolerations",
        ),
        (
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoExecute"}]},
            {"tolerations": [{"key": "gpu", "effect": "NoSchedule"}, {"key": "gpu", "effect": "NoSchedule"}]},
            ".tolerations[1].effect",
        ),
        ({"rules": [{"from": [1]}]}, {"rules": [{"from": [1]}, {"from": [0]}]}, ".rules"),
        ({"rules": [{"from": [1]}]}, {"rules": [{"from": [2]}]}, ".rules[0].from[0]"),
    ],
)
def test_the_first_difference_is_named_by_its_path(wanted: Any, live: Any, path: str) -> None:
    assert find_difference(wanted, live) == path
