"""The interface of Triton's in-process Python package ``tritonserver``: ``import nerite.tritonserver as tritonserver``.

Names and arguments are Triton's; what differs is listed in docs/functions.md.
"""

from nerite.tritonserver.errors import (
    AlreadyExistsError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    TritonError,
    UnavailableError,
    UnknownError,
    UnsupportedError,
)
from nerite.tritonserver.options import (
    LogFormat,
    MetricFormat,
    ModelControlMode,
    Options,
    RateLimiterResource,
    RateLimitMode,
)
from nerite.tritonserver.requests import InferenceRequest, InferenceResponse
from nerite.tritonserver.server import Model, ModelDictionary, Server
from nerite.tritonserver.tensor import DataType, MemoryType, Tensor

__all__ = [
    "AlreadyExistsError",
    "DataType",
    "InferenceRequest",
    "InferenceResponse",
    "InternalError",
    "InvalidArgumentError",
    "LogFormat",
    "MemoryType",
    "MetricFormat",
    "Model",
    "ModelControlMode",
    "ModelDictionary",
    "NotFoundError",
    "Options",
    "RateLimitMode",
    "RateLimiterResource",
    "Server",
    "Tensor",
    "TritonError",
    "UnavailableError",
    "UnknownError",
    "UnsupportedError",
]
