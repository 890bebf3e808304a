"""What the data loop publishes for the admin thread: plain attributes, replaced whole, never locked."""

from __future__ import annotations

import time

from millpond_gateway.app.admin import AdminAnswer

_STUCK_SECONDS = 10.0


class Vitals:
    """Written by the data loop, read by the admin thread."""

    def __init__(self) -> None:
        self.beat_at = time.monotonic()
        """When the data loop's timer last ran."""
        self.synced = False
        self.listening = False
        self.draining = False
        self.view_age_seconds: float | None = None
        self.max_view_age_seconds = float("inf")
        """Past two resyncs the view is called stale."""
        self.report = b"{}"
        self.state = b""
        """Of a worker, for its supervisor."""
        self.models: dict[str, str] = {}
        """Model by pool name, for probes."""

    def health(self) -> AdminAnswer:
        """The data loop runs; nothing about load, engines or the API server."""
        silent = time.monotonic() - self.beat_at
        if silent > _STUCK_SECONDS:
            return AdminAnswer(503, b'{"status":"stuck"}')
        return AdminAnswer(200, b'{"status":"ok"}')

    def ready(self) -> AdminAnswer:
        """Requests can be served: the first full lists are in and the process is not leaving.

        A stale view is said but does not take the gateway out of service: all gateways would go at once.
        """
        if self.draining:
            return AdminAnswer(503, b'{"status":"draining"}')
        if not self.listening and self.synced:
            return AdminAnswer(503, b'{"status":"waiting for the other workers and the replicas"}')
        if not self.synced:
            return AdminAnswer(503, b'{"status":"waiting for the first lists of pools and pods"}')
        stale = self.view_age_seconds is not None and self.view_age_seconds > self.max_view_age_seconds
        return AdminAnswer(200, b'{"status":"ready","view":"stale"}' if stale else b'{"status":"ready"}')
