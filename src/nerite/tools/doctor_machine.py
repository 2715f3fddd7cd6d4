"""Findings of ``nerite doctor`` about the machine: hardware and installed packages, each with its remedy."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
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
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import nerite
from nerite.backends import machine
from nerite.backends.python.environments import environments_folder
from nerite.observability.machine import CGROUP, MEMINFO, cgroup_limit, memory_sizes, number_in

GB: Final = 1 << 30
MB: Final = 1 << 20


class FindingLevel(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing, but not a fault."""
    WARNING = "warning"
    """Likely to cause trouble."""
    PROBLEM = "problem"
    """Prevents something from working."""


class DoctorFinding(NamedTuple):
    """One finding and its remedy."""

    level: FindingLevel
    text: str
    remedy: str = ""
    """What to do; empty if nothing needs to be done."""


ok = partial(DoctorFinding, FindingLevel.OK)
note = partial(DoctorFinding, FindingLevel.NOTE)
warning = partial(DoctorFinding, FindingLevel.WARNING)
problem = partial(DoctorFinding, FindingLevel.PROBLEM)


def size(amount: float) -> str:
    """Return a number of bytes in human-readable form, in MB or GB."""
    return f"{amount / GB:.1f} GB" if amount >= GB else f"{amount / MB:.0f} MB"


# Cores, memory and disk, as far as the container is allowed to use them.

_MIN_MEMORY: Final = GB
_MIN_DISK: Final = 5 * GB


class MachineMemory(NamedTuple):
    """Memory in bytes; 0 where a value is unknown."""

    total: int
    available: int
    limit: int
    """Memory limit of the container, or 0 if it has none."""
    used: int
    """Part of the limit that is in use."""


