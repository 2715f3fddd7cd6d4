"""Nerite: an inference server in Python, compatible with NVIDIA Triton.

Importing this package must stay cheap: worker processes and foreign Python environments import it, too.
"""

__version__ = "0.1.0"
