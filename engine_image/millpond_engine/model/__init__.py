"""Model architectures over shared layers, and weight loading."""
