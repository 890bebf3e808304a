"""Pure part of the operator: api."""
