"""Strategic merge."""

from __future__ import annotations

from millpond_operator.desired.merge import merge


def test_maps_merge_and_null_removes() -> None:
    assert merge({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": None, "z": 3}}) == {
        "a": {"x": 1, "z": 3},
        "b": 1,
    }


def test_named_lists_merge_by_their_key_in_order() -> None:
    base = {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "b", "emptyDir": {}}]}
    patch = {"volumes": [{"name": "b", "emptyDir": {"medium": "Memory"}}, {"name": "c"}]}
    assert merge(base, patch)["volumes"] == [
        {"name": "a", "emptyDir": {}},
        {"name": "b", "emptyDir": {"medium": "Memory"}},
        {"name": "c"},
    ]


def test_other_lists_are_replaced() -> None:
    assert merge({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]}) == {
        "tolerations": [{"key": "b"}]
    }


def test_the_inputs_stay_as_they_are() -> None:
    base = {"a": {"b": [1]}}
    merge(base, {"a": {"b": [2]}})
    assert base == {"a": {"b": [1]}}
