"""TCP ports of the three programs."""

from __future__ import annotations

ENGINE_HTTP = 8000
"""Tenant port: OpenAI surface, /health, /ready, /metrics, /v1/state."""
ENGINE_ADMIN = 8001
"""Operator port: /drain, /pause, /resume, /sleep, /wake_up, cache resets, /abort_requests."""
ENGINE_KV_EVENTS = 5557
"""ZeroMQ PUB socket of KV events."""
ENGINE_KV_REPLAY = 5558
"""ZeroMQ ROUTER socket: replay and snapshot of KV events."""

GATEWAY_HTTP = 8080
"""Tenant port: the OpenAI surface of every pool of the namespace."""
GATEWAY_ADMIN = 8081
"""Health, readiness, metrics, /v1/report and /v1/probe; reachable for operator and monitoring only."""
GATEWAY_PEERS = 8082
"""Decisions shared among gateways; worker N of a gateway takes them at N ports above."""
MAX_GATEWAY_WORKERS = 16
"""Worker processes of one gateway: as many peer ports are open among gateways."""
GATEWAY_SERVICE = 80
"""Port of the gateway's Service."""

OPERATOR_METRICS = 8080
OPERATOR_HEALTH = 8081