def machine_findings() -> Iterator[DoctorFinding]:
    """Yield findings about the operating system, cores, memory and disk."""
    yield ok(f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield of_cores(machine.usable_cores(), os.cpu_count() or 1, machine.core_quota())
    yield of_memory(memory())
    yield of_disk(environments_folder(os.environ.get("NERITE_ENVIRONMENT_DIRECTORY", "")))


def of_cores(usable: int, total: int, quota: int) -> DoctorFinding:
    """Return the finding about the number of usable cores."""
    if usable < total:
        why = f"the CPU quota allows {quota}" if quota == usable else "the CPU affinity excludes the others"
        return note(f"{usable} of {total} cores: {why}")
    if usable == 1:
        remedy = "Provide at least two: on one core, the server and a model's worker compete for it."
        return note("1 core", remedy)
    return ok(f"{usable} cores")


def of_memory(found: MachineMemory) -> DoctorFinding:
    """Return the finding about available memory."""
    total, available = found.total, found.available
    if 0 < found.limit < total:
        total, available = found.limit, min(available, found.limit - found.used)
    if not total:
        return note("the amount of memory cannot be determined")
    where = " that the container may use" if total == found.limit else ""
    text = f"{size(available)} free of {size(total)} of memory{where}"
    if available < _MIN_MEMORY:
        return warning(text, "Free or add memory: the kernel kills workers when memory runs out.")
    return ok(text)


def of_disk(directory: Path) -> DoctorFinding:
    """Return the finding about the directory where environments and converted models are stored."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    where = f"environments and converted models are stored in {directory}"
    if not os.access(existing, os.W_OK):
        remedy = "Choose another directory with NERITE_ENVIRONMENT_DIRECTORY or --environment-directory."
        return warning(f"{where}, which is not writable", remedy)
    free = shutil.disk_usage(existing).free
    text = f"{where}: {size(free)} free"
    if free < _MIN_DISK:
        return warning(text, "Remove old ones: nerite environments --remove --unused-for 30")
    return ok(text)


def memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> MachineMemory:
    """Return the memory of this machine and container, as the kernel reports it."""
    try:
        sizes = memory_sizes(meminfo)
    except OSError:
        sizes = {"MemTotal": 0, "MemAvailable": 0}
    used = number_in(cgroup / "memory.current") or number_in(cgroup / "memory" / "memory.usage_in_bytes")
    return MachineMemory(sizes["MemTotal"], sizes["MemAvailable"], cgroup_limit(cgroup), used)


# Installed packages: Python, the dependencies of Nerite, and its extras.

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
"""Module of each package whose module has a different name."""
IMPORT_SECONDS: Final = 120
_SOUND_PYTHON: Final = {(3, 11): (3, 11, 13), (3, 12): (3, 12, 11), (3, 13): (3, 13, 4)}
"""By minor version, the first one in which the data filter of tar archives can be relied upon."""
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)(?:;\s*(.*))?")
_BOUND: Final = re.compile(r"(>=|<=|==|<|>)\s*([0-9][0-9.]*)")


class Requirement(NamedTuple):
    """A package that Nerite or one of its extras requires."""

    package: str
    bounds: str
    """Version bounds such as ``>=1.2,<2``."""
    extra: str
    """The extra that requires the package, or "" for Nerite itself."""


class MissingPackage(NamedTuple):
    """A required package that is missing or installed in a wrong version."""

    text: str
    wrong: bool
    """True if it is installed in a version outside the bounds."""


def findings() -> Iterator[DoctorFinding]:
    """Yield findings about Python, the dependencies of Nerite, and its extras."""
    yield ok(f"nerite {nerite.__version__}, Python {platform.python_version()} in {sys.prefix}")
    yield from of_python(sys.version_info[:3])
    try:
        requirements = list(parsed(metadata.requires(_OURS) or ()))
    except metadata.PackageNotFoundError:
        yield note("nerite runs from source without being installed: its requirements are unknown")
        return
    versions = {each.package: _version(each.package) for each in requirements}
    core = [each for each in requirements if not each.extra]
    yield from of_core(core, versions)
    for each in core:
        if versions[each.package]:
            yield from _imported(each.package)
    extras = [each for each in requirements if each.extra and each.extra not in _NOT_FOR_SERVING]
    yield from of_extras(extras, versions, broken({each.package for each in extras if versions[each.package]}))


def of_python(version: tuple[int, int, int]) -> Iterator[DoctorFinding]:
    """Yield a finding about a version of CPython with known vulnerabilities that concern servers of models."""
    sound = _SOUND_PYTHON.get(version[:2], version)
    if version < sound:
        found, needed = (".".join(map(str, each)) for each in (version, sound))
        text = f"Python {found} may unpack archives to places outside of their directory (CVE-2025-4517)"
        yield warning(text, f"Install Python {needed} or newer. Nerite checks archives itself; other packages may not.")


def of_core(requirements: Iterable[Requirement], versions: Mapping[str, str]) -> Iterator[DoctorFinding]:
    """Yield a finding for each missing dependency. ``versions`` has the installed version of each package, or ""."""
    for each in requirements:
        if (lack := missing_package(each, versions)) is not None:
            yield problem(f"Nerite requires {lack.text}", f"pip install '{each.package}{each.bounds}'")


def of_extras(
    requirements: Iterable[Requirement], versions: Mapping[str, str], broken: Mapping[str, str]
) -> Iterator[DoctorFinding]:
    """Yield findings about installed and missing extras. ``broken`` says why a package cannot be imported."""
    extras: dict[str, list[Requirement]] = {}
    for each in requirements:
        if each.extra not in _NOT_FOR_SERVING:
            extras.setdefault(each.extra, []).append(each)
    installed, missing = [], []
    for name, wanted in sorted(extras.items()):
        lacks = [lack for each in wanted if (lack := missing_package(each, versions)) is not None]
        wrong = [lack for lack in lacks if lack.wrong]
        failing = [each.package for each in wanted if each.package in broken]
        if failing:
            why = "; ".join(f"{package} is installed but cannot be imported: {broken[package]}" for package in failing)
            remedy = f"pip install --force-reinstall {' '.join(failing)}"
            yield warning(f"the extra '{name}' does not work: {why}", remedy)
        elif not lacks:
            installed.append(f"{name} ({', '.join(f'{each.package} {versions[each.package]}' for each in wanted)})")
        elif len(wrong) == len(lacks):
            text = f"the extra '{name}' requires {' and '.join(lack.text for lack in wrong)}"
            yield warning(text, f"pip install '{_OURS}[{name}]'")
        else:
            missing.append(f"{name} (lacks {', '.join(lack.text for lack in lacks)})")
    yield ok(f"installed extras: {', '.join(installed) or 'none'}")
    if missing:
        remedy = f"pip install '{_OURS}[NAME]' for those that your models need (docs/frameworks.md)"
        yield note(f"extras that are not installed: {', '.join(missing)}", remedy)


def broken(packages: Collection[str]) -> dict[str, str]:
    """Import each package in a separate process, and return the reason for each that cannot be imported. Blocks.

    Separate processes, because packages are heavy, may conflict, and may crash the process.
    """
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = dict(zip(packages, threads.map(_failure, packages), strict=True))
    return {package: why for package, why in found.items() if why}


def _failure(package: str) -> str:
    """Return the reason why a package cannot be imported, or "" if it can."""
    command = [sys.executable, "-c", f"import {_module(package)}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=IMPORT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"the import takes longer than {IMPORT_SECONDS} s"
    if done.returncode < 0:
        return f"the import crashes with {signal.Signals(-done.returncode).name}"
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1] if done.returncode else ""


def _module(package: str) -> str:
    return _MODULES.get(package, package.replace("-", "_"))


def missing_package(requirement: Requirement, versions: Mapping[str, str]) -> MissingPackage | None:
    """Return what a requirement lacks, or None if it is met."""
    version = versions[requirement.package]
    if not version:
        return MissingPackage(requirement.package, wrong=False)
    if not fits(version, requirement.bounds):
        return MissingPackage(f"{requirement.package}{requirement.bounds}, but {version} is installed", wrong=True)
    return None


def fits(version: str, bounds: str) -> bool:
    """Return whether a version is within bounds; suffixes such as ``+cpu`` are ignored."""
    for sign, bound in _BOUND.findall(bounds):
        one, other = _numbers(version), _numbers(bound)
        length = max(len(one), len(other))
        one, other = (each + (0,) * (length - len(each)) for each in (one, other))
        if not {">=": one >= other, "<=": one <= other, "==": one == other, "<": one < other, ">": one > other}[sign]:
            return False
    return True


def parsed(requirements: Iterable[str]) -> Iterator[Requirement]:
    """Parse the requirements in a package's metadata, and yield those that apply to this platform."""
    here = {"sys_platform": sys.platform, "platform_machine": platform.machine()}
    for text in requirements:
        found = _REQUIREMENT.match(text)
        assert found is not None
        package, bounds, marker = found[1], found[2].strip(), found[3]
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", marker or "")
        name = extra[1] if extra is not None else ""
        # Markers are Python expressions, and these come from our own metadata.
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
    """Import a package in this process; yield a finding if that fails."""
    try:
        importlib.import_module(_module(package))
    except Exception as error:  # any error is possible: a build for another CPU, an incomplete installation
        text = f"{package} is installed but cannot be imported: {type(error).__name__}: {error}"
        yield problem(text, f"pip install --force-reinstall {package}")
