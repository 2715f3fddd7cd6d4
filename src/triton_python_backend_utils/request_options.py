"""Options of requests between models: trace and preferred memory."""

from __future__ import annotations

import json

from nerite.core.execution_observer import context_of
from nerite.core.request import InferenceRequest as CoreRequest
from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import INT64, BindingEnum, Mismatch
from triton_python_backend_utils.errors import incompatible


class InferenceTrace:
    """Handle for the trace of a request, to be passed on to the requests that it causes."""

    __slots__ = ("_context", "request")

    def __init__(self, context: str | None = None, /, request: CoreRequest | None = None) -> None:
        self._context = context
        self.request = request
        """The traced request. For the server; not part of Triton's interface."""

    def get_context(self) -> str | None:
        """Return the context for OpenTelemetry's propagator as JSON, or None if the request is not traced."""
        if self._context is None and self.request is not None:
            context = context_of(self.request)
            self._context = None if context is None else json.dumps(context.carrier)
        return self._context


class MemoryType(BindingEnum):
    """Kinds of memory, with Triton's numbers."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU


class PreferredMemory:
    """Memory that the tensors of a response are wanted in. They are on the host if a GPU has no room for them."""

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
