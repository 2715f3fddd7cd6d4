"""Models for OpenVINO: its own format, and ONNX, TFLite, PaddlePaddle and TensorFlow files through it.

The way of a model: ``plan`` works out from the configuration what is read and how it is compiled (``properties`` are
OpenVINO's, as ``parameters`` name them), ``reading`` reads the file, ``fitting`` makes the model what the configuration
says of it, ``graph`` is what the model says about itself. After that ``inference`` computes for ``backends.arrays``.

OpenVINO is imported when the first model needs it (``framework``), and not by importing this package.
"""

from nerite.frameworks.openvino.backend import OpenVinoBackend

__all__ = ["OpenVinoBackend"]
