"""Errors of the typed view.

ApiViewError
├── SpecError       the object cannot be read as an InferencePool; names the field
└── QuantityError   a text is no Kubernetes quantity
"""

from __future__ import annotations


class ApiViewError(ValueError):
    """An object of the API server cannot be understood."""


class SpecError(ApiViewError):
    """One field cannot be used.

    Attributes:
        path: where, as in `spec.model.source`.
        problem: what is wrong there.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class QuantityError(ApiViewError):
    """A text is no Kubernetes quantity."""
