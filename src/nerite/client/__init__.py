"""A client for servers that speak KServe v2 over HTTP: Nerite, Triton, and others. See docs/client.md.

Needs nothing of the server's: it imports ``nerite.core`` alone.
"""

from nerite.client.client import Client
from nerite.client.completion import Part
from nerite.client.description import Model, ModelVersion, TensorDescription
from nerite.client.error import ClientError
from nerite.client.statistics import Measure, ModelStatistics

__all__ = ["Client", "ClientError", "Measure", "Model", "ModelStatistics", "ModelVersion", "Part", "TensorDescription"]
