"""What models take of the memory of the host and of each GPU: measured, and kept for the next start of the server.

A model in worker processes is measured by these: the resident memory of the processes, in proportion where pages are
shared, and what the driver says that they use of each GPU. For a model in the server's own process, and on GPUs whose
driver does not tell processes apart, it is by how much the use grows during the load.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from nerite.core.memory import OwnMemory, memory_of, resident_of_family
from nerite.instances.in_process import InProcessInstance
from nerite.models.running_version import RunningVersion
from nerite.observability.gpus import Gpu, GpuLibrary
from nerite.observability.machine import cgroup_limit, memory_sizes
from nerite.repository.catalogue import ModelFingerprint
from nerite.scheduling.residency_table import HOST, Amounts

_log = logging.getLogger("nerite.repository")
_SHARE_OF_HOST: Final = 0.8
_SHARE_OF_GPU: Final = 0.9
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of ``mallopt``."""
_LARGE_BLOCK: Final = 1 << 20
_TRIM_SECONDS: Final = 1.0
"""Between two times at which freed memory is given back: that takes milliseconds, in which no thread gets memory."""
_TRIM_SHARE: Final = 0.05
"""Of the budget of the host, by which the server's process grows without models before freed memory is given back."""
_WORKER_BYTES: Final = 32 << 20
"""Of a Python process with numpy, for the estimate of a model that was never loaded."""


class MemoryUse(NamedTuple):
    """What the server's own process uses of the host, and all processes use of each GPU."""

    process: int
    gpus: Mapping[str, int]


class MemoryGauge:
    """Measures memory. Its methods block, and may be called on any thread."""

    def __init__(
        self, library: GpuLibrary, gpus: Sequence[Gpu], in_process: Callable[[], int] = lambda: memory_of(os.getpid())
    ) -> None:
        """``in_process`` returns the memory of the server's own process."""
        self._library = library
        self._gpus = {gpu_place(gpu.number): gpu for gpu in gpus}
        self._in_process = in_process

    def budget(self, host: int, gpu: int) -> dict[str, int]:
        """Return the budget of each place; a size of 0 stands for a share of what there is."""
        budget = {HOST: host or int(_memory_of_host() * _SHARE_OF_HOST)}
        for place, each in self._gpus.items():
            memory = self._library.memory(each)
            if memory is not None:
                budget[place] = min(gpu or int(memory.total * _SHARE_OF_GPU), memory.total)
        return budget

    def use(self) -> MemoryUse:
        """Measure the server's own process, and the GPUs."""
        found = {place: self._library.memory(gpu) for place, gpu in self._gpus.items()}
        return MemoryUse(self._in_process(), {place: each.used for place, each in found.items() if each is not None})

    def of_workers(self, shares: Mapping[int, float]) -> dict[str, int]:
        """Measure worker processes, of each of which a model has a share."""
        amounts = {HOST: round(sum(resident_of_family(pid) * share for pid, share in shares.items()))}
        for place, gpu in self._gpus.items() if shares else ():
            by_process = self._library.memory_of_processes(gpu)
            if used := round(sum(by_process.get(pid, 0) * share for pid, share in shares.items())):
                amounts[place] = used
        return amounts

    def return_large_blocks(self) -> None:
        """Have this process give large blocks, such as weights, back to the system as soon as they are freed.

        By default the C library of GNU keeps blocks of up to 32 MiB for later once it has seen such a block freed.
        """
        with suppress(OSError, AttributeError):  # another C library
            library = ctypes.CDLL(None)
            library.mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK)
            library.mallopt(_TRIM_THRESHOLD, 2 * _LARGE_BLOCK)

    def trim(self) -> None:
        """Give memory that was freed in this process back to the system."""
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _memory_of_host() -> int:
    """Return the memory of the machine, or what the container may use of it."""
    try:
        total = memory_sizes()["MemTotal"]
    except OSError:
        return 1 << 62
    return min(total, cgroup_limit() or total)


def gpu_place(number: int) -> str:
    """Return the name of the place of a GPU."""
    return f"GPU {number}"


def grown(before: MemoryUse, after: MemoryUse) -> dict[str, int]:
    """Return by how much the use of each place has grown."""
    growth = {HOST: after.process - before.process}
    growth |= {place: used - before.gpus.get(place, used) for place, used in after.gpus.items()}
    return {place: amount for place, amount in growth.items() if amount > 0}


