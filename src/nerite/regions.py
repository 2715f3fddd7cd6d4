"""Shared memory regions that clients register, to pass input tensors and receive output tensors.

A region of system shared memory is never mapped. A client may truncate its file at any time, for example when it
restarts with smaller tensors, and SIGBUS kills a process that accesses a mapping beyond the end of its file. So inputs
are read from the file when a request arrives, which also gives the model a snapshot of that time, and outputs are
written to the file; a file that is too short by then fails only one request. Memory of a GPU stays valid while it is
open here, whatever its client does: inputs are used where they are. Front processes open none of it: they know how
large the regions are, and the server process, which has opened them, reads inputs from there and writes outputs to it.

A region that is unregistered while requests use it stays open until the last of them is answered.

With tenants, names are those of an owner: a tenant, or "" for everybody without one. No request reaches the regions of
another owner by their names, nor registers a file that another owner has registered.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from nerite.core.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    NeriteError,
    NotFound,
    Unavailable,
    Unsupported,
)
from nerite.core.failures import system_error
from nerite.core.request import InferenceRequest, ReplySink, SharedMemoryInput, owner_of
from nerite.core.tensor import Buffer, DeviceBuffer, TensorData
from nerite.devices.cuda import HANDLE_SIZE
from nerite.devices.devices import ClientMemory, Devices
from nerite.devices.output_sinks import RegionOutputs

_DIRECTORY: Final = Path("/dev/shm")
_RESERVED: Final = "triton_python_backend_shm_region_"
_DISABLED: Final = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
REMOVED_AFTER: Final = 0.5
"""Seconds between two looks for regions that are no longer used."""
MAX_COPIED: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
"""Limit on the bytes of inputs that are copied outside a model's arena, at any one time."""

Registration: TypeAlias = tuple[int, str, str, str | int, int, int]
"""A region as other processes are told of it: number, owner, name, key of the file or GPU, offset and size."""
_Key: TypeAlias = tuple[str, str]
"""Owner and name of a region."""
Room = Callable[[int], memoryview | None]
"""Allocates writable memory of the given size from a model's arena; returns None if that is not possible."""


