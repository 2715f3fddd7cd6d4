"""Memory of a process: what it allocated on GPUs, what it opened of other processes, and what it pinned on the host."""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cuda.stand_in.address_space import AddressSpace, map_pages, unmap_pages
from cuda.stand_in.counters import Counters
from cuda.stand_in.enums import Failure, cudaError_t
from cuda.stand_in.files import ALLOCATION, held
from cuda.stand_in.handles import Exported

_FRESH = b"\xa5" * (1 << 20)
"""What is in memory that was just allocated."""

ALLOCATED, OPENED, HOST, REGISTERED = "allocated", "opened", "host", "registered"


@dataclass(slots=True)
class Region:
    """A range of addresses that CUDA knows."""

    address: int
    size: int
    origin: str
    device: int
    """Its GPU, or for host memory the one that was current."""
    number: int = 0
    """Of an allocation: its number in this process."""
    name: str = ""
    """Of memory that was opened: the name of its file."""
    references: int = 1

    @property
    def on_device(self) -> bool:
        return self.origin in (ALLOCATED, OPENED)


class Memory:
    """Thread-safe. Methods raise ``Failure``."""

    def __init__(self, folder: Path | None, capacity: int, counters: Counters) -> None:
        self._folder = folder
        self._capacity = capacity
        self._counters = counters
        self._pid = os.getpid()
        self._space = AddressSpace()
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._addresses: list[int] = []
        self._count = 0

    def allocated(self) -> list[Region]:
        """Return what this process has allocated on GPUs and has not freed."""
        with self._lock:
            return [each for each in self._regions.values() if each.origin == ALLOCATED]

    def info(self, device: int) -> tuple[int, int]:
        """Return how many bytes of a GPU are free, and how many it has."""
        if self._folder is None:
            used = sum(each.size for each in self.allocated() if each.device == device)
        else:
            used = sum(each.size for each in held(self._folder) if (each.kind, each.device) == (ALLOCATION, device))
        return max(self._capacity - used, 0), self._capacity

    def region(self, address: int, size: int = 1) -> Region | None:
        """Return the region that has ``size`` bytes at ``address``, or None if that is ordinary memory of the host.

        Fails if not all of them are in the region, or if there is nothing any more.
        """
        with self._lock:
            region = self._find(address)
        if region is None:
            if address in self._space:
                raise Failure(cudaError_t.cudaErrorInvalidValue)
            return None
        if address + size > region.address + region.size:
            raise Failure(cudaError_t.cudaErrorInvalidValue)
        return region

    # Memory of GPUs.

    def allocate(self, device: int, size: int) -> int:
        """Return the address of new memory."""
        if not size:
            return 0
        with self._allocating():
            if size > self.info(device)[0]:
                raise Failure(cudaError_t.cudaErrorMemoryAllocation)
            self._count += 1
            number = self._count
            descriptor = self._create(_name(device, self._pid, number), size)
        with self._lock:
            try:
                address = self._space.map(size, descriptor)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
            self._add(Region(address, size, ALLOCATED, device, number))
        if descriptor < 0:
            ctypes.memset(address, _FRESH[0], size)
        self._counters.add("allocations")
        self._counters.add("live_bytes", size)
        return address

    def free(self, address: int) -> None:
        """Free memory that ``allocate`` returned. Mappings of other processes stay as they are."""
        with self._lock:
            region = self._owned(address, ALLOCATED)
            self._drop(region)
        if self._folder is not None:
            (self._folder / _name(region.device, self._pid, region.number)).unlink(missing_ok=True)
        self._counters.add("frees")
        self._counters.add("live_bytes", -region.size)

    def export(self, address: int) -> Exported:
        """Return what is to be said of the allocation that has ``address``."""
        region = self.region(address)
        if region is None or region.origin != ALLOCATED:
            raise Failure(cudaError_t.cudaErrorInvalidValue)
        if self._folder is None:
            raise Failure(cudaError_t.cudaErrorNotSupported)
        return Exported(region.device, self._pid, region.number, region.size)

    def open(self, exported: Exported) -> int:
        """Return the address of memory that another process allocated: the same each time, until it is closed."""
        device, pid, number, size = exported
        if self._folder is None:
            raise Failure(cudaError_t.cudaErrorNotSupported)
        if pid == self._pid:
            raise Failure(cudaError_t.cudaErrorDeviceUninitialized)
        name = _name(device, pid, number)
        with self._lock:
            region = next((each for each in self._regions.values() if each.name == name), None)
            if region is None:
                region = Region(self._map(name, size), size, OPENED, device, name=name)
                self._add(region)
            else:
                region.references += 1
        self._counters.add("handles_opened")
        return region.address

    def close(self, address: int) -> None:
        """Close what ``open`` returned, once for each time."""
        with self._lock:
            region = self._owned(address, OPENED)
            region.references -= 1
            if not region.references:
                self._drop(region)
                assert self._folder is not None
                (self._folder / self._mapping(region.name)).unlink(missing_ok=True)
        self._counters.add("handles_closed")

    # Memory of the host.

    def allocate_host(self, device: int, size: int) -> int:
        """Return the address of new memory of the host, which is pinned."""
        if not size:
            return 0
        try:
            address = map_pages(size)
        except OSError:
            raise Failure(cudaError_t.cudaErrorMemoryAllocation) from None
        with self._lock:
            self._add(Region(address, size, HOST, device))
        self._counters.add("pinned_allocations")
        return address

    def free_host(self, address: int) -> None:
        """Free what ``allocate_host`` returned."""
        with self._lock:
            region = self._owned(address, HOST)
            self._drop(region)
        self._counters.add("pinned_frees")

    def register(self, device: int, address: int, size: int) -> None:
        """Pin memory of the host."""
        if not size or not address or address in self._space:
            raise Failure(cudaError_t.cudaErrorInvalidValue)
        with self._lock:
            if self._find(address + size - 1, overlapping=size) is not None:
                raise Failure(cudaError_t.cudaErrorHostMemoryAlreadyRegistered)
            self._add(Region(address, size, REGISTERED, device))
        self._counters.add("pinned_allocations")

    def unregister(self, address: int) -> None:
        """Undo ``register``."""
        with self._lock:
            self._drop(self._owned(address, REGISTERED, cudaError_t.cudaErrorHostMemoryNotRegistered))
        self._counters.add("pinned_frees")

    # Regions; with the lock.

    def _find(self, address: int, overlapping: int = 1) -> Region | None:
        """Return the last region that begins at ``address`` or before, if it has one of the bytes that end there."""
        place = bisect.bisect_right(self._addresses, address)
        if not place:
            return None
        region = self._regions[self._addresses[place - 1]]
        return region if region.address + region.size > address + 1 - overlapping else None

    def _add(self, region: Region) -> None:
        self._regions[region.address] = region
        bisect.insort(self._addresses, region.address)

    def _owned(self, address: int, origin: str, otherwise: cudaError_t = cudaError_t.cudaErrorInvalidValue) -> Region:
        """Return the region that begins at ``address``. Fails with ``otherwise`` if it is not of this origin."""
        region = self._regions.get(address)
        if region is None or region.origin != origin:
            raise Failure(otherwise)
        return region

    def _drop(self, region: Region) -> None:
        del self._regions[region.address]
        self._addresses.remove(region.address)
        if region.on_device:
            self._space.unmap(region.address, region.size)
        elif region.origin == HOST:
            unmap_pages(region.address, region.size)

    # Files.

    @contextmanager
    def _allocating(self) -> Iterator[None]:
        """Let one thread of all processes that share the folder allocate at a time."""
        if self._folder is None:
            yield
            return
        descriptor = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _create(self, name: str, size: int) -> int:
        """Create the file of an allocation and return its descriptor; -1 without a folder."""
        if self._folder is None:
            return -1
        file = self._folder / name
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            for offset in range(0, size, len(_FRESH)):
                os.write(descriptor, _FRESH[: size - offset])
            if os.fstat(descriptor).st_size != size:
                raise OSError("no space left")
        except OSError:
            os.close(descriptor)
            file.unlink()
            raise Failure(cudaError_t.cudaErrorMemoryAllocation) from None
        return descriptor

    def _map(self, name: str, size: int) -> int:
        """Map the file of another process, and tell so in the folder."""
        assert self._folder is not None
        if not any(each.name == name for each in held(self._folder)):
            raise Failure(cudaError_t.cudaErrorInvalidResourceHandle)
        try:
            descriptor = os.open(self._folder / name, os.O_RDWR)
        except FileNotFoundError:
            raise Failure(cudaError_t.cudaErrorInvalidResourceHandle) from None
        try:
            if os.fstat(descriptor).st_size != size:
                raise Failure(cudaError_t.cudaErrorMapBufferObjectFailed)
            address = self._space.map(size, descriptor)
        finally:
            os.close(descriptor)
        mapping = self._folder / self._mapping(name)
        mapping.touch()
        os.truncate(mapping, size)
        return address

    def _mapping(self, name: str) -> str:
        return f"mapping-{self._pid}-{name}"


def _name(device: int, pid: int, number: int) -> str:
    return f"{device}-{pid}-{number}"
