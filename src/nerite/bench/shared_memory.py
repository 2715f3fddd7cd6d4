"""Tensors in system shared memory: inputs that are written once, and room for outputs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from types import TracebackType
from typing import Final

from nerite.bench.forms.tensor import Output, Place, Tensor
from nerite.bench.server import Server
from nerite.client.error import Unreachable

_ALIGNMENT: Final = 64
_numbers = itertools.count()


class Regions:
    """The regions of a measurement. A context manager: the server forgets them, and they are gone, at its end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._held: list[SharedMemory] = []
        self._registered: list[str] = []

    def __enter__(self) -> Regions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for memory in self._held:
            memory.close()
            memory.unlink()
        # Where the server has gone, there is nothing to forget.
        with suppress(Unreachable):
            for region in self._registered:
                self._server.unregister_shared_memory(region)

    def inputs(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Put the data of tensors into a region of their own; return the tensors that say where they are."""
        sizes = [len(tensor.data) for tensor in tensors if not isinstance(tensor.data, Place)]
        memory = self._new(sum(map(_aligned, sizes)))
        placed, at = [], 0
        for tensor in tensors:
            if isinstance(tensor.data, Place):
                placed.append(tensor)
                continue
            size = len(tensor.data)
            assert memory.buf is not None
            memory.buf[at : at + size] = tensor.data
            placed.append(Tensor(tensor.name, tensor.datatype, tensor.shape, Place(memory.name, size, at)))
            at += _aligned(size)
        return tuple(placed)

    def outputs(self, names: Sequence[str], size: int) -> tuple[Output, ...]:
        """Return outputs with room for ``size`` bytes each. Nobody reads them, so all requests may share them."""
        memory = self._new(len(names) * _aligned(size))
        return tuple(Output(name, Place(memory.name, size, at * _aligned(size))) for at, name in enumerate(names))

    def _new(self, size: int) -> SharedMemory:
        memory = SharedMemory(f"nerite-bench-{os.getpid()}-{next(_numbers)}", create=True, size=max(size, 1))
        self._held.append(memory)
        self._server.register_shared_memory(memory.name, f"/{memory.name}", memory.size)
        self._registered.append(memory.name)
        return memory


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
