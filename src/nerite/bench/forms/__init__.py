"""Requests in bytes, as each protocol has them."""
