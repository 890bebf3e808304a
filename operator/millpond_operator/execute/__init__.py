"""Operator: execute."""
