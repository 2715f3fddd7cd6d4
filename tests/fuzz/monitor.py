"""What a server holds: memory, descriptors, threads, files; and whether that is more than it was."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fuzz.symptoms import Symptom
from process_family import lives, processes_of

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_SHM: Final = Path("/dev/shm")
_ARENA: Final = "/memfd:nerite (deleted)"
"""Memory that processes share for large tensors: some files for each, made when there is the first such tensor."""
_HELPER: Final = "helper"
_OF_HELPER: Final = {"socket:": 1, "pipe:": 2}
"""A process for what may take long, made when there is the first of that, and what the server has open for it."""
_MAX_THREADS: Final = 8
"""Threads that a process makes when it needs the first of them, and keeps."""
SLACK: Final = 24_000_000
"""Bytes by which the memory of a process may grow beside its caches.

Arenas of malloc and pools of Python keep what the largest inputs at a time needed (64 KB each, some hundred under way,
in several forms) and break up as sizes vary. This is an estimate: a leak of less is not seen.
"""
_WARM_UP: Final = 0.3
"""The part of the samples after which memory is compared: caches fill until then, and every path was taken once."""


class Sample(NamedTuple):
    """What there was at a moment when nothing was under way."""

    processes: Counter[str]
    memory: dict[str, int]
    """Bytes by process; of several of one name the most."""
    descriptors: dict[str, Counter[str]]
    """What is open, by process: kinds of files and how many of each."""
    threads: dict[str, int]
    caches: int
    """Bytes of the server's caches of what clients send, by its own account."""
    files: frozenset[str]
    """Names in the folder for temporary files."""


def sample(server: int, temporary: Path, caches: int) -> Sample:
    """Return what a server and its processes hold."""
    processes: Counter[str] = Counter()
    memory, descriptors, threads = {}, {}, {}
    for pid in (server, *processes_of(server)):
        folder = Path(f"/proc/{pid}")
        try:
            name = "server" if pid == server else _name(folder)
            processes[name] += 1
            memory[name] = int((folder / "statm").read_text().split()[1]) * _PAGE
            descriptors[name] = _open_files(folder)
            threads[name] = len(os.listdir(folder / "task"))
        except (OSError, IndexError):
            continue
    return Sample(processes, memory, descriptors, threads, caches, frozenset(os.listdir(temporary)))


def with_router(found: Sample, router: int) -> Sample:
    """Return a sample of a server with the process in front of it, whose connections to the server stay open."""
    folder = Path(f"/proc/{router}")
    memory = {**found.memory, "router": int((folder / "statm").read_text().split()[1]) * _PAGE}
    threads = {**found.threads, "router": len(os.listdir(folder / "task"))}
    descriptors = {name: Counter(kinds) for name, kinds in found.descriptors.items()}
    descriptors["router"] = _open_files(folder)
    for name in ("server", "router"):
        del descriptors[name]["socket:"]
    return found._replace(memory=memory, threads=threads, descriptors=descriptors)


def _open_files(folder: Path) -> Counter[str]:
    """Return the kinds of what a process has open."""
    found: Counter[str] = Counter()
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found[re.sub(r"\[?\d+\]?", "", os.readlink(link))] += 1
    return found


def _name(folder: Path) -> str:
    return (folder / "comm").read_text().strip()


def more_open(before: Sample, now: Sample) -> list[Symptom]:
    """Return which descriptors, threads and files there are that were not there before."""
    found = []
    new = now.processes - before.processes
    helpers = new.pop(_HELPER, 0)
    if new:
        found.append(Symptom("processes", min(new), f"more than before: {dict(new)}"))
    for name, open_now in now.descriptors.items():
        more = open_now - before.descriptors.get(name, open_now)
        if name == "server":
            more -= Counter({each: count * helpers for each, count in _OF_HELPER.items()})
        del more[_ARENA]
        if more:
            found.append(Symptom("descriptors", name, f"more than before: {dict(more)}"))
    for name, count in now.threads.items():
        if name in before.threads and count > before.threads[name] + _MAX_THREADS:
            found.append(Symptom("threads", name, f"{count}, and {before.threads[name]} before"))
    if files := now.files - before.files:
        found.append(Symptom("temporary files", "server", str(sorted(files)[:20])))
    return found


def growth(samples: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """Return, for each process, its memory after the warm-up and at the end: medians of several samples."""
    later = samples[int(len(samples) * _WARM_UP) :]
    third = len(later) // 3
    if third < 1:
        return {}
    first, last = later[:third], later[-third:]
    return {
        name: tuple(int(statistics.median(each.memory.get(name, 0) for each in part)) for part in (first, last))  # type: ignore[misc]
        for name in last[-1].memory
        if all(name in each.memory for each in (*first, *last))
    }


def grown(samples: Sequence[Sample]) -> list[Symptom]:
    """Return which processes have more memory at the end than after the warm-up, beyond ``SLACK`` and their caches."""
    found = []
    for name, (before, after) in growth(samples).items():
        allowed = SLACK
        if name in ("server", "router"):
            allowed += max(0, samples[-1].caches - samples[int(len(samples) * _WARM_UP)].caches)
        if after - before > allowed:
            text = (
                f"{after / 1e6:.0f} MB, and {before / 1e6:.0f} MB after the warm-up; {allowed / 1e6:.0f} MB more may be"
            )
            found.append(Symptom("memory", name, text))
    return found


def shared_memory_of(server: int) -> set[str]:
    """Return the files in /dev/shm that a server or its processes have open or mapped."""
    found = set()
    for pid in (server, *processes_of(server)):
        folder = Path(f"/proc/{pid}")
        try:
            found.update(re.findall(r"/dev/shm/(\S+)", (folder / "maps").read_text()))
            for link in (folder / "fd").iterdir():
                if (target := Path(os.readlink(link))).parent == _SHM:
                    found.add(target.name)
        except OSError:
            continue
    return found


def ended(pids: Sequence[int]) -> bool:
    """Return whether none of these processes lives."""
    return not any(lives(pid) for pid in pids)
