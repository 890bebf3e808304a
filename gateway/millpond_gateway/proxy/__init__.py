"""Gateway: proxy."""
