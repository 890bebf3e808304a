"""Operator: handlers."""
