"""Network transports, one package per protocol: bytes to requests, responses to bytes. Contains no model logic."""
