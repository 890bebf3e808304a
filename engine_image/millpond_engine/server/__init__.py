"""HTTP server: the OpenAI surface and the operator surface."""
