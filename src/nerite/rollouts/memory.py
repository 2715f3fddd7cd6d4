"""Whether the memory of host and GPUs holds baseline and candidate at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.config.model_config import ModelConfig
from nerite.observability import gpus, machine
from nerite.repository.catalogue import directory_fingerprint
from nerite.rollouts.difference import Difference, blocks, notes, warns

_FILE_LEAST: Final = 1 << 20
"""Bytes of model files from which memory is taken to be proportional to them."""
_MORE: Final = 1.5
"""How many times the baseline's memory is worth a warning."""
_VLLM_SHARE: Final = 0.9
"""Share of a GPU that vLLM reserves unless it is told otherwise."""


class GpuRoom(NamedTuple):
    """Memory of one GPU in bytes."""

    number: int
    total: int
    free: int


class VersionMemory(NamedTuple):
    """Memory of one version in bytes."""

    files: int
    """Size of its files."""
    measured: int
    """Private memory of its workers; 0 if it is not loaded, or runs in the server's process."""
    gpus: Mapping[int, int]
    """Number of instances by GPU."""
    reserved: float = 0.0
    """Share of each GPU that its engine reserves; 0 if it takes what it needs."""


class MemoryRoom(NamedTuple):
    """Memory that is free."""

    host: int
    """Bytes; 0 if unknown."""
    gpus: Sequence[GpuRoom] = ()
    limit: int = 0
    """Bytes that baseline and candidate may use together; 0: no other limit than the host's."""


def read_room(limit: int) -> MemoryRoom:
    """Read the free memory of host and GPUs. Blocks."""
    library, _ = gpus.find_library()
    found = []
    for gpu in library.gpus(os.environ.get("CUDA_VISIBLE_DEVICES")):
        memory = library.memory(gpu)
        if memory is not None:
            found.append(GpuRoom(gpu.number, memory.total, memory.total - memory.used))
    return MemoryRoom(machine.available_memory(), found, limit)


def read_version(directory: Path | None, config: ModelConfig, measured: int) -> VersionMemory:
    """Read the size of a version's files. Blocks."""
    files = 0 if directory is None else sum(size for _, size, _ in directory_fingerprint(directory))
    instances: dict[int, int] = {}
    for group in config.instance_group:
        for number in group.gpus if group.kind == "KIND_GPU" else ():
            instances[number] = instances.get(number, 0) + group.count
    return VersionMemory(files, measured, instances, _reserved(directory, config))


def _reserved(directory: Path | None, config: ModelConfig) -> float:
    engine = config.parameters["ENGINE"].string_value if "ENGINE" in config.parameters else config.backend
    if engine != "vllm" or directory is None:
        return 0.0
    try:
        arguments: Any = json.loads((directory / "model.json").read_bytes())
        return float(arguments.get("gpu_memory_utilization", _VLLM_SHARE))
    except (OSError, ValueError, TypeError, AttributeError):
        return _VLLM_SHARE


def estimate(baseline: VersionMemory, candidate: VersionMemory) -> int:
    """Return the host memory that the candidate will need at least, in proportion to the files of both."""
    if candidate.gpus:
        return baseline.measured
    if baseline.measured and min(baseline.files, candidate.files) >= _FILE_LEAST:
        return max(candidate.files, baseline.measured * candidate.files // baseline.files)
    return max(candidate.files, baseline.measured)


def room_differences(baseline: VersionMemory, candidate: VersionMemory, room: MemoryRoom) -> Iterator[Difference]:
    """Yield what keeps the candidate from being loaded beside the baseline."""
    needed = estimate(baseline, candidate)
    if room.limit and baseline.measured + needed > room.limit:
        text = f"Together they exceed the limit of {size_text(room.limit)}: raise it, or choose a smaller model."
        yield blocks("memory", size_text(baseline.measured), f"about {size_text(needed)}", text)
    elif room.host and needed > room.host:
        text = f"Only {size_text(room.host)} of memory are free: loading it may end processes of this machine."
        yield blocks("memory", size_text(baseline.measured), f"about {size_text(needed)}", text)
    for gpu in room.gpus:
        count = candidate.gpus.get(gpu.number, 0)
        wanted = int(gpu.total * candidate.reserved) if candidate.reserved else candidate.files * count
        if count and wanted > gpu.free:
            taken = size_text(gpu.total - gpu.free)
            text = f"Only {size_text(gpu.free)} are free on this GPU: lower what each of them reserves, or add a GPU."
            yield blocks(f"memory of GPU {gpu.number}", f"{taken} in use", f"about {size_text(wanted)}", text)


def measured_differences(baseline: int, candidate: int, limit: int) -> Iterator[Difference]:
    """Compare the measured memory of both, which are loaded."""
    if limit and baseline + candidate > limit:
        text = f"Together they exceed the limit of {size_text(limit)}."
        yield blocks("memory", size_text(baseline), size_text(candidate), text)
    elif baseline and candidate > baseline * _MORE:
        text = "The candidate needs much more memory for the same number of instances."
        yield warns("memory", size_text(baseline), size_text(candidate), text)
    elif candidate and baseline > candidate * _MORE:
        yield notes("memory", size_text(baseline), size_text(candidate), "The candidate needs less memory.")


def size_text(size: int) -> str:
    """Return a size for people."""
    number = float(size)
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
