"""Where a model would like the answers of other models. Kept for models that say so; here it is always host memory."""

from __future__ import annotations

from enum import IntEnum

from triton_python_backend_utils.errors import incompatible


class MemoryType(IntEnum):
    """Kinds of memory, with Triton's numbers."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """A wish for the memory of a response's tensors."""

    __slots__ = ("device_id", "memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise incompatible(
                "PreferredMemory(preferred_memory_type: triton::backend::python::PreferredMemory::MemoryType, "
                "preferred_device_id: int = 0)",
                preferred_memory_type,
            )
        self.memory_type = preferred_memory_type
        self.device_id = preferred_device_id
