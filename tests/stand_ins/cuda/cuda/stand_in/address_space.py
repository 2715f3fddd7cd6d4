"""Addresses of device memory: a range that the process reserves, in which allocations are mapped and unmapped.

No address is used twice, so that one of memory that was freed is recognised.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_RESERVED = 1 << 40
_MAP_FIXED = 0x10
_PROT_NONE = 0
_PROT_ALL = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_pages(size: int, *, address: int = 0, protection: int = _PROT_ALL, flags: int = 0, descriptor: int = -1) -> int:
    """Map a file, or memory if there is none, and return where. Raises ``OSError``."""
    flags |= (_MAP_FIXED if address else 0) | (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    found = _libc.mmap(address, size, protection, flags, descriptor, 0)
    if found == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


def unmap_pages(address: int, size: int) -> None:
    """Unmap what ``map_pages`` mapped without an address."""
    _libc.munmap(address, size)


class AddressSpace:
    """The reserved range. Not thread-safe."""

    def __init__(self) -> None:
        self._start = self._next = map_pages(_RESERVED, protection=_PROT_NONE)

    def __contains__(self, address: int) -> bool:
        return self._start <= address < self._start + _RESERVED

    def map(self, size: int, descriptor: int = -1) -> int:
        """Map a file, or memory that is the process's alone, and return the address. Raises ``OSError``."""
        address = self._next
        map_pages(size, address=address, flags=mmap.MAP_SHARED if descriptor >= 0 else 0, descriptor=descriptor)
        # A page in between, so that one past the end is not the beginning of the next.
        self._next += _pages(size) + mmap.PAGESIZE
        return address

    def unmap(self, address: int, size: int) -> None:
        """Unmap what was mapped. The addresses stay reserved."""
        map_pages(_pages(size), address=address, protection=_PROT_NONE)


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
