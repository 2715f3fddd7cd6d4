"""Shared by server and workers: messages, their encoding, and shared memory."""
