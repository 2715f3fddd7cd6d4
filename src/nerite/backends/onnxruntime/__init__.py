"""Backend for ONNX Runtime.

``session`` derives a session plan from the configuration (without the framework) and opens sessions; ``backend`` reads
their graphs and runs them. The parts shared with other frameworks are in ``nerite.backends.arrays``.

ONNX Runtime is imported lazily when the first model needs it, not with this package.
"""

from nerite.backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
