"""Models for ONNX Runtime.

The way of a model: ``plan`` works out from the configuration how its session has to be (no framework needed for
that), ``session`` opens it, ``graph`` is what the session says about itself. ``completion`` fills the configuration in
from the graph, ``agreement`` compares the two. After that an ``instance`` executes: ``feeds`` turns requests into what
the session eats, ``replies`` turns what comes out into responses.

ONNX Runtime is imported when the first model needs it, and not by importing this package.
"""

from nerite.backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
