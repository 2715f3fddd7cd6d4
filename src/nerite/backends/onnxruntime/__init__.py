"""Models for ONNX Runtime.

The way of a model: ``plan`` works out from the configuration how its session has to be (no framework needed for
that), ``session`` opens it, ``graph`` is what the session says about itself, and ``runs`` are the ways to
run it. The rest is in ``nerite.backends.arrays``.

ONNX Runtime is imported when the first model needs it, and not by importing this package.
"""

from nerite.backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
