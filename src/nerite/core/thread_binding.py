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


# OpenBLAS, with which numpy multiplies matrices, starts a thread per core when numpy is imported, and by default each
# polls for work for 2^26 ticks of the processor or more before it sleeps: 25 to 120 ms when it is loaded, and again
# after each multiplication. That takes processor time from all others, and most programs here multiply no matrices.

GENERAL: Final = "OMP_NUM_THREADS"
OPENBLAS: Final = "OPENBLAS_NUM_THREADS"
"""Takes precedence over ``GENERAL``."""
OPENBLAS_POLLING: Final = "OPENBLAS_THREAD_TIMEOUT"
"""Binary logarithm of the ticks for which a thread polls. Read when OpenBLAS is loaded."""
POLLING: Final = "20"
"""0.3 to 0.5 ms: a multiplication that follows at once finds the threads awake."""
_SETTERS: Final = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_", "_64")
)
"""Names of one function in different builds. Those that end in ``_`` or ``_64_`` are for Fortran, and take a
pointer."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Have OpenBLAS use one thread in this process if it is loaded within the block, unless a variable says otherwise.

    The threads that it starts later poll only briefly. Child processes that are started afterwards are not concerned.
    """
    ours = {} if OPENBLAS in os.environ or GENERAL in os.environ else {OPENBLAS: "1"}
    if OPENBLAS_POLLING not in os.environ:
        ours[OPENBLAS_POLLING] = POLLING
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


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
