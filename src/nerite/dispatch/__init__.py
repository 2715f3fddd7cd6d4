"""Dispatch: which instance of a model runs which batch, and how responses get back to callers."""
