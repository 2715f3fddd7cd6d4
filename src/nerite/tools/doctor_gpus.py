"""Findings of ``nerite doctor`` about GPUs: the driver, the GPUs, and how the installed frameworks fit them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from nerite.backends import gpu_builds
from nerite.backends.gpu_builds import CUDA_BINDINGS, FRAMEWORKS, TENSORRT, FrameworkBuild, GpuMachine
from nerite.config.options import ServerOptions
from nerite.observability import gpus
from nerite.observability.gpus import Gpu, GpuLibrary
from nerite.tools.doctor_machine import IMPORT_SECONDS, DoctorFinding, note, ok, size, warning

_NEARLY_FULL: Final = 0.9
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ONNX_PROBE: Final = """
import onnxruntime, onnxruntime.datasets
getattr(onnxruntime, "preload_dlls", lambda: None)()
model = onnxruntime.datasets.get_example("mul_1.onnx")
wanted = "CUDAExecutionProvider"
session = onnxruntime.InferenceSession(model, providers=[wanted, "CPUExecutionProvider"], enable_fallback=0)
print(int(wanted in session.get_providers()))
"""
PROBES: Final = {
    "onnxruntime": _ONNX_PROBE,
    "tensorflow": "import tensorflow; print(len(tensorflow.config.list_physical_devices('GPU')))",
    "torch": "import torch; print(int(torch.cuda.is_available()), *torch.cuda.get_arch_list())",
}
"""Programs that print whether a framework finds GPUs, and the architectures that it has kernels for, by its module."""


class ProbedBuild(NamedTuple):
    """What a framework says when it is imported."""

    finds_gpus: bool
    architectures: tuple[str, ...] = ()
    failure: str = ""


def findings() -> Iterator[DoctorFinding]:
    """Yield findings about GPUs, their driver and the frameworks that can use them."""
    library, why_not = gpus.find_library()
    builds = [build for framework in FRAMEWORKS if (build := gpu_builds.installed(framework)) is not None]
    visible = os.environ.get(_VISIBLE)
    found, existing = library.gpus(visible), library.gpus(None)
    if why_not:
        yield warning("an NVIDIA driver is installed, but Nerite cannot use the GPUs", why_not)
    elif driver := library.driver() if existing else None:
        yield ok(f"driver {driver.version}, up to CUDA {_version(driver.cuda)}")
    for gpu in found:
        yield of_gpu(gpu, library)
    hidden = len(existing) - len(found)
    if hidden:
        remedy = "Nerite places instances on whole GPUs, not on MIG devices." if "MIG-" in (visible or "") else ""
        rest = "" if found else ": models run on the CPU"
        yield note(f"{_VISIBLE}={visible} hides {hidden} of {len(existing)} GPUs{rest}", remedy)
    elif not (found or why_not):
        yield ok("no NVIDIA GPU: models run on the CPU")
    machine = gpu_builds.machine_with(library, found)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for each in threads.map(lambda build: list(of_build(build, machine, found)), builds):
            yield from each
    if found and CUDA_BINDINGS not in [build.framework for build in builds]:
        of_use = warning if TENSORRT in [build.framework for build in builds] else note
        yield of_use(
            "cuda-bindings is not installed, which TensorRT models and tensors in GPU memory need",
            gpu_builds.install_command(CUDA_BINDINGS, machine),
        )


def of_gpu(gpu: Gpu, library: GpuLibrary) -> DoctorFinding:
    """Return the finding about one GPU."""
    text = f"GPU {gpu.number}: {gpu.name}, compute capability {gpu.capability}"
    minimum = ServerOptions().device.min_compute_capability
    memory = library.memory(gpu)
    if memory is not None:
        text += f", {size(memory.total - memory.used)} free of {size(memory.total)}"
    if gpu.capability < minimum:
        remedy = f"It is not used. To use it, pass --min-supported-compute-capability={gpu.capability}."
        return warning(text, remedy)
    if library.is_divided(gpu):
        remedy = (
            "Instance groups name whole GPUs, and CUDA gives a process one MIG device at most. To use all of the GPU, "
            f"disable MIG: nvidia-smi -i {gpu.uuid} -mig 0"
        )
        return warning(f"{text}, divided by MIG", remedy)
    if memory is not None and memory.used > _NEARLY_FULL * memory.total:
        return warning(
            text,
            "nvidia-smi shows which processes use it. --model-load-gpu-limit rejects loads before it is full.",
        )
    return ok(text)


def of_build(build: FrameworkBuild, machine: GpuMachine, found: Sequence[Gpu]) -> Iterator[DoctorFinding]:
    """Yield findings about an installed framework on a machine with the GPUs ``found``. Imports it in a process."""
    command = gpu_builds.install_command(build.framework, machine, build.overlapping)
    if build.overlapping:
        text = f"{' and '.join(build.overlapping)} are installed over each other, and overwrite each other's files"
        yield warning(text, command if found else f"pip uninstall -y {' '.join(build.overlapping)}, and install one")
        return
    about = f"{build.name} is a CPU build"
    if build.facts.on_gpus:
        about = f"{build.name} is a build for {f'CUDA {build.facts.cuda}' if build.facts.cuda else 'GPUs'}"
    if not found:
        yield ok(about)
        return
    misfit = gpu_builds.misfit(build, machine)
    if misfit is not None:
        yield warning(misfit.text, misfit.remedy[0].upper() + misfit.remedy[1:])
        return
    program = PROBES.get(build.framework.module)
    probed = ProbedBuild(True, build.facts.architectures) if program is None else probe(program)
    architectures = probed.architectures or build.facts.architectures
    without = [gpu for gpu in found if not gpu_builds.has_kernels(architectures, gpu.capability)]
    if probed.failure:
        yield warning(f"{about}, and cannot be asked for GPUs: {probed.failure}", command)
    elif not probed.finds_gpus:
        remedy = (
            f"It needs the libraries of CUDA, which this installs: {command}\n"
            "In a container, NVIDIA_DRIVER_CAPABILITIES has to name compute."
        )
        yield warning(f"{about}, and finds no GPU", remedy)
    elif without:
        cards = ", ".join(f"{gpu.number} (compute capability {gpu.capability})" for gpu in without)
        remedy = f"Install a build that has: {gpu_builds.install_command(build.framework, machine, build.versions)}"
        yield warning(f"{about}, and has no kernels for GPU {cards}, but for {', '.join(architectures)}", remedy)
    elif machine.cuda is not None and _parsed(build.facts.cuda) > machine.cuda:
        remedy = "It runs, except for kernels that are compiled at run time (PTX): for them, upgrade the driver."
        yield note(f"{about}, which is newer than the driver's {_version(machine.cuda)}", remedy)
    else:
        yield ok(about)


def probe(program: str) -> ProbedBuild:
    """Run a program of ``PROBES`` in a separate process. Blocks."""
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ProbedBuild(False, failure=f"it takes longer than {IMPORT_SECONDS} s")
    lines = (done.stderr if done.returncode else done.stdout).decode(errors="replace").strip().splitlines()
    if done.returncode or not lines:
        return ProbedBuild(False, failure=lines[-1] if lines else f"exit status {done.returncode}")
    count, *architectures = lines[-1].split()
    return ProbedBuild(count != "0", tuple(architectures))


def _version(cuda: tuple[int, int]) -> str:
    return f"{cuda[0]}.{cuda[1]}"


def _parsed(cuda: str) -> tuple[int, ...]:
    return tuple(map(int, cuda.split("."))) if cuda else ()