class _File:
    """Owner of a file descriptor, which is closed with the last reference to this object."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _in_use(users: Iterable[InferenceRequest]) -> bool:
    return not all(request.finished for request in users)


class Region(NamedTuple):
    """A registered part of a shared memory file."""

    name: str
    key: str
    offset: int
    byte_size: int
    file: _File
    users: weakref.WeakSet[InferenceRequest]
    """Requests with a tensor in the region. Answered requests are included while something references them."""
    number: int
    """Unique among all regions that this server has registered."""
    owner: str
    """The tenant that has registered it; empty for none."""

    @property
    def in_use(self) -> bool:
        """Whether a request with a tensor in the region is unanswered."""
        return _in_use(self.users)


class RemotePart(DeviceBuffer):
    """A part of a region on a GPU that only the server process has opened."""

    __slots__ = ("place",)

    def __init__(self, device: int, place: SharedMemoryInput) -> None:
        super().__init__(device, 0, place.byte_size, None)
        self.place = place


class CudaRegion(NamedTuple):
    """Registered memory of a GPU."""

    name: str
    device: int
    byte_size: int
    memory: ClientMemory | None
    """None in a front process, which does not open it."""
    users: weakref.WeakSet[InferenceRequest]
    """As in ``Region``."""
    number: int
    """As in ``Region``."""
    owner: str
    """As in ``Region``."""

    @property
    def in_use(self) -> bool:
        """Whether a request with a tensor in the region is unanswered."""
        return _in_use(self.users)

    def part(self, place: SharedMemoryInput) -> DeviceBuffer:
        """Return a part of it, whose bounds were checked."""
        if self.memory is None:
            return RemotePart(self.device, place)
        return DeviceBuffer(self.device, self.memory.address + place.offset, place.byte_size, self.memory)


class OutputPlace:
    """Location in a region that an output is written to."""

    __slots__ = ("_offset", "_region", "size")

    def __init__(self, region: Region, offset: int, size: int) -> None:
        self._region = region
        self._offset = region.offset + offset
        self.size = size

    def write(self, data: Buffer) -> None:
        """Write ``data``, of at most ``size`` bytes. Raises ``NeriteError`` if the file has become too short."""
        region = self._region
        descriptor = region.file.descriptor
        if os.fstat(descriptor).st_size < self._offset + len(data):  # writing would extend the file
            raise _too_short(region)
        at, rest = self._offset, memoryview(data)
        try:
            while rest:
                written = os.pwrite(descriptor, rest, at)
                at, rest = at + written, rest[written:]
        except OSError as error:
            reason = system_error(error, _DIRECTORY / region.key.lstrip("/"))
            raise Internal(f"unable to write to shared memory region '{region.name}': {reason}") from None


class SharedMemoryRegions:
    """All registered regions, by owner and name."""

    def __init__(self, *, allowed: bool, devices: Devices | None = None) -> None:
        """``allowed``: clients may register regions. Without ``devices``, none on a GPU."""
        self._allowed = allowed
        self._devices = devices
        self._regions: dict[_Key, Region | CudaRegion] = {}
        self._opening: set[_Key] = set()
        """Names of the regions on GPUs that are being opened."""
        self._numbers = itertools.count(1)
        self._unregistered: set[_Key] = set()
        """Regions that were unregistered while requests used them."""
        self._removing = False
        """Whether ``_remove_unused`` is going to be called again."""
        self._copies = _Copies()

    def register(self, name: str, key: str, offset: int, byte_size: int, owner: str = "") -> None:
        """Register a part of the file ``key``. Raises Triton's errors."""
        self._check_allowed()
        self._remove_unused()
        self._check_new(owner, name)
        if not key.strip("/"):
            raise InvalidArgument(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
        if key.lstrip("/").startswith(_RESERVED):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{_RESERVED}'"
            )
        file = _open(key)
        if any(_same(file, each) for each in self._regions.values() if each.owner != owner):
            raise _cannot_open(key)
        size = os.fstat(file.descriptor).st_size
        if not byte_size or offset + byte_size > size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args\n    The file has {size} bytes, but "
                f"{byte_size} bytes from offset {offset} were requested."
            )
        number = next(self._numbers)
        self._regions[owner, name] = Region(name, key, offset, byte_size, file, weakref.WeakSet(), number, owner)

    def follow(self, registered: Iterable[Registration]) -> None:
        """Replace all regions by those of another process.

        Requests that use a region which is replaced keep it. A file that is gone is left out.
        """
        before = {region.number: region for region in self._regions.values()}
        self._regions = {}
        for number, owner, name, key, offset, byte_size in registered:
            users: weakref.WeakSet[InferenceRequest] = weakref.WeakSet()
            if number in before:
                self._regions[owner, name] = before[number]
            elif isinstance(key, int):
                self._regions[owner, name] = CudaRegion(name, key, byte_size, None, users, number, owner)
            else:
                with suppress(NeriteError):
                    file = _open(key)
                    self._regions[owner, name] = Region(name, key, offset, byte_size, file, users, number, owner)

    def unregister(self, name: str, owner: str = "") -> None:
        """Remove a region, or all of the owner for an empty name, once no request uses it.

        Unknown names are ignored.
        """
        self._unregister(name, owner, Region)

    def _unregister(self, name: str, owner: str, kind: type[Region | CudaRegion]) -> None:
        self._check_allowed()
        found = (each for each in self._regions.values() if isinstance(each, kind) and each.owner == owner)
        self._unregistered.update((owner, each.name) for each in found if not name or each.name == name)
        self._remove_unused()
        self._remove_later()

    def _remove_later(self) -> None:
        """Remove unregistered regions soon after the last request that uses them, whatever else is asked."""
        if not self._unregistered or self._removing:
            return
        self._removing = True

        def again() -> None:
            self._removing = False
            self._remove_unused()
            self._remove_later()

        asyncio.get_running_loop().call_later(REMOVED_AFTER, again)

    def _remove_unused(self) -> None:
        """Remove unregistered regions that no request uses any longer."""
        for key in [key for key in self._unregistered if not self._regions[key].in_use]:
            self._unregistered.remove(key)
            del self._regions[key]

    @property
    def registered(self) -> list[Registration]:
        """Each region that was not unregistered, for ``follow``."""
        self._remove_unused()
        return [
            (each.number, each.owner, each.name, each.key, each.offset, each.byte_size)
            if isinstance(each, Region)
            else (each.number, each.owner, each.name, each.device, 0, each.byte_size)
            for key, each in self._regions.items()
            if key not in self._unregistered
        ]

    def listed(self, name: str, owner: str = "") -> list[Region]:
        """Return a region of an owner, or all of them for an empty name. Raises ``NotFound``."""
        found = self._listed(name, owner, "system")
        return [each for each in found if isinstance(each, Region)]

    def _listed(self, name: str, owner: str, kind: str) -> list[Region | CudaRegion]:
        self._remove_unused()
        if not name:
            return [self._regions[each] for each in sorted(self._regions) if each[0] == owner]
        region = self._regions.get((owner, name))
        if region is None:
            raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")
        is_system = isinstance(region, Region)
        if is_system is not (kind == "system"):
            kinds = ("system", "CUDA") if is_system else ("CUDA", "system")
            raise NotFound(
                f"The region named '{name}' is registered as {kinds[0]} shared memory, not {kinds[1]} shared memory"
            )
        return [region]

    def read(self, place: SharedMemoryInput, room: Room, owner: str = "") -> TensorData:
        """Read an input of an owner now, into memory from ``room`` if that has some; on a GPU, return where it is.

        Raises ``NeriteError``.
        """
        region = self._region_of(place, owner)
        if isinstance(region, CudaRegion):
            return region.part(place)
        size = place.byte_size
        memory = room(size) or self._copies.room(size)
        at, rest = region.offset + place.offset, memory
        try:
            while rest:
                count = os.preadv(region.file.descriptor, [rest], at)
                if not count:
                    raise _too_short(region)
                at, rest = at + count, rest[count:]
        except OSError as error:
            reason = system_error(error, _DIRECTORY / region.key.lstrip("/"))
            raise Internal(f"unable to read shared memory region '{region.name}': {reason}") from None
        return memory

    def use(self, request: InferenceRequest, names: Iterable[str]) -> list[tuple[str, int]]:
        """Keep the regions of these names until ``request`` is answered; return their names and numbers."""
        owner = owner_of(request.header.caller)
        used = [self._regions[owner, name] for name in names if (owner, name) in self._regions]
        for region in used:
            region.users.add(request)
        return [(region.name, region.number) for region in used]

    def use_for_front(self, request: InferenceRequest, used: Iterable[tuple[str, int]]) -> None:
        """Keep the regions that ``use`` returned in a front process.

        Raises ``NotFound`` if a name is that of another region by now: the front has taken the request for the former.
        """
        owner = owner_of(request.header.caller)
        for name, number in used:
            region = self._regions.get((owner, name))
            if region is None:
                continue
            if region.number != number:
                raise _unknown(name)
            region.users.add(request)

    def output(self, place: SharedMemoryInput, owner: str = "") -> OutputPlace | DeviceBuffer:
        """Return the destination of an output of an owner. Raises Triton's errors."""
        region = self._region_of(place, owner)
        if isinstance(region, CudaRegion):
            return region.part(place)
        return OutputPlace(region, place.offset, place.byte_size)

    def part(self, place: SharedMemoryInput, owner: str = "") -> DeviceBuffer:
        """Return a part of an owner's region on a GPU. Raises Triton's errors."""
        region = self._region_of(place, owner)
        if isinstance(region, Region):
            raise _unknown(place.region)
        return region.part(place)

    def outputs(self, sink: ReplySink, places: Mapping[str, DeviceBuffer]) -> ReplySink:
        """Return a sink that writes outputs to regions on GPUs, and then passes the response on.

        In a front process: ``sink``, which gets responses whose outputs were written.
        """
        return sink if self._devices is None else RegionOutputs(sink, self._devices, places)

    def _region_of(self, place: SharedMemoryInput, owner: str) -> Region | CudaRegion:
        """Return the region of ``place`` after checking its bounds. Raises Triton's errors."""
        if self._unregistered:
            self._remove_unused()
        region = self._regions.get((owner, place.region))
        if region is None:
            raise _unknown(place.region)
        if place.offset >= region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{place.region}'")
        if not place.byte_size or place.offset + place.byte_size > region.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{place.region}'")
        return region

    # CUDA shared memory. Without GPUs: the same responses as of a Triton that was built without them.

    async def register_cuda(self, name: str, handle: bytes, device: int, byte_size: int, owner: str = "") -> None:
        """Register memory of a GPU that a client has exported as ``handle``. Raises Triton's errors."""
        self._check_allowed()
        self._remove_unused()
        devices = self._devices
        if devices is None or not devices.usable:
            raise Unsupported(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")
        self._check_new(owner, name)
        if len(handle) != HANDLE_SIZE:
            raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        self._opening.add((owner, name))
        try:
            memory = await devices.open_client_memory(device, handle)
        except NeriteError as error:
            raise InvalidArgument(f"failed to register shared memory region '{name}': {error.message}") from None
        finally:
            self._opening.discard((owner, name))
        if not 0 < byte_size <= memory.size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args\n    The allocation has {memory.size} "
                f"bytes, but {byte_size} bytes were requested."
            )
        number = next(self._numbers)
        self._regions[owner, name] = CudaRegion(name, device, byte_size, memory, weakref.WeakSet(), number, owner)

    def unregister_cuda(self, name: str, owner: str = "") -> None:
        """Remove a region on a GPU, as ``unregister`` does."""
        self._unregister(name, owner, CudaRegion)

    def listed_cuda(self, name: str, owner: str = "") -> list[CudaRegion]:
        """Return an owner's region on a GPU, or all of them for an empty name. Raises ``NotFound``."""
        return [each for each in self._listed(name, owner, "cuda") if isinstance(each, CudaRegion)]

    def _check_new(self, owner: str, name: str) -> None:
        if (owner, name) in self._regions or (owner, name) in self._opening:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise Unsupported(_DISABLED)


