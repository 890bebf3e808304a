"""Torch runner: rows of state, paged KV tensors, sampling."""
