"""The byte relay: client connections, engine connections, and one exchange for each request between them."""
