"""Settling down where an instance belongs: on its cores, with memory from its node. For workers, too."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection
from typing import Final

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""The number of the system call, by machine: the C library has no function for it."""
_BIND: Final = 2
_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def settle(cores: Collection[int], memory_node: int) -> str:
    """Have this thread, and all that it starts from now on, run on ``cores`` and get memory from a node alone.

    No cores and a node below 0 change nothing. Returns what could not be done, to be logged: containers often forbid
    the choice of memory, and an instance runs without it.
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
