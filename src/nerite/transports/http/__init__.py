"""HTTP/REST: the KServe v2 protocol and Triton's extensions, plus the docs page, the console and the metrics port."""
