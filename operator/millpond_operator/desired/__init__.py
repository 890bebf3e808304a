"""Pure part of the operator: desired."""
