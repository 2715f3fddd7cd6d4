"""A card as the parts of the exam look at it: its memory as NVML tells it, and memory that is held on purpose."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from nerite.observability.gpus import Gpu, GpuLibrary, GpuMemory, find_library


@dataclass(frozen=True)
class Card:
    """A card, seen from the driver."""

    library: GpuLibrary
    gpu: Gpu

    @classmethod
    def first(cls) -> Self:
        """Return the card that CUDA calls 0. Raises ``RuntimeError`` if there is none."""
        library, why_not = find_library()
        found = library.gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if not found:
            raise RuntimeError(f"NVML finds no card: {why_not or 'CUDA_VISIBLE_DEVICES hides them'}")
        return cls(library, found[0])

    @property
    def uuid(self) -> str:
        """The card's name, which is unique."""
        return self.gpu.uuid

    def memory(self) -> GpuMemory:
        """Return its memory, in bytes. Raises ``RuntimeError`` if it does not tell."""
        found = self.library.memory(self.gpu)
        if found is None:
            raise RuntimeError(f"{self.gpu.name} does not tell how much of its memory is in use")
        return found

    def settles(self, holds: Callable[[int], bool], seconds: float) -> int:
        """Return the bytes in use once ``holds`` is true of them, or after so many seconds."""
        until = time.monotonic() + seconds
        while not holds(used := self.memory().used) and time.monotonic() < until:
            time.sleep(0.05)
        return used

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Have so many bytes of the card in use."""
        import torch

        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        try:
            yield
        finally:
            del held
            torch.cuda.empty_cache()
