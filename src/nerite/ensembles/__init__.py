"""Ensembles at run time: one request becomes requests to several models."""
