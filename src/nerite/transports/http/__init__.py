"""HTTP/REST: the KServe v2 protocol and Triton's extensions of it."""
