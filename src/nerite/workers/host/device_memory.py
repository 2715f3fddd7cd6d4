"""What one worker uses of the server's pools on GPUs: those it has opened, and the parts that it may write to."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nerite.core.errors import Internal
from nerite.core.tensor import DeviceBuffer
from nerite.devices import cuda
from nerite.devices.devices import Devices
from nerite.devices.pools import DevicePool
from nerite.workers.ipc import messages

_SHARE: Final = 8
"""A worker is granted at least this part of a pool at a time."""


class WorkerDeviceMemory:
    """The device memory of one worker. For the loop's thread only."""

    def __init__(self, devices: Devices, send: Callable[[bytes], None]) -> None:
        """``send`` sends a message to the worker."""
        self._devices = devices
        self._send = send
        self._known: set[int] = set()
        """GPUs whose pool the worker has opened."""
        self._grants: list[DeviceBuffer] = []
        self._closed = False

    def place(self, buffer: DeviceBuffer) -> tuple[int, DeviceBuffer] | None:
        """Return the offset in the pool of its GPU of a tensor that is there, and the tensor."""
        pool = self._devices.pool(buffer.device)
        offset = None if pool is None else pool.offset_of(buffer)
        if pool is None or offset is None:
            raise Internal(f"a tensor for a worker is on GPU {buffer.device}, but not in the server's pool there")
        self._introduce(pool)
        return offset, buffer

    def base(self, device: int, offset: int, size: int) -> tuple[int, object]:
        """Return the address of a pool, and the part granted to the worker that has ``size`` bytes at ``offset``.

        Raises ``Internal`` if there is none: a worker must not have the server read what is not its own.
        """
        pool = self._devices.pool(device)
        assert pool is not None, "the worker has a part of it"
        for grant in self._grants:
            if grant.device == device and 0 <= pool.base + offset - grant.address <= grant.size - size:
                return pool.base, grant
        raise Internal(f"the worker has no part of the pool on GPU {device} with {size} bytes at {offset}")

    def wanted(self, device: int, size: int) -> None:
        """Grant the worker room for tensors of ``size`` bytes, if there is room."""

        def grant(pool: DevicePool | None) -> None:
            if self._closed or pool is None:
                return
            part = pool.allocate(max(pool.size // _SHARE, size))
            if part is None and size < pool.size // _SHARE:
                part = pool.allocate(size)
            if part is None:
                return  # the worker asks again later
            self._introduce(pool)
            self._grants.append(part)
            offset = part.address - pool.base
            self._send(
                messages.json_frame(messages.DEVICE_GRANT, {"device": device, "offset": offset, "size": part.size})
            )

        self._devices.with_pool(device, grant)

    def copied(self, since: Mapping[str, Sequence[int]]) -> None:
        """Count copies that the worker has made."""
        for direction, (count, size) in since.items():
            cuda.COPIES.add(direction, size, count)

    def close(self) -> None:
        """Take back what the worker was granted, once no tensor is in it. The worker has ended."""
        self._closed = True
        self._grants.clear()

    def _introduce(self, pool: DevicePool) -> None:
        if pool.device not in self._known:
            self._known.add(pool.device)
            described = {"device": pool.device, "handle": pool.handle.hex(), "base": pool.base, "pid": os.getpid()}
            self._send(messages.json_frame(messages.DEVICE_POOL, described))
