"""Errors of the image build.

ImageError
├── MissingToolError     a program is not installed
├── NoSpaceError         the disk is too full for the build
└── BuildError           a build step failed; the tail of its output is in the message
"""

from __future__ import annotations


class ImageError(Exception):
    """A build cannot go on; the message says what to do."""


class MissingToolError(ImageError):
    """A program is not installed."""


class NoSpaceError(ImageError):
    """The disk is too full."""


class BuildError(ImageError):
    """A build step failed."""
