"""Shared memory of a client, by NVIDIA's library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tritonclient.utils.shared_memory as shm


@contextmanager
def region(client: Any, name: str, size: int = 64) -> Iterator[Any]:
    """A region of the client's, which the server knows under the same name."""
    key = f"/nerite_{os.getpid()}_{name}"
    handle = shm.create_shared_memory_region(name, key, size)
    client.register_system_shared_memory(name, key, size)
    try:
        yield handle
    finally:
        client.unregister_system_shared_memory(name)
        shm.destroy_shared_memory_region(handle)
