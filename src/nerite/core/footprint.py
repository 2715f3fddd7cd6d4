"""Bytes that request and response headers take in memory, with the objects they are made of.

Measured with ``tracemalloc``, which a test repeats, and rounded up: a name counts as if each character took four bytes.
Working it out takes about a microsecond: it is for insertions into a memo or a cache, not for each request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from nerite.core.request import RequestHeader
from nerite.core.response import Parameter, ResponseHeader
from nerite.core.tensor import TensorSpec

REQUEST: Final = 2048
RESPONSE: Final = 448
INPUT: Final = 768
"""Of an input, with what the backend of its model leaves on the header."""
SPEC: Final = 320
"""Of any other tensor: an output, a state."""
DIMENSION: Final = 40
REQUESTED: Final = 448
"""Of a requested output, with its part of the header's identity."""
PARAMETER: Final = 448
"""Of a parameter beside its name and value, with its part of the header's identity."""


def of_request_header(header: RequestHeader) -> int:
    """Return the bytes that a request header and its ``identity`` take."""
    size = REQUEST + 4 * (len(header.model_name) + len(header.model_version))
    for spec in header.inputs:
        size += INPUT + 4 * len(spec.name) + DIMENSION * len(spec.shape)
    for output in header.outputs:
        size += REQUESTED + 4 * len(output.name)
        if output.place is not None:
            size += PARAMETER + 4 * len(output.place.region)
    if header.parameters:
        size += of_parameters(header.parameters)
    return size if header.caller is None else size + 4 * len(header.caller.wanted_class)


def of_response_header(header: ResponseHeader) -> int:
    """Return the bytes that a response header takes, without what transports leave on it: that may be as much again."""
    size = RESPONSE + of_specs(header.outputs)
    return size + of_parameters(header.parameters) if header.parameters else size


def of_specs(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes that specifications of tensors take."""
    size = 0
    for spec in specs:
        size += SPEC + 4 * len(spec.name) + DIMENSION * len(spec.shape)
    return size


def of_parameters(parameters: Mapping[str, Parameter]) -> int:
    """Return the bytes that parameters take; each stands in an identity, too, as text."""
    size = 0
    for name, value in parameters.items():
        size += PARAMETER + 8 * len(name)
        if type(value) is str:
            size += 2 * len(value) if value.isascii() else 8 * len(value)
    return size
