"""Client for servers that speak KServe v2 over HTTP: Nerite, Triton and others. See docs/client.md.

Independent of the server: it imports only ``nerite.core``.
"""

from nerite.client.client import Client
from nerite.client.connection import ClientError
from nerite.client.models import (
    CompletionPart,
    DurationCount,
    ModelDescription,
    ModelStatistics,
    ModelVersion,
    TensorDescription,
)

__all__ = [
    "Client",
    "ClientError",
    "DurationCount",
    "ModelDescription",
    "ModelStatistics",
    "ModelVersion",
    "CompletionPart",
    "TensorDescription",
]
