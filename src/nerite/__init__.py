"""Nerite: an inference server in Python that takes Triton's place.

Importing this package is cheap on purpose: worker processes and foreign Python environments import it too.
"""

__version__ = "0.1.0"
