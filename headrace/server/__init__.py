"""The HTTP server: OpenAI's protocol at the edge, token events behind it."""
