"""Gateway: world."""
