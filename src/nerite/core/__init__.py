"""Plain data that every other room speaks: data types, tensors, requests, responses, errors. No I/O.

This room imports nothing but numpy and the standard library, because workers in foreign environments load it.
"""
