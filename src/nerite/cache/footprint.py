"""What a response takes in memory: its tensors and, byte by byte, the objects around them.

Measured with ``tracemalloc``, which a test repeats, and rounded up to what a dictionary takes just after it has grown.
"""

from __future__ import annotations

from typing import Final

from nerite.core.response import InferenceResponse, ResponseHeader

ENTRY: Final = 336
"""The key, the place in the dictionary, the response and the tuple of its tensors."""
PART: Final = 56
"""What a tensor takes beside its bytes."""
HEADER: Final = 448
SPEC: Final = 320
"""Name and shape of an output."""
DIMENSION: Final = 40


def of_response(response: InferenceResponse) -> int:
    """Return the bytes that a response takes beside its header, which many responses may have in common."""
    return ENTRY + sum(PART + len(part) for part in response.data)


def of_header(header: ResponseHeader) -> int:
    """Return the bytes that a header takes."""
    said = sum(len(name) + len(repr(value)) + 128 for name, value in header.parameters.items())
    return HEADER + said + sum(SPEC + DIMENSION * len(spec.shape) for spec in header.outputs)
