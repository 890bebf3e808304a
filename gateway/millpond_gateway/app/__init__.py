"""Wiring of the gateway: discovery, decisions, relay, admin server, and the life of the process."""
