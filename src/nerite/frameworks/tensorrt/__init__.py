"""Backend for TensorRT engines (``model.plan``) on NVIDIA GPUs.

``engine`` opens plans and describes them as plain data, from which the optimisation profile for a batch is chosen.
``execution`` has the memory, streams and graphs of CUDA, and runs an engine for one instance. ``backend`` connects them
with the base of array backends.

Written to the documentation of TensorRT 10 and CUDA's Python bindings; not run on a GPU yet (``benchmarks/gpu_exam.py``
does that). Both are imported lazily, when the first model needs them.
"""

from nerite.frameworks.tensorrt.backend import TensorRtBackend

__all__ = ["TensorRtBackend"]
