"""Operator: observe."""
