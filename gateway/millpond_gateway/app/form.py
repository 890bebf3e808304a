"""Which form of the gateway runs: its hot modules compiled, as images ship them, or all of it interpreted."""

from __future__ import annotations

from millpond_gateway.routing import router

COMPILED, INTERPRETED = "compiled", "interpreted"


def find_form() -> str:
    """The form by what the router was loaded from."""
    return INTERPRETED if (router.__file__ or "").endswith(".py") else COMPILED
