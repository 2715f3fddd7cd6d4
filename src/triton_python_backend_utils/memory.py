"""Where a model would like the answers of other models. Kept for models that say so; here it is always host memory."""

from __future__ import annotations

from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import INT64, BindingEnum, Mismatch
from triton_python_backend_utils.errors import incompatible


class MemoryType(BindingEnum):
    """Kinds of memory, with Triton's numbers."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """A wish for the memory of a response's tensors."""

    __slots__ = ("device_id", "memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        try:
            self.memory_type = arguments.instance(preferred_memory_type, MemoryType)
            self.device_id = arguments.integer("preferred_device_id", preferred_device_id, INT64)
        except Mismatch as mismatch:
            is_default = type(preferred_device_id) is int and preferred_device_id == 0
            raise incompatible(
                "PreferredMemory(preferred_memory_type: triton::backend::python::PreferredMemory::MemoryType, "
                "preferred_device_id: int = 0)",
                mismatch,
                preferred_memory_type,
                *(() if is_default else (preferred_device_id,)),
            ) from None
