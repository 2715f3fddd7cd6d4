"""What was found about the machine, and what cures it."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import nerite
from nerite.backends import machine
from nerite.backends.machine import can_use_gpus
from nerite.backends.python.environments import environments_folder
from nerite.config.options import ServerOptions
from nerite.observability import gpus
from nerite.observability.gpus import Gpu, GpuLibrary
from nerite.observability.machine import CGROUP, MEMINFO, cgroup_limit, memory_sizes, number_in

GB: Final = 1 << 30
MB: Final = 1 << 20


class FindingLevel(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    """To be known, and no fault."""
    WARNING = "warning"
    """It will be in somebody's way."""
    PROBLEM = "problem"
    """It does not work as it is."""


class DoctorFinding(NamedTuple):
    """One thing."""

    level: FindingLevel
    text: str
    remedy: str = ""
    """What is to be done; empty where nothing is."""


def size(amount: float) -> str:
    """Return bytes for people."""
    return f"{amount / GB:.1f} GB" if amount >= GB else f"{amount / MB:.0f} MB"


# The machine, or the part of it that a container leaves us: processors, memory, disk.

_LITTLE_MEMORY: Final = GB
_LITTLE_DISK: Final = 5 * GB


class MachineMemory(NamedTuple):
    """In bytes; 0 where it is not known."""

    total: int
    available: int
    limit: int
    """That of the container; 0 where there is none."""
    used: int
    """Of the limit."""


