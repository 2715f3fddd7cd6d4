"""Pools of memory for tensors: pinned memory on the host, and memory of a GPU that other processes can open.

Each is one allocation of CUDA, made when it is first needed, and cut by the buddy algorithm: allocating from CUDA at
each request would cost more than the copy, and freeing makes the whole GPU wait.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from typing import Any, Final

import numpy as np

from nerite.core.tensor import DeviceBuffer
from nerite.devices import cuda

SMALLEST: Final = 512
"""Bytes of the smallest block: a multiple of what CUDA aligns to."""


class BuddyAllocator:
    """Divides a range of bytes into blocks of powers of two; neighbours that are free become one again. Thread-safe."""

    def __init__(self, size: int, smallest: int = SMALLEST) -> None:
        """What ``size`` exceeds a multiple of ``smallest`` by is not used."""
        self._smallest = smallest
        self._sizes: dict[int, int] = {}
        """Of the allocated blocks, by offset."""
        self._free: dict[int, set[int]] = {}
        """Offsets of free blocks, by size."""
        self._given_back: deque[int] = deque()
        """Blocks to be freed: a destructor may run at any time, also while the lock is held."""
        self._lock = threading.Lock()
        self._used = 0
        at = 0
        while size - at >= smallest:
            block = 1 << (size - at).bit_length() - 1
            self._free.setdefault(block, set()).add(at)
            at += block

    @property
    def used(self) -> int:
        """Bytes of the allocated blocks."""
        with self._lock:
            self._reclaim()
            return self._used

    def allocate(self, size: int) -> int | None:
        """Return the offset of a block of at least ``size`` bytes; None if none is left."""
        wanted = max(self._smallest, 1 << (size - 1).bit_length() if size > 1 else 1)
        with self._lock:
            self._reclaim()
            block = min((free for free, offsets in self._free.items() if free >= wanted and offsets), default=0)
            if not block:
                return None
            offset = self._free[block].pop()
            while block > wanted:
                block >>= 1
                self._free.setdefault(block, set()).add(offset + block)
            self._sizes[offset] = block
            self._used += block
            return offset

    def block(self, size: int) -> Block | None:
        """Return a block of at least ``size`` bytes, freed with the last reference to it; None if none is left."""
        offset = self.allocate(size)
        return None if offset is None else Block(self, offset, size)

    def give_back(self, offset: int) -> None:
        """Free a block. May be called by a destructor."""
        self._given_back.append(offset)

    def _reclaim(self) -> None:
        while self._given_back:
            offset = self._given_back.popleft()
            size = self._sizes.pop(offset)
            self._used -= size
            while (buddy := offset ^ size) in self._free.get(size, ()):
                self._free[size].remove(buddy)
                offset = min(offset, buddy)
                size <<= 1
            self._free.setdefault(size, set()).add(offset)


class PinnedPool:
    """Pinned memory on the host, which copies between it and a GPU leave the processor free for. Thread-safe."""

    def __init__(self, size: int) -> None:
        """Allocate the memory: blocks for some tens of milliseconds. Raises ``NeriteError``."""
        self.size = size
        self._blocks = BuddyAllocator(size)
        self._base = cuda.allocate_pinned(size)
        self._memory = memoryview((ctypes.c_char * size).from_address(self._base)).cast("B")
        self._live: dict[int, weakref.ref[Any]] = {}

    @property
    def used(self) -> int:
        """Bytes of the blocks that are in use."""
        return self._blocks.used

    def allocate(self, size: int) -> memoryview | None:
        """Return ``size`` writable bytes, freed with the last view on them; None if there is no room."""
        offset = self._blocks.allocate(size)
        if offset is None:
            return None
        array = np.frombuffer(self._memory, np.uint8, size, offset)
        key, give_back, live = id(array), self._blocks.give_back, self._live

        def gone(_: object) -> None:
            del live[key]
            give_back(offset)

        live[key] = weakref.ref(array, gone)
        data: memoryview = array.data
        return data

    def holds(self, address: int) -> bool:
        """Return whether the bytes at an address of the host are pinned."""
        return 0 <= address - self._base < self.size

    def close(self) -> None:
        """Free the memory, unless some of it is still in use: then the end of the process frees it."""
        if not self._live:
            cuda.free_pinned(self._base)


class Block:
    """A block of an allocator, given back with the last reference to it."""

    __slots__ = ("__weakref__", "_blocks", "offset", "size")

    def __init__(self, blocks: BuddyAllocator, offset: int, size: int) -> None:
        self._blocks = blocks
        self.offset = offset
        self.size = size

    def __del__(self) -> None:
        self._blocks.give_back(self.offset)


class DevicePool:
    """Memory of one GPU that the workers of this server can open. Thread-safe.

    It belongs to the server, also where a worker writes into it: nothing vanishes with a worker.
    """

    def __init__(self, device: int, size: int) -> None:
        """Allocate the memory on the thread's current GPU, which is ``device``. Raises ``NeriteError``."""
        self.device = device
        self.size = size
        self._blocks = BuddyAllocator(size)
        self.base = cuda.allocate(size)
        self.handle = cuda.export_handle(self.base)

    @property
    def used(self) -> int:
        """Bytes of the blocks that are in use, those that workers have been granted included."""
        return self._blocks.used

    def allocate(self, size: int) -> DeviceBuffer | None:
        """Return ``size`` bytes, freed with the last reference to them; None if there is no room."""
        block = self._blocks.block(size)
        return None if block is None else DeviceBuffer(self.device, self.base + block.offset, size, block)

    def offset_of(self, buffer: DeviceBuffer) -> int | None:
        """Return where a buffer begins in the pool; None if it is elsewhere."""
        offset = buffer.address - self.base
        return offset if 0 <= offset < self.size else None

    def close(self) -> None:
        """Free the memory. No worker may use it any more."""
        cuda.free(self.base)
