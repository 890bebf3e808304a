"""Environment variables in the form of a container."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millpond_operator.api.spec import EnvVar
from millpond_operator.desired.revision import strip_defaults


def make_env(variables: Iterable[EnvVar]) -> list[dict[str, Any]]:
    """The variables; one without a value is the empty string."""
    return [_make_variable(variable) for variable in variables]


def make_field_env(fields: dict[str, str]) -> list[dict[str, Any]]:
    """Variables that hold fields of the pod."""
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _make_variable(variable: EnvVar) -> dict[str, Any]:
    if variable.value_from is None:
        return {"name": variable.name, "value": variable.value or ""}
    return {"name": variable.name, "valueFrom": strip_defaults(variable.value_from)}
