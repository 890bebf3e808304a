"""Operator: clients."""
