"""Operator: loop."""
