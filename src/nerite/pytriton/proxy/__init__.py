"""Requests and responses, in the module that PyTriton has them in."""
