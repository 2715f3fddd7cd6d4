"""Instances of models: where a batch is executed, in this process or behind an interface."""
