"""Bytes to requests and responses to bytes, one folder a protocol. No model logic in here."""
