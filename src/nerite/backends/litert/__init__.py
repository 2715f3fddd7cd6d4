"""Models for LiteRT, which was called TensorFlow Lite.

A ``session`` is an interpreter with a model in it, ``tensors`` are what that takes and gives, and a ``computation``
runs it. The rest is in ``nerite.backends.arrays``. Each instance has an interpreter, which holds one batch at a time.

LiteRT is imported when the first model needs it, and not by importing this package.
"""

from nerite.backends.litert.backend import LiteRtBackend

__all__ = ["LiteRtBackend"]
