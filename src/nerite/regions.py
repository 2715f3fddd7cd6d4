"""System shared memory that clients have registered: requests say where in it a tensor lies, or is to be written.

A region is mapped when it is registered and used in place, by workers too (``GuestMemory``). It is forgotten when it is
unregistered; whoever reads or writes it at that moment keeps the mapping until done.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from nerite.core.errors import AlreadyExists, Internal, InvalidArgument, NeriteError, NotFound, Unsupported
from nerite.core.request import SharedPlace
from nerite.execution.arena import Segment, address_of
from nerite.execution.guest_memory import GuestMemory

_FOLDER: Final = Path("/dev/shm")
_RESERVED: Final = "triton_python_backend_shm_region_"
_DISABLED: Final = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


class Region(NamedTuple):
    """A part of a shared memory file."""

    name: str
    key: str
    offset: int
    byte_size: int
    memory: memoryview
    """Its bytes, writable."""
    guest: int
    """Its number in the ``GuestMemory``."""


class Regions:
    """Every region there is, by name."""

    def __init__(self, guests: GuestMemory, *, allowed: bool) -> None:
        """``allowed``: clients may register regions."""
        self._guests = guests
        self._allowed = allowed
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map a part of the file ``key``. Raises Triton's refusals."""
        self._check_allowed()
        if name in self._regions:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
        if key.removeprefix("/").startswith(_RESERVED):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved "
                f"prefix '{_RESERVED}'"
            )
        descriptor = _opened(key)
        try:
            memory = _mapped(name, descriptor, offset, byte_size)
        except NeriteError:
            os.close(descriptor)
            raise
        guest = self._guests.add(descriptor, offset, byte_size, address_of(memory))
        self._regions[name] = Region(name, key, offset, byte_size, memory, guest)

    def unregister(self, name: str) -> None:
        """Forget a region, all of them for an empty name; one that there is not is no mistake."""
        self._check_allowed()
        for each in [name] if name else list(self._regions):
            region = self._regions.pop(each, None)
            if region is not None:
                self._guests.remove(region.guest)

    def listed(self, name: str) -> list[Region]:
        """Return a region, or all of them for an empty name. Raises ``NotFound``."""
        if not name:
            return [self._regions[each] for each in sorted(self._regions)]
        if name not in self._regions:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [self._regions[name]]

    def view(self, place: SharedPlace) -> memoryview:
        """Return the bytes of a place, writable. Raises Triton's refusals."""
        region = self._regions.get(place.region)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{place.region}'")
        if place.offset >= region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{place.region}'")
        end = place.offset + place.byte_size
        if not place.byte_size or end > region.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{place.region}'")
        return region.memory[place.offset : end]

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
        if name in self._regions:
            raise NotFound(f"The region named '{name}' is registered as system shared memory, not CUDA shared memory")
        if name:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise Unsupported(_DISABLED)


def _opened(key: str) -> int:
    """Return a descriptor of a shared memory file."""
    file = key.removeprefix("/")
    if not file or "/" in file or file in (".", ".."):
        raise Internal(f"Unable to open shared memory region: '{key}'")
    try:
        return os.open(_FOLDER / file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (OSError, ValueError):
        raise Internal(f"Unable to open shared memory region: '{key}'") from None


def _mapped(name: str, descriptor: int, offset: int, byte_size: int) -> memoryview:
    """Map ``byte_size`` bytes of a file from ``offset`` on."""
    try:
        size = os.fstat(descriptor).st_size
        if not byte_size or offset + byte_size > size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': invalid args\n    The file has {size} bytes; "
                f"{byte_size} from {offset} on were asked for."
            )
        return Segment(descriptor, byte_size, offset).array(0, byte_size).data
    except OSError as error:
        raise InvalidArgument(
            f"failed to register shared memory region '{name}': unable to process address space: {error.strerror}"
        ) from None
