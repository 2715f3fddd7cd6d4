"""Ensembles: which step of a request runs next, with which tensors. Pure."""
