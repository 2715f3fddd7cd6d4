"""Binding of a thread to cores and to a memory node, and the number of threads of OpenBLAS. Loaded before numpy is."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, by machine: the C library has no wrapper for it."""
_BIND: Final = 2
_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind_to_place(cores: Collection[int], memory_node: int) -> str:
    """Bind this thread, and all that it starts later, to ``cores`` and to the memory of a node.

    Empty cores and a negative node change nothing. Returns a message to log if the memory could not be bound:
    containers often forbid that, and an instance runs without it.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    refusal = _bind_memory(memory_node) if memory_node >= 0 else ""
    return refusal and f"memory may be from any NUMA node, not from node {memory_node} alone: {refusal}"


def _bind_memory(node: int) -> str:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"it is not known how to ask for that on {platform.machine()}"
    words = (ctypes.c_ulong * (node // _BITS + 1))()
    words[node // _BITS] = 1 << node % _BITS
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, _BIND, words, len(words) * _BITS + 1) == 0:
        return ""
    return f"set_mempolicy was refused ({os.strerror(ctypes.get_errno())})"


# OpenBLAS, with which numpy multiplies matrices, starts a thread per core when numpy is imported. Each polls for work
# for some 25 ms before it sleeps: on two cores that is half of the import's processor time. Most programs here multiply
# no matrices.

GENERAL: Final = "OMP_NUM_THREADS"
OPENBLAS: Final = "OPENBLAS_NUM_THREADS"
"""Takes precedence over ``GENERAL``."""
_SETTERS: Final = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)
"""Names of one function in different builds. Those that end in ``_`` or ``_64_`` are for Fortran, and take a
pointer."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Have OpenBLAS use one thread in this process if it is loaded within the block, unless a variable says otherwise.

    Child processes that are started afterwards are not concerned.
    """
    if OPENBLAS in os.environ or GENERAL in os.environ:
        yield
        return
    os.environ[OPENBLAS] = "1"
    try:
        yield
    finally:
        os.environ.pop(OPENBLAS, None)


def adopt_thread_count(environment: Mapping[str, str], maps: Path = Path("/proc/self/maps")) -> None:
    """Make OpenBLAS use the count in ``environment``, or a thread per core: it was loaded before that was known."""
    count = environment.get(OPENBLAS) or environment.get(GENERAL) or str(_cores())
    if not count.isdecimal():
        return
    with suppress(OSError):  # not on Linux
        for path in {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "openblas" in line}:
            library = ctypes.CDLL(path)
            for setter in _SETTERS:
                if hasattr(library, setter):
                    library[setter](int(count))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