def machine_findings() -> Iterator[DoctorFinding]:
    """Yield what is found here."""
    yield DoctorFinding(FindingLevel.OK, f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield of_cores(machine.usable_cores(), os.cpu_count() or 1, machine.core_quota())
    yield of_memory(memory())
    yield of_disk(environments_folder(os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", "")))


def of_cores(usable: int, there: int, quota: int) -> DoctorFinding:
    """Say how many cores there are for us."""
    if usable < there:
        why = f"a quota of processor time leaves {quota}" if quota == usable else "affinity leaves the others to others"
        return DoctorFinding(FindingLevel.NOTE, f"{usable} of {there} cores: {why}")
    if usable == 1:
        remedy = "Give it two: the server and a model's worker take turns on one."
        return DoctorFinding(FindingLevel.NOTE, "1 core", remedy)
    return DoctorFinding(FindingLevel.OK, f"{usable} cores")


def of_memory(found: MachineMemory) -> DoctorFinding:
    """Say how much memory there is for us."""
    total, available = found.total, found.available
    if 0 < found.limit < total:
        total, available = found.limit, min(available, found.limit - found.used)
    if not total:
        return DoctorFinding(FindingLevel.NOTE, "how much memory there is cannot be read here")
    where = " that the container may use" if total == found.limit else ""
    text = f"{size(available)} free of {size(total)} of memory{where}"
    if available < _LITTLE_MEMORY:
        return DoctorFinding(
            FindingLevel.WARNING, text, "Free some, or give more: workers that find none are killed by the system."
        )
    return DoctorFinding(FindingLevel.OK, text)


def of_disk(directory: Path) -> DoctorFinding:
    """Say whether environments and converted models can be kept where they are kept."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    where = f"environments and converted models are kept in {directory}"
    if not os.access(there, os.W_OK):
        remedy = "Name another directory: NERITE_ENVIRONMENT_DIRECTORY, or --environment-directory."
        return DoctorFinding(FindingLevel.WARNING, f"{where}, which cannot be written", remedy)
    free = shutil.disk_usage(there).free
    text = f"{where}: {size(free)} free"
    if free < _LITTLE_DISK:
        return DoctorFinding(
            FindingLevel.WARNING, text, "Remove old ones: nerite environments --remove --unused-for 30"
        )
    return DoctorFinding(FindingLevel.OK, text)


def memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> MachineMemory:
    """Return what the system says."""
    try:
        sizes = memory_sizes(meminfo)
    except OSError:
        sizes = {"MemTotal": 0, "MemAvailable": 0}
    used = number_in(cgroup / "memory.current") or number_in(cgroup / "memory" / "memory.usage_in_bytes")
    return MachineMemory(sizes["MemTotal"], sizes["MemAvailable"], cgroup_limit(cgroup), used)


# The NVIDIA GPUs, their driver, and whether the frameworks that are installed can use them.

_BUILDS: Final = {
    "onnxruntime": ("onnxruntime", "pip uninstall onnxruntime && pip install onnxruntime-gpu"),
    "pytorch": ("torch", "install torch from the index for your CUDA: https://pytorch.org/get-started/locally/"),
    "tensorflow": ("tensorflow", "pip uninstall tensorflow-cpu && pip install 'tensorflow[and-cuda]'"),
}
"""By backend: the package, and what brings its build for GPUs."""
_NEARLY_FULL: Final = 0.9


def gpu_findings() -> Iterator[DoctorFinding]:
    """Yield what is found here."""
    library, why_not = gpus.find_library()
    if why_not:
        yield DoctorFinding(FindingLevel.WARNING, "there is a driver for NVIDIA GPUs, and none is used", why_not)
        return
    found = library.gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not found:
        there = len(library.gpus(None))
        hidden = f", {there} hidden by CUDA_VISIBLE_DEVICES" if there else ""
        yield DoctorFinding(
            FindingLevel.NOTE if there else FindingLevel.OK, f"no NVIDIA GPU{hidden}: models run on processors"
        )
        return
    yield DoctorFinding(FindingLevel.OK, f"driver {library.driver()}")
    for gpu in found:
        yield of_gpu(gpu, library)
    for backend, (package, remedy) in _BUILDS.items():
        if importlib.util.find_spec(package) is not None and not can_use_gpus(backend):
            yield DoctorFinding(
                FindingLevel.WARNING, f"{package} is a build for processors: its models leave the GPUs alone", remedy
            )


def of_gpu(gpu: Gpu, library: GpuLibrary) -> DoctorFinding:
    """Say what there is to say of one."""
    text = f"GPU {gpu.number}: {gpu.name}, compute capability {gpu.capability}"
    minimum = ServerOptions().device.min_compute_capability
    memory = library.memory(gpu)
    if memory is not None:
        text += f", {size(memory.total - memory.used)} free of {size(memory.total)}"
    if gpu.capability < minimum:
        remedy = f"It is left alone unless --min-supported-compute-capability={gpu.capability} says otherwise."
        return DoctorFinding(FindingLevel.WARNING, text, remedy)
    if memory is not None and memory.used > _NEARLY_FULL * memory.total:
        return DoctorFinding(
            FindingLevel.WARNING, text, "nvidia-smi says who uses it; --model-load-gpu-limit refuses loads in time."
        )
    return DoctorFinding(FindingLevel.OK, text)


# What is installed: Python, what Nerite needs, and the extras.

_OURS: Final = "nerite"
_NOT_FOR_SERVING: Final = frozenset({"dev", "examples", "pipelines"})
_MODULES: Final = {
    "ai-edge-litert": "ai_edge_litert.interpreter",
    "cuda-bindings": "cuda.bindings.driver",
    "mlflow-skinny": "mlflow",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL.Image",
    "protobuf": "google.protobuf",
    "scikit-learn": "sklearn",
    "tensorflow-cpu": "tensorflow",
}
"""Of packages whose module has another name."""
_IMPORT_SECONDS: Final = 120
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)(?:;\s*(.*))?")
_BOUND: Final = re.compile(r"(>=|<=|==|<|>)\s*([0-9][0-9.]*)")


class Requirement(NamedTuple):
    """A package that is asked for."""

    package: str
    bounds: str
    """Such as ``>=1.2,<2``."""
    extra: str
    """The extra that asks for it; empty if there is none."""


class Lack(NamedTuple):
    """A package that is not there as it is asked for."""

    text: str
    wrong: bool
    """It is there, in another version."""


def findings() -> Iterator[DoctorFinding]:
    """Yield what is found here."""
    yield DoctorFinding(
        FindingLevel.OK, f"nerite {nerite.__version__}, Python {platform.python_version()} in {sys.prefix}"
    )
    try:
        requirements = list(parsed(metadata.requires(_OURS) or ()))
    except metadata.PackageNotFoundError:
        yield DoctorFinding(FindingLevel.NOTE, "nerite runs from its source, uninstalled: what it needs is not known")
        return
    versions = {each.package: _version(each.package) for each in requirements}
    core = [each for each in requirements if not each.extra]
    yield from of_core(core, versions)
    for each in core:
        if versions[each.package]:
            yield from _imported(each.package)
    extras = [each for each in requirements if each.extra and each.extra not in _NOT_FOR_SERVING]
    yield from of_extras(extras, versions, broken({each.package for each in extras if versions[each.package]}))


def of_core(requirements: Iterable[Requirement], versions: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Say what Nerite cannot be without, given the versions that are installed, empty for none."""
    for each in requirements:
        if (lack := lacking(each, versions)) is not None:
            yield DoctorFinding(
                FindingLevel.PROBLEM, f"Nerite needs {lack.text}", f"pip install '{each.package}{each.bounds}'"
            )


def of_extras(
    requirements: Iterable[Requirement], versions: Mapping[str, str], broken: Mapping[str, str]
) -> Iterator[DoctorFinding]:
    """Say which extras are there, and what the others lack. ``broken``: why a package cannot be imported."""
    extras: dict[str, list[Requirement]] = {}
    for each in requirements:
        if each.extra not in _NOT_FOR_SERVING:
            extras.setdefault(each.extra, []).append(each)
    there, not_there = [], []
    for name, wanted in sorted(extras.items()):
        lacks = [lack for each in wanted if (lack := lacking(each, versions)) is not None]
        wrong = [lack for lack in lacks if lack.wrong]
        failing = [each.package for each in wanted if each.package in broken]
        if failing:
            why = "; ".join(f"{package} is installed, and cannot be imported: {broken[package]}" for package in failing)
            remedy = f"pip install --force-reinstall {' '.join(failing)}"
            yield DoctorFinding(FindingLevel.WARNING, f"the extra '{name}' does not work: {why}", remedy)
        elif not lacks:
            there.append(f"{name} ({', '.join(f'{each.package} {versions[each.package]}' for each in wanted)})")
        elif len(wrong) == len(lacks):
            text = f"the extra '{name}' needs {' and '.join(lack.text for lack in wrong)}"
            yield DoctorFinding(FindingLevel.WARNING, text, f"pip install '{_OURS}[{name}]'")
        else:
            not_there.append(f"{name} (lacks {', '.join(lack.text for lack in lacks)})")
    yield DoctorFinding(FindingLevel.OK, f"extras: {', '.join(there) or 'none'}")
    if not_there:
        remedy = f"pip install '{_OURS}[NAME]', for what your models need (docs/frameworks.md)"
        yield DoctorFinding(FindingLevel.NOTE, f"extras that are not installed: {', '.join(not_there)}", remedy)


def broken(packages: Collection[str]) -> dict[str, str]:
    """Import packages, each in a process of its own: they are heavy, do not go together, and may end it. Blocks.

    Return why for those that cannot be imported.
    """
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = dict(zip(packages, threads.map(_failure, packages), strict=True))
    return {package: why for package, why in found.items() if why}


def _failure(package: str) -> str:
    """Return why a package cannot be imported; empty if it can."""
    command = [sys.executable, "-c", f"import {_module(package)}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes longer than {_IMPORT_SECONDS} s"
    if done.returncode < 0:
        return f"it ends its process with {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
    return said[-1] if done.returncode else ""


def _module(package: str) -> str:
    return _MODULES.get(package, package.replace("-", "_"))


def lacking(requirement: Requirement, versions: Mapping[str, str]) -> Lack | None:
    """Return what is missing; None if nothing is."""
    version = versions[requirement.package]
    if not version:
        return Lack(requirement.package, wrong=False)
    if not fits(version, requirement.bounds):
        return Lack(f"{requirement.package}{requirement.bounds}, and {version} is installed", wrong=True)
    return None


def fits(version: str, bounds: str) -> bool:
    """Return whether a version is within bounds. Only its numbers count."""
    for sign, bound in _BOUND.findall(bounds):
        one, other = _numbers(version), _numbers(bound)
        length = max(len(one), len(other))
        one, other = (each + (0,) * (length - len(each)) for each in (one, other))
        if not {">=": one >= other, "<=": one <= other, "==": one == other, "<": one < other, ">": one > other}[sign]:
            return False
    return True


def parsed(requirements: Iterable[str]) -> Iterator[Requirement]:
    """Yield the requirements of a package that hold here, as its metadata has them."""
    here = {"sys_platform": sys.platform, "platform_machine": platform.machine()}
    for text in requirements:
        found = _REQUIREMENT.match(text)
        assert found is not None
        package, bounds, marker = found[1], found[2].strip(), found[3]
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker or "")
        name = extra[1] if extra is not None else ""
        # Markers are expressions of Python, and these are our own.
        if not marker or eval(marker, {"__builtins__": {}}, {**here, "extra": name}):
            yield Requirement(package, bounds, name)


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(map(int, release[0].split("."))) if release is not None else ()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _imported(package: str) -> Iterator[DoctorFinding]:
    """Import what is installed; yield why that fails, if it does."""
    try:
        importlib.import_module(_module(package))
    except Exception as error:  # whatever it is: a build for another processor, half an installation
        text = f"{package} is installed, and cannot be imported: {type(error).__name__}: {error}"
        yield DoctorFinding(FindingLevel.PROBLEM, text, f"pip install --force-reinstall {package}")
