"""Files without a name, in memory: no disk is too full for them, and they go with the last process that has them."""

from __future__ import annotations

import os
import tempfile


def anonymous_file(size: int = 0) -> int:
    """Return the descriptor of a file of ``size`` bytes. Raises ``OSError``."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("nerite", os.MFD_CLOEXEC)
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