class _Copies:
    """Allocates bounded memory for inputs that do not go to a model's arena."""

    def __init__(self) -> None:
        self._used = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def room(self, size: int) -> memoryview:
        """Return ``size`` writable bytes. Raises ``Unavailable`` if too much memory is in use."""
        if self._used + size > MAX_COPIED:
            raise Unavailable(
                f"{size} bytes of shared memory cannot be read now: inputs of unanswered requests occupy "
                f"{self._used} of {MAX_COPIED} bytes"
            )
        array = np.empty(size, np.uint8)
        key = id(array)

        def released(_: object) -> None:
            del self._live[key]
            self._used -= size

        self._live[key] = weakref.ref(array, released)
        self._used += size
        return array.data


def _open(key: str) -> _File:
    """Open a shared memory file."""
    file = key.lstrip("/")
    if not file or "/" in file or file in (".", ".."):
        raise _cannot_open(key)
    try:
        return _File(os.open(_DIRECTORY / file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    except (OSError, ValueError) as error:
        why = ""  # clients must not learn which files of others exist
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            why = f"\n    {system_error(error)}"
        raise _cannot_open(key, why) from None


def _cannot_open(key: str, why: str = "") -> NeriteError:
    return Internal(f"Unable to open shared memory region: '{key}'{why}")


def _same(file: _File, region: Region | CudaRegion) -> bool:
    """Return whether a file is that of a region, whatever it is called."""
    return isinstance(region, Region) and os.path.sameopenfile(file.descriptor, region.file.descriptor)


def _unknown(name: str) -> NeriteError:
    return NotFound(f"Unable to find shared memory region: '{name}'")


def _too_short(region: Region) -> NeriteError:
    size = os.fstat(region.file.descriptor).st_size
    return InvalidArgument(
        f"shared memory region '{region.name}' has been shortened: its file has {size} bytes, and the region ends at "
        f"{region.offset + region.byte_size}. Unregister the region, and register it with its current size."
    )
