"""HTTP headers between client, gateway and engine (lower case).

Headers marked trusted are set by the gateway; it removes them from what clients send.
"""

from __future__ import annotations

REQUEST_ID = "x-request-id"
"""Echoed by everyone; made by the gateway when absent."""
SESSION = "x-session-id"
"""From clients: requests of one session prefer one replica."""

CLASS = "x-millpond-class"
"""Trusted: traffic class of the request. Response of an engine: the class it was served as."""
TENANT = "x-millpond-tenant"
"""Trusted: tenant the caller's key belongs to."""
DEADLINE = "x-millpond-deadline-ms"
"""Trusted: milliseconds left until the first token is due."""
ENDPOINT = "x-millpond-endpoint"
"""Response, when debugging is on: replica that served."""
DECISION = "x-millpond-decision"
"""Response, when debugging is on: score breakdown of the choice."""
REASON = "x-millpond-reason"
"""Response of a refusal: the enumerated reason."""

EPOCH = "x-millpond-epoch"
"""Response of an engine: random 64-bit number of this engine start, 16 hex digits."""

TRUSTED = (CLASS, TENANT, DEADLINE, ENDPOINT, DECISION, EPOCH, REASON)
"""What a client may not set."""
