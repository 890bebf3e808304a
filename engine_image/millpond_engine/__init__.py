"""The inference engine: paged, continuously batched, prefix-cached."""
