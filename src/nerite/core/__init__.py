"""Data that every other package exchanges: data types, tensors, requests, responses, errors. No network or model code.

Imports only numpy and the standard library, because workers in foreign Python environments load it.
"""
