"""The inference engine: paged, continuously batched, prefix-cached."""

__version__ = "0.1.0"
