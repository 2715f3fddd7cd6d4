"""What is installed: Python, what Nerite needs, and the extras."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import nerite
from nerite.cli.doctor.finding import Finding, Level

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


def findings() -> Iterator[Finding]:
    """Yield what is found here."""
    yield Finding(Level.OK, f"nerite {nerite.__version__}, Python {platform.python_version()} in {sys.prefix}")
    try:
        requirements = list(parsed(metadata.requires(_OURS) or ()))
    except metadata.PackageNotFoundError:
        yield Finding(Level.NOTE, "nerite runs from its source, uninstalled: what it needs is not known")
        return
    versions = {each.package: _version(each.package) for each in requirements}
    core = [each for each in requirements if not each.extra]
    yield from of_core(core, versions)
    for each in core:
        if versions[each.package]:
            yield from _imported(each.package)
    extras = [each for each in requirements if each.extra and each.extra not in _NOT_FOR_SERVING]
    yield from of_extras(extras, versions, broken({each.package for each in extras if versions[each.package]}))


def of_core(requirements: Iterable[Requirement], versions: Mapping[str, str]) -> Iterator[Finding]:
    """Say what Nerite cannot be without, given the versions that are installed, empty for none."""
    for each in requirements:
        if (lack := lacking(each, versions)) is not None:
            yield Finding(Level.PROBLEM, f"Nerite needs {lack.text}", f"pip install '{each.package}{each.bounds}'")


def of_extras(
    requirements: Iterable[Requirement], versions: Mapping[str, str], broken: Mapping[str, str]
) -> Iterator[Finding]:
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
            yield Finding(Level.WARNING, f"the extra '{name}' does not work: {why}", remedy)
        elif not lacks:
            there.append(f"{name} ({', '.join(f'{each.package} {versions[each.package]}' for each in wanted)})")
        elif len(wrong) == len(lacks):
            text = f"the extra '{name}' needs {' and '.join(lack.text for lack in wrong)}"
            yield Finding(Level.WARNING, text, f"pip install '{_OURS}[{name}]'")
        else:
            not_there.append(f"{name} (lacks {', '.join(lack.text for lack in lacks)})")
    yield Finding(Level.OK, f"extras: {', '.join(there) or 'none'}")
    if not_there:
        remedy = f"pip install '{_OURS}[NAME]', for what your models need (docs/frameworks.md)"
        yield Finding(Level.NOTE, f"extras that are not installed: {', '.join(not_there)}", remedy)


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


def _imported(package: str) -> Iterator[Finding]:
    """Import what is installed; yield why that fails, if it does."""
    try:
        importlib.import_module(_module(package))
    except Exception as error:  # whatever it is: a build for another processor, half an installation
        text = f"{package} is installed, and cannot be imported: {type(error).__name__}: {error}"
        yield Finding(Level.PROBLEM, text, f"pip install --force-reinstall {package}")
