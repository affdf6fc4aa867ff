"""Load generator and A/B comparison against a running server."""
