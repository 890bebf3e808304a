"""Errors of loading a model.

ModelError
├── ModelFormatError       the files are not a readable model
├── UnsupportedModelError  the model is fine, this engine cannot run it
└── ModelTooLargeError     its weights do not fit the memory there is
"""

from __future__ import annotations


class ModelError(RuntimeError):
    """A model cannot be loaded; the message says which file and what to do."""


class ModelFormatError(ModelError):
    """A file is missing, truncated, or not in the format its name promises."""


class UnsupportedModelError(ModelError):
    """An architecture, a scaling variant or a tensor type that this engine does not run."""


class ModelTooLargeError(ModelError):
    """The weights do not fit; the message has both sizes."""
