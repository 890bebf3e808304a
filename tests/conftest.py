"""Fixtures that every suite may use; each lives in a module under tests/fixtures."""

from __future__ import annotations

from pathlib import Path

_FIXTURES = Path(__file__).parent / "fixtures"
pytest_plugins = [f"tests.fixtures.{path.stem}" for path in sorted(_FIXTURES.glob("[a-z]*.py"))]
