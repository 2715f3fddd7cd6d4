"""Instances of models: the interface that all of them have, and those that run in the server's process."""
