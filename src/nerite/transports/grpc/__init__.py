"""The gRPC port: serves Triton's gRPC service on our own HTTP/2 implementation (``nerite.http2``)."""