class LoadGrowth:
    """Divides the growth of a process among the loads during which it grows, by the size of their files. No I/O."""

    def __init__(self) -> None:
        self._weights: dict[object, int] = {}
        self._grown: dict[object, float] = {}
        self._used = 0

    def begin(self, load: object, files: int, used: int) -> None:
        """Note that a load begins, with ``used`` bytes in use."""
        self._divide(used)
        self._weights[load], self._grown[load] = files + 1, 0.0

    def end(self, load: object, used: int) -> int:
        """Note that a load has ended; return its growth."""
        self._divide(used)
        del self._weights[load]
        return max(round(self._grown.pop(load)), 0)

    def _divide(self, used: int) -> None:
        growth, whole = used - self._used, sum(self._weights.values())
        self._used = used
        for load, weight in self._weights.items():
            self._grown[load] += growth * weight / whole


def files_size(directory: Path) -> int:
    """Return the size of all files under a directory; 0 if they cannot be read. Blocks."""
    try:
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    except OSError:
        return 0


def worker_shares(versions: Iterable[RunningVersion], everyone: Iterable[RunningVersion]) -> dict[int, float]:
    """Return the worker processes of some versions, and their share of each by the number of instances in it.

    ``everyone``: all versions that run.
    """
    seats: dict[int, int] = {}
    for each in _pids(everyone):
        seats[each] = seats.get(each, 0) + 1
    shares: dict[int, float] = {}
    for each in _pids(versions):
        shares[each] = shares.get(each, 0.0) + 1 / max(seats.get(each, 1), 1)
    return {pid: min(share, 1.0) for pid, share in shares.items()}


def runs_here(versions: Iterable[RunningVersion]) -> bool:
    """Return whether an instance of some versions runs in the server's own process."""
    return any(isinstance(instance, InProcessInstance) for version in versions for instance in version.instances)


class ModelMemory:
    """Measures what models take. For the event loop's thread only; what blocks is done in threads of ``loader``."""

    def __init__(self, gauge: MemoryGauge, everyone: Callable[[], Sequence[RunningVersion]], loader: Executor) -> None:
        """``everyone`` returns all versions that have workers."""
        self._gauge = gauge
        self._everyone = everyone
        self._loader = loader
        self.here: dict[str, int] = {}
        """Memory of models in the server's own process."""
        self._at_start = gauge.use().process
        """What that used before it had models."""
        self._trimmed_at = 0.0
        self._trimmed_to = 0

    async def loaded(
        self, name: str, versions: Sequence[RunningVersion], growth: Amounts, files: int
    ) -> dict[str, int]:
        """Return what a model takes: its workers as they are, and of the server's process the ``growth``."""
        size = await self.of_workers(versions)
        if runs_here(versions):
            # Memory that another model has freed may be used again without growth: files are in memory once at least.
            own = OwnMemory.of_load(growth.get(HOST, 0), files)
            self.here[name] = own.size
            size[HOST] = size.get(HOST, 0) + own.size
            inside = [version for version in versions if runs_here([version])]
            for version in inside:
                version.own_memory = own._replace(size=own.size // len(inside))
        for place, amount in growth.items():
            if place != HOST and place not in size:
                size[place] = amount
        return size

    def of_server(self, use: MemoryUse) -> int:
        """Return by how much the server's process has grown since it started, without the models in it."""
        return max(use.process - self._at_start - sum(self.here.values()), 0)

    def is_trim_due(self, use: MemoryUse, budget: int) -> bool:
        """Return whether the server has grown so much since the last ``trim`` that the next may be worth its time."""
        return self.of_server(use) - self._trimmed_to > budget * _TRIM_SHARE

    async def trim(self) -> MemoryUse:
        """Give memory that was freed back to the system, at most once a second; return what is used then."""
        await asyncio.sleep(max(self._trimmed_at + _TRIM_SECONDS - time.monotonic(), 0))
        self._trimmed_at = time.monotonic()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._loader, self._gauge.trim)
        use = await loop.run_in_executor(self._loader, self._gauge.use)
        self._trimmed_to = self.of_server(use)
        return use

    async def asleep(self, versions: Sequence[RunningVersion], files: int) -> dict[str, int]:
        """Return what a model takes that sleeps; without the GPUs whose driver does not tell."""
        size = await self.of_workers(versions)
        # Pinned memory is not among the resident pages of a process everywhere.
        return {**size, HOST: max(size.get(HOST, 0), files)}

    async def of_workers(self, versions: Sequence[RunningVersion]) -> dict[str, int]:
        """Return what the workers of some versions take; empty if they have none."""
        shares = worker_shares(versions, self._everyone())
        if not shares:
            return {}
        return await asyncio.get_running_loop().run_in_executor(self._loader, self._gauge.of_workers, shares)


