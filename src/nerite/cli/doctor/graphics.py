"""The NVIDIA GPUs, their driver, and whether the frameworks that are installed can use them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Final

from nerite.backends.gpu_builds import can_use_gpus
from nerite.cli.doctor.finding import Finding, Level, size
from nerite.config.options import ServerOptions
from nerite.observability import gpus
from nerite.observability.gpus import Gpu, GpuLibrary

_BUILDS: Final = {
    "onnxruntime": ("onnxruntime", "pip uninstall onnxruntime && pip install onnxruntime-gpu"),
    "pytorch": ("torch", "install torch from the index for your CUDA: https://pytorch.org/get-started/locally/"),
    "tensorflow": ("tensorflow", "pip uninstall tensorflow-cpu && pip install 'tensorflow[and-cuda]'"),
}
"""By backend: the package, and what brings its build for GPUs."""
_NEARLY_FULL: Final = 0.9


def findings() -> Iterator[Finding]:
    """Yield what is found here."""
    library, why_not = gpus.find_library()
    if why_not:
        yield Finding(Level.WARNING, "there is a driver for NVIDIA GPUs, and none is used", why_not)
        return
    found = library.gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not found:
        there = len(library.gpus(None))
        hidden = f", {there} hidden by CUDA_VISIBLE_DEVICES" if there else ""
        yield Finding(Level.NOTE if there else Level.OK, f"no NVIDIA GPU{hidden}: models run on processors")
        return
    yield Finding(Level.OK, f"driver {library.driver()}")
    for gpu in found:
        yield of_gpu(gpu, library)
    for backend, (package, remedy) in _BUILDS.items():
        if importlib.util.find_spec(package) is not None and not can_use_gpus(backend):
            yield Finding(
                Level.WARNING, f"{package} is a build for processors: its models leave the GPUs alone", remedy
            )


def of_gpu(gpu: Gpu, library: GpuLibrary) -> Finding:
    """Say what there is to say of one."""
    text = f"GPU {gpu.number}: {gpu.name}, compute capability {gpu.capability}"
    minimum = ServerOptions().device.min_compute_capability
    memory = library.memory(gpu)
    if memory is not None:
        text += f", {size(memory.total - memory.used)} free of {size(memory.total)}"
    if gpu.capability < minimum:
        remedy = f"It is left alone unless --min-supported-compute-capability={gpu.capability} says otherwise."
        return Finding(Level.WARNING, text, remedy)
    if memory is not None and memory.used > _NEARLY_FULL * memory.total:
        return Finding(
            Level.WARNING, text, "nvidia-smi says who uses it; --model-load-gpu-limit refuses loads in time."
        )
    return Finding(Level.OK, text)
