"""gRPC: the same service as Triton's, on our own HTTP/2 (``nerite.http2``)."""
