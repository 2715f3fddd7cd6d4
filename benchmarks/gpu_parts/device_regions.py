"""Regions of CUDA shared memory, as NVIDIA's client makes and registers them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from gpu_parts.callers import Protocol
from gpu_parts.part import Part, Skipped
from nerite.tools.bench.forms import BenchOutput, BenchTensor, RegionPlace
from serving import Serving

_numbers = itertools.count()


class DeviceRegions:
    """Device memory of this process that is registered with a server. A context manager that undoes both.

    Raises ``Skipped`` where there is no card.
    """

    def __init__(self, part: Part, server: Serving, protocol: Protocol) -> None:
        if not part.gpu:
            raise Skipped("not rehearsed here: it needs a card")
        from tritonclient.utils import cuda_shared_memory

        self._cuda = cuda_shared_memory
        if protocol == "http":
            self.client: Any = tritonclient.http.InferenceServerClient(server.http)
        else:
            self.client = tritonclient.grpc.InferenceServerClient(server.grpc)
        self._regions: dict[str, Any] = {}
        self._registered: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._registered:
            self.client.unregister_cuda_shared_memory(name)
        for region in self._regions.values():
            self._cuda.destroy_shared_memory_region(region)
        self.client.close()

    def listed(self) -> list[str]:
        """Return the names of the regions that the server lists."""
        status = self.client.get_cuda_shared_memory_status()
        return [each["name"] for each in status] if isinstance(status, list) else [*status.regions]

    def region(self, size: int) -> str:
        """Make and register a region; return its name."""
        name = f"exam-{os.getpid()}-{next(_numbers)}"
        self._regions[name] = region = self._cuda.create_shared_memory_region(name, size, 0)
        self.client.register_cuda_shared_memory(name, self._cuda.get_raw_handle(region), 0, size)
        self._registered.append(name)
        return name

    def inputs(self, arrays: Mapping[str, NDArray[Any]]) -> list[BenchTensor]:
        """Copy arrays to regions of their own; return tensors that are there."""
        placed = []
        for name, values in arrays.items():
            region = self.region(values.nbytes)
            self._cuda.set_shared_memory_region(self._regions[region], [values])
            datatype = np_to_triton_dtype(values.dtype)
            placed.append(BenchTensor(name, datatype, values.shape, RegionPlace(region, values.nbytes)))
        return placed

    def outputs(self, sizes: Mapping[str, int]) -> list[BenchOutput]:
        """Make a region for each output, of so many bytes."""
        return [BenchOutput(name, RegionPlace(self.region(size), size)) for name, size in sizes.items()]

    def read(self, region: str, shape: tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
        """Return what is in a region."""
        found: NDArray[Any] = self._cuda.get_contents_as_numpy(self._regions[region], dtype, list(shape))
        return found
