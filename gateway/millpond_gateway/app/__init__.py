"""Gateway: app."""
