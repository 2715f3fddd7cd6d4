"""What figures depend on beside the configuration, and what of it is no longer as it was."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import nerite
from nerite.backends.cores import usable_cores
from nerite.config.model_config import ModelConfig
from nerite.observability import gpus
from nerite.repository.fingerprint import Entry, of_model

Conditions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Values by a name within a subject, of which JSON can be made."""

_PACKAGES: Final = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
    "pytorch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "litert": ("ai-edge-litert",),
    "fil": ("xgboost", "treelite", "lightgbm"),
}
"""By backend, what computes."""
_KINDS: Final = {"files": "the files of the models", "machine": "the machine", "software": "the software"}


def conditions(load: Mapping[str, Any], directories: Mapping[Path, ModelConfig], varied: Collection[str]) -> Conditions:
    """Return the conditions of now, for models in these directories, some of which are ``varied``, under this load."""
    files = [_files(directory, config=config.name not in varied) for directory, config in directories.items()]
    backends = [config.backend for config in directories.values()]
    return {
        "load": dict(load),
        "files": {name: told for each in files for name, told in each},
        "machine": dict(_machine()),
        "software": dict(_software(backends)),
    }


def differences(then: Conditions, now: Conditions) -> list[str]:
    """Return what is not as it was: a line for each subject, and one below it for each value."""
    found = []
    for kind in now:
        old, new = then.get(kind, {}), now[kind]
        other = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
        if other:
            found.append(f"{_KINDS.get(kind, 'the ' + kind)}:")
            found += [f"    {name}: {_value(old, name)} then, {_value(new, name)} now" for name in other]
    return found


def _value(values: Mapping[str, Any], name: str) -> str:
    return str(values[name]) if name in values else "nothing"


def _files(directory: Path, *, config: bool) -> Iterator[tuple[str, str]]:
    """Yield each file, and how it looks. A configuration that is varied is known by what it says."""
    seen = of_model(directory)
    if config and seen.config is not None:
        yield from _told(directory.name, [seen.config])
    for version, entries in seen.versions.items():
        yield from _told(f"{directory.name}/{version}", entries)
    yield from _told(directory.name, seen.shared)


def _told(folder: str, entries: Iterable[Entry]) -> Iterator[tuple[str, str]]:
    for path, size, time_ns in entries:
        when = datetime.fromtimestamp(time_ns / 1e9, UTC)
        yield f"{folder}/{path}", f"{size:,} bytes of {when:%Y-%m-%d %H:%M:%S.%f}"


def _machine() -> Iterator[tuple[str, Any]]:
    yield "processor", _processor()
    yield "cores", usable_cores()
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GB"
    library, _ = gpus.find_library()
    found = library.gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    yield "GPUs", ", ".join(gpu.name for gpu in found) or "none"


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _software(backends: Iterable[str]) -> Iterator[tuple[str, str]]:
    yield "nerite", nerite.__version__
    yield "Python", platform.python_version()
    for package in dict.fromkeys(package for backend in backends for package in _PACKAGES.get(backend, ())):
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
