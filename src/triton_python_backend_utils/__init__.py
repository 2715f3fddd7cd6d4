"""Module that a ``model.py`` written for Triton's Python backend imports.

It is a regular typed package, so models can be type-checked, edited with completion and tested without a server. It
needs only numpy and the standard library. Names, signatures and error texts are those of Triton's own module; the few
differences are documented under Python models.

Where nvidia-pytriton is installed beside Nerite, Triton's own processes for models find this package first. There it
gives way to Triton's module, which is further down the path.
"""

import importlib.util
import os
import sys

from triton_python_backend_utils.errors import TritonError, TritonModelException
from triton_python_backend_utils.logger import Logger
from triton_python_backend_utils.metrics import Metric, MetricFamily, MetricKind
from triton_python_backend_utils.model import (
    ModelConfig,
    get_input_config_by_name,
    get_input_tensor_by_name,
    get_model_dir,
    get_output_config_by_name,
    get_output_tensor_by_name,
    is_model_ready,
    load_model,
    unload_model,
    using_decoupled_model_transaction_policy,
)
from triton_python_backend_utils.request import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    ResponseIterator,
)
from triton_python_backend_utils.request_options import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from triton_python_backend_utils.response import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    InferenceResponseSender,
)
from triton_python_backend_utils.tensor import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)

__all__ = [
    "Tensor",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "ResponseIterator",
    "InferenceTrace",
    "PreferredMemory",
    "MemoryType",
    "TritonError",
    "TritonModelException",
    "ModelConfig",
    "Logger",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "get_input_tensor_by_name",
    "get_output_tensor_by_name",
    "get_input_config_by_name",
    "get_output_config_by_name",
    "using_decoupled_model_transaction_policy",
    "get_model_dir",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "deserialize_bytes_tensor",
    "load_model",
    "unload_model",
    "is_model_ready",
    "TRITON_STRING_TO_NUMPY",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
]

# Messages show the classes under their Triton names, not under the module they are defined in.
for _exported in __all__:
    if isinstance(globals()[_exported], type):
        globals()[_exported].__module__ = __name__ if _exported == "ModelConfig" else "c_python_backend_utils"
del _exported


def _give_way() -> None:
    """Have Triton's own module imported in place of this package."""
    files = (os.path.join(place, f"{__name__}.py") for place in sys.path)
    if (file := next(filter(os.path.isfile, files), None)) is not None:
        spec = importlib.util.spec_from_file_location(__name__, file)
        assert spec is not None and spec.loader is not None
        sys.modules[__name__] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if "c_python_backend_utils" in sys.builtin_module_names:  # which it is in Triton's processes alone
    _give_way()
