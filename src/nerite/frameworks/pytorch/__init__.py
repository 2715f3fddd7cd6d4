"""Backend for PyTorch: TorchScript, exported and compiled programs, and modules written in Python.

``artifact`` finds the model file, recognises its kind, derives a plan from the configuration, and compares that with
the program; it needs no framework. ``modules`` and ``exported`` open the four kinds as a ``program``, and ``run``
computes with one. ``backend`` connects these with the base of array backends.

PyTorch is imported lazily, when the first model needs it.
"""

from nerite.frameworks.pytorch.backend import PyTorchBackend

__all__ = ["PyTorchBackend"]
