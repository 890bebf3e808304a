"""The engine step: scheduler and runner joined. Knows the model only through the Runner protocol."""
