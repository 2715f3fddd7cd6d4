"""What a response takes in memory: its tensors and, byte by byte, the objects around them.

Measured with ``tracemalloc``, which a test repeats, and rounded up to what a dictionary takes just after it has grown.
"""

from __future__ import annotations

from typing import Final

from nerite.core.footprint import of_response_header as of_header
from nerite.core.response import InferenceResponse

ENTRY: Final = 336
"""The key, the place in the dictionary, the response and the tuple of its tensors."""
PART: Final = 56
"""What a tensor takes beside its bytes."""

__all__ = ("ENTRY", "PART", "of_header", "of_response")


def of_response(response: InferenceResponse) -> int:
    """Return the bytes that a response takes beside its header, which many responses may have in common."""
    return ENTRY + sum(PART + len(part) for part in response.data)