def expected_rest(size: Amounts, files: int) -> dict[str, int]:
    """Return what a model of this size is expected to take while it sleeps, before that is measured.

    Its weights are in the memory of the host then. vLLM's documentation promises 90 % of the memory of the GPUs.
    """
    return {place: amount // 10 for place, amount in size.items()} | {HOST: size.get(HOST, 0) + files}


def _pids(versions: Iterable[RunningVersion]) -> list[int]:
    processes = [instance.process() for version in versions for instance in version.instances]
    return [process[0] for process in processes if process is not None]


def files_estimate(seen: ModelFingerprint, versions: Iterable[int], gpus: Sequence[int], *, worker: bool) -> Amounts:
    """Return what a model that was never loaded is expected to take: as much as its files, and its process if any."""
    chosen = [entry for version in versions for entry in seen.versions.get(version, ())]
    size = sum(entry[1] for entry in (*chosen, *seen.shared))
    amounts = {HOST: size + (_WORKER_BYTES if worker else 0)}
    for number in gpus:
        amounts[gpu_place(number)] = size
    return amounts


def fingerprint_digest(seen: ModelFingerprint) -> str:
    """Return a text that changes when files of a model are added, removed, or change their size."""
    entries = [*seen.shared, *([seen.config] if seen.config else [])]
    entries += [(f"{version}/{name}", size, 0) for version, files in seen.versions.items() for name, size, _ in files]
    listed = sorted(f"{name} {size}" for name, size, _ in entries)
    return hashlib.sha256("\n".join(listed).encode("utf-8", "surrogateescape")).hexdigest()[:16]


class MeasuredLoad(NamedTuple):
    """What a load of a model has shown."""

    digest: str
    """Of the files that were loaded."""
    size: Amounts
    seconds: float


class MeasuredLoads:
    """The last measurement of each model, in a file that outlives the server. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unwritten = False
        """Something has changed since the file was written."""
        self._found: dict[str, MeasuredLoad] = {}
        self._problem = ""

    def read(self) -> None:
        """Read the file. One that cannot be read is as good as none. Blocks."""
        try:
            document: dict[str, Any] = orjson.loads(self.path.read_bytes())
            self._found = {
                name: MeasuredLoad(
                    str(digest), {str(place): int(size) for place, size in sizes.items()}, float(seconds)
                )
                for name, (digest, sizes, seconds) in document["models"].items()
            }
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("measured sizes of models cannot be read, and are measured again: %s: %s", self.path, error)

    def get(self, name: str, digest: str) -> MeasuredLoad | None:
        """Return the measurement of a model with these files."""
        found = self._found.get(name)
        return found if found is not None and found.digest == digest else None

    def put(self, name: str, load: MeasuredLoad) -> None:
        """Replace the measurement of a model."""
        self._found[name] = load
        self.unwritten = True

    def encoded(self) -> bytes:
        """Return the content of the file, to be written now."""
        self.unwritten = False
        return orjson.dumps({"version": 1, "models": self._found}, list, orjson.OPT_INDENT_2)

    def write(self, content: bytes) -> None:
        """Replace the file, which a crash leaves either old or new. Blocks; a failure is logged once."""
        new = self.path.with_suffix(".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(content)
            new.rename(self.path)
        except OSError as error:
            self.unwritten = True
            if not self._problem:
                _log.warning("measured sizes of models cannot be kept for the next start: %s", error)
            self._problem = str(error)


class OverlappingLoads:
    """The loads in progress, and which models others have loaded during each: the growth of memory is theirs, too."""

    def __init__(self) -> None:
        self._loading: dict[object, Sequence[str]] = {}
        """The models of each load; none once they are loaded and only have to be measured."""
        self._others: dict[object, set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._loading)

    def begin(self, load: object, models: Sequence[str]) -> None:
        """Note that models begin to be loaded."""
        others = {each for members in self._loading.values() for each in members}
        for each in self._others.values():
            each.update(models)
        self._others[load] = others.difference(models)
        self._loading[load] = models

    def loaded(self, load: object) -> list[str]:
        """Return the models of loads that overlapped with one that has ended, except for its measurement.

        A load that begins meanwhile finds the memory in use: they do not overlap.
        """
        self._loading[load] = ()
        return sorted(self._others.pop(load, ()))

    def end(self, load: object) -> None:
        """Forget a load, however it has ended."""
        self._loading.pop(load, None)
        self._others.pop(load, None)


def measurements_file(repositories: Sequence[str], environment: Mapping[str, str]) -> Path:
    """Return the file for the models of some repositories, in the user's state directory."""
    usual = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or Path.home()) / ".local" / "state"
    places = sorted(path if "://" in path else str(Path(path).absolute()) for path in repositories)
    digest = hashlib.sha256("\0".join(places).encode("utf-8", "surrogateescape")).hexdigest()
    return Path(usual).absolute() / "nerite" / "memory" / f"{digest[:16]}.json"
