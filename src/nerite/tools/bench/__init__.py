"""``nerite bench``: a load generator for servers that speak KServe v2 or the OpenAI API."""
