"""Pure part of the operator: plan."""
