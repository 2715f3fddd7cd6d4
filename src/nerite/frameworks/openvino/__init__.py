"""Backend for OpenVINO: its own format, and ONNX, TFLite, PaddlePaddle and TensorFlow files through its readers.

``compile`` derives from the configuration how a model is read and compiled, reads it, and adapts it to the
configuration. ``graph`` lists its inputs and outputs. ``backend`` runs it. OpenVINO is imported lazily, when the first
model needs it.
"""

from nerite.frameworks.openvino.backend import OpenVinoBackend

__all__ = ["OpenVinoBackend"]
