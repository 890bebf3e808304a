"""The cache-aware gateway: a byte relay that picks the replica which already knows the prompt."""
