"""System shared memory that clients have registered: requests say where in it a tensor lies, or is to be written.

A region is never mapped. A client may shorten its file at any time, by mistake if it is started again with smaller
tensors, and a process that reads or writes a mapping beyond the end of its file is ended by SIGBUS. So inputs are read
from the file when a request arrives, which also means that a model sees what was there then, and outputs are written to
the file; a file that is too short by then is an error of one request. A region that is unregistered while requests use
it stays, file and all, until the last of them is answered.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

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
from nerite.core.request import SharedMemoryInput, SharedMemoryRequest
from nerite.core.tensor import Buffer

_FOLDER: Final = Path("/dev/shm")
_RESERVED: Final = "triton_python_backend_shm_region_"
_DISABLED: Final = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
_MOST: Final = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
"""Bytes of inputs that are held at a time, of those that are in no memory of a model."""

Room = Callable[[int], memoryview | None]
"""Returns writable memory of so many bytes; None if there is none of that kind."""


class _File:
    """An open file, which is closed when the last that uses it is gone."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class Region(NamedTuple):
    """A part of a shared memory file."""

    name: str
    key: str
    offset: int
    byte_size: int
    file: _File
    users: weakref.WeakSet[SharedMemoryRequest]
    """Requests with a tensor in it. One that was answered stays as long as something refers to it."""

    @property
    def in_use(self) -> bool:
        """A request with a tensor in it is not answered."""
        return not all(request.finished for request in self.users)


class OutputPlace:
    """Where in a region an output is to be written."""

    __slots__ = ("_offset", "_region", "size")

    def __init__(self, region: Region, offset: int, size: int) -> None:
        self._region = region
        self._offset = region.offset + offset
        self.size = size

    def write(self, data: Buffer) -> None:
        """Write ``data``, of at most ``size`` bytes. Raises ``NeriteError`` if the file has no room for it any more."""
        region = self._region
        descriptor = region.file.descriptor
        if os.fstat(descriptor).st_size < self._offset + len(data):  # writing would make it longer
            raise _too_short(region)
        at, rest = self._offset, memoryview(data)
        try:
            while rest:
                written = os.pwrite(descriptor, rest, at)
                at, rest = at + written, rest[written:]
        except OSError as error:
            reason = system_error(error, _FOLDER / region.key.lstrip("/"))
            raise Internal(f"unable to write to shared memory region '{region.name}': {reason}") from None


class SharedMemoryRegions:
    """Every region there is, by name."""

    def __init__(self, *, allowed: bool) -> None:
        """``allowed``: clients may register regions."""
        self._allowed = allowed
        self._regions: dict[str, Region] = {}
        self._leaving: set[str] = set()
        """Those that were unregistered while requests used them."""
        self._copies = _Copies()

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Take in a part of the file ``key``. Raises Triton's refusals."""
        self._check_allowed()
        self._forget_unused()
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if not key.strip("/"):
            raise InvalidArgument(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
        if key.lstrip("/").startswith(_RESERVED):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{_RESERVED}'"
            )
        file = _opened(key)
        size = os.fstat(file.descriptor).st_size
        if not byte_size or offset + byte_size > size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args\n    The file has {size} bytes; "
                f"{byte_size} from {offset} on were asked for."
            )
        self._regions[name] = Region(name, key, offset, byte_size, file, weakref.WeakSet())

    def unregister(self, name: str) -> None:
        """Forget a region once no request uses it, all of them for an empty name; an unknown one is no mistake."""
        self._check_allowed()
        self._leaving.update(self._regions if not name else self._regions.keys() & {name})
        self._forget_unused()

    def _forget_unused(self) -> None:
        """Forget regions that were unregistered, as far as no request uses them any more."""
        for name in [name for name in self._leaving if not self._regions[name].in_use]:
            self._leaving.remove(name)
            del self._regions[name]

    def listed(self, name: str) -> list[Region]:
        """Return a region, or all of them for an empty name. Raises ``NotFound``."""
        self._forget_unused()
        if not name:
            return [self._regions[each] for each in sorted(self._regions)]
        if name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [self._regions[name]]

    def read(self, place: SharedMemoryInput, room: Room) -> memoryview:
        """Return the bytes that are in a place now, in memory of ``room`` if it has some. Raises ``NeriteError``."""
        region = self._found(place)
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
            reason = system_error(error, _FOLDER / region.key.lstrip("/"))
            raise Internal(f"unable to read shared memory region '{region.name}': {reason}") from None
        return memory

    def use(self, request: SharedMemoryRequest, places: Iterable[SharedMemoryInput]) -> None:
        """Keep the regions of ``places``, which were found in them, until ``request`` is answered."""
        for place in places:
            self._regions[place.region].users.add(request)

    def output(self, place: SharedMemoryInput) -> OutputPlace:
        """Return where an output is to be written. Raises Triton's refusals."""
        return OutputPlace(self._found(place), place.offset, place.byte_size)

    def _found(self, place: SharedMemoryInput) -> Region:
        """Return the region of a place that lies within it. Raises Triton's refusals."""
        if self._leaving:
            self._forget_unused()
        region = self._regions.get(place.region)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{place.region}'")
        if place.offset >= region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{place.region}'")
        if not place.byte_size or place.offset + place.byte_size > region.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{place.region}'")
        return region

    # CUDA's, of which there are none: as a server that was built without GPUs answers.

    def register_cuda(self, name: str) -> None:
        """Refuse."""
        self._check_allowed()
        raise Unsupported(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")

    def unregister_cuda(self, name: str) -> None:
        """Do nothing, as for any region that there is not."""
        self._check_allowed()

    def check_cuda(self, name: str) -> None:
        """Raise ``NotFound`` for any name; an empty one stands for all regions, of which there are none."""
        self._forget_unused()
        if name in self._regions:
            raise NotFound(f"The region named '{name}' is registered as system shared memory, not CUDA shared memory")
        if name:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise Unsupported(_DISABLED)


class _Copies:
    """The memory of inputs for which no model has room, and how much of it there is."""

    def __init__(self) -> None:
        self._used = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def room(self, size: int) -> memoryview:
        """Return ``size`` writable bytes. Raises ``Unavailable`` if too many are in use."""
        if self._used + size > _MOST:
            raise Unavailable(
                f"{size} bytes of shared memory cannot be read now: inputs of requests that are not answered have "
                f"{self._used} of {_MOST} bytes"
            )
        array = np.empty(size, np.uint8)
        key = id(array)

        def gone(_: object) -> None:
            del self._live[key]
            self._used -= size

        self._live[key] = weakref.ref(array, gone)
        self._used += size
        return array.data


def _opened(key: str) -> _File:
    """Return a shared memory file."""
    file = key.lstrip("/")
    if not file or "/" in file or file in (".", ".."):
        raise Internal(f"Unable to open shared memory region: '{key}'")
    try:
        return _File(os.open(_FOLDER / file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
    except (OSError, ValueError) as error:
        why = ""  # What there is for others is not told.
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            why = f"\n    {system_error(error)}"
        raise Internal(f"Unable to open shared memory region: '{key}'{why}") from None


def _too_short(region: Region) -> NeriteError:
    size = os.fstat(region.file.descriptor).st_size
    return InvalidArgument(
        f"shared memory region '{region.name}' has been shortened: its file has {size} bytes, and the region ends at "
        f"{region.offset + region.byte_size}. Unregister the region, and register it with the size that it has."
    )
