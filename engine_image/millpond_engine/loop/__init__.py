"""The engine thread: takes requests from the server, steps, hands out tokens."""
