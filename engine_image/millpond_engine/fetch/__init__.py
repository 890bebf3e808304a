"""Fetching model files: `millpond-engine fetch`, run as an init container."""

from __future__ import annotations

from millpond_engine.fetch.errors import FetchError, FetchReason
from millpond_engine.fetch.model import FetchSettings, fetch_model, run_fetch

__all__ = ["FetchError", "FetchReason", "FetchSettings", "fetch_model", "run_fetch"]
