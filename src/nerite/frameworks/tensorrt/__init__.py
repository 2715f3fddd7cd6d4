"""Engines of TensorRT: ``model.plan``.

A ``description`` is what an engine says of itself, as plain data; which of its optimisation ``profiles`` takes a batch
follows from that alone. ``engine`` opens plans, ``cuda`` has memory, streams and graphs, and a ``computation`` runs an
engine for one instance. The rest is in ``nerite.backends.arrays``.

Written by the documentation of TensorRT 10 and CUDA's Python bindings; it has not run on a GPU yet
(``benchmarks/on_gpu.py`` is what tells). Both are imported when the first model needs them.
"""

from nerite.frameworks.tensorrt.backend import TensorRtBackend

__all__ = ["TensorRtBackend"]
