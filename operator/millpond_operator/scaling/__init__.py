"""Pure part of the operator: scaling."""
