"""Memory of the server's pools on GPUs, as a worker sees it: opened once, and written where the server permits it.

A tensor that the model has on a GPU is copied into a part of the pool that the server has granted, on the GPU, and is
sent by its place there. So other processes read it without the host, it is kept until the last of them has read it, and
nothing is lost with this process. While the worker has no room, tensors are sent from the host, and room is asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from nerite.core.tensor import DeviceBuffer
from nerite.devices import cuda, exchange
from nerite.devices.pools import BuddyAllocator
from nerite.workers.ipc import messages

PATIENCE: Final = 5.0
"""Seconds after which a worker asks again for room that the server did not have."""


class _Pool:
    """A pool of the server, opened here, and the parts of it that this worker may write to."""

    def __init__(self, base: int) -> None:
        self.base = base
        self.grants: list[tuple[int, BuddyAllocator]] = []
        """Offset and blocks of each."""
        self.asked: dict[int, float] = {}
        """When room was last asked for, by the bits of the size."""


class WorkerDevices:
    """The pools of the server that this worker has opened. Thread-safe."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """``send`` sends a message to the server."""
        self._send = send
        self._pools: dict[int, _Pool] = {}
        self._asked: dict[int, float] = {}
        """When each GPU was asked for that has no pool here yet."""
        self._reported = 0, cuda.COPIES.totals()

    def opened(self, device: int, handle: str, base: int, pid: int) -> None:
        """Open a pool of the server, whose process this may be."""
        if pid != os.getpid():
            with cuda.current(device):
                base = cuda.open_handle(bytes.fromhex(handle))
        self._pools[device] = _Pool(base)

    def granted(self, device: int, offset: int, size: int) -> None:
        """Take a part of a pool; none if its size is 0."""
        if size:
            self._pools[device].grants.append((offset, BuddyAllocator(size)))
            self._pools[device].asked.clear()

    def base(self, device: int, offset: int, size: int) -> tuple[int, object]:
        """Return the address at which a pool begins here. The server keeps its memory."""
        return self._pools[device].base, None

    def place(self, buffer: DeviceBuffer) -> tuple[int, DeviceBuffer] | None:
        """Copy a tensor into the pool of its GPU; return its offset there, and the copy. None if there is no room."""
        pool = self._pools.get(buffer.device)
        if pool is None:
            self._ask(self._asked, buffer.device, buffer)
            return None
        for start, blocks in tuple(pool.grants):
            block = blocks.block(buffer.size)
            if block is not None:
                offset = start + block.offset
                copy = DeviceBuffer(buffer.device, pool.base + offset, buffer.size, block)
                exchange.copy_on_device(copy, buffer)
                return offset, copy
        self._ask(pool.asked, buffer.size.bit_length(), buffer)
        return None

    def report_copies(self) -> None:
        """Report the copies since the last call to the server, if there were any."""
        number, before = self._reported
        if number == cuda.COPIES.number:
            return
        number = cuda.COPIES.number
        totals = cuda.COPIES.totals()
        self._reported = number, totals
        since = {
            direction: [count - before[direction][0], size - before[direction][1]]
            for direction, (count, size) in totals.items()
        }
        self._send(messages.json_frame(messages.DEVICE_COPIES, since))

    def _ask(self, asked: dict[int, float], key: int, buffer: DeviceBuffer) -> None:
        now = time.monotonic()
        if now - asked.get(key, -PATIENCE) >= PATIENCE:
            asked[key] = now
            self._send(messages.json_frame(messages.DEVICE_WANTED, {"device": buffer.device, "size": buffer.size}))
