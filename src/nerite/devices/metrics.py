"""Metrics of what the server keeps in pinned memory and on GPUs, and of the copies between them."""

from __future__ import annotations

from typing import Final, NamedTuple

from nerite.devices import cuda
from nerite.devices.devices import Devices
from nerite.observability.exposition import UNLABELLED, Metric, MetricTable, Page


class _Use(NamedTuple):
    total: int
    used: int


PINNED_MEMORY: Final = MetricTable[_Use]((
    Metric("nv_pinned_memory_pool_total_bytes", "gauge",
           "Pinned memory pool total memory size, in bytes", lambda use: use.total),
    Metric("nv_pinned_memory_pool_used_bytes", "gauge",
           "Pinned memory pool used memory size, in bytes", lambda use: use.used),
))  # fmt: skip

DEVICE_POOLS: Final = MetricTable[_Use]((
    Metric("nerite_cuda_memory_pool_total_bytes", "gauge",
           "Size of the server's memory pool on a GPU, in bytes", lambda use: use.total),
    Metric("nerite_cuda_memory_pool_used_bytes", "gauge",
           "Used bytes of the server's memory pool on a GPU", lambda use: use.used),
), labels=("gpu",))  # fmt: skip

CALLS: Final = MetricTable[float]((
    Metric("nerite_device_call_seconds", "gauge",
           "How long the server has waited for its present call to a GPU, in seconds", lambda seconds: seconds),
), labels=("gpu",))  # fmt: skip

COPIES: Final = MetricTable[tuple[int, int]]((
    Metric("nerite_device_copies_total", "counter",
           "Copies of tensors between host and GPUs, and on GPUs, by the server and its workers", lambda of: of[0]),
    Metric("nerite_device_copy_bytes_total", "counter", "Bytes of these copies", lambda of: of[1]),
), labels=("direction",))  # fmt: skip


def write_device_metrics(page: Page, devices: Devices | None) -> None:
    """Write the metrics; without GPUs, only those that Triton has then, too."""
    pinned = None if devices is None else devices.pinned
    page.write(PINNED_MEMORY, [(UNLABELLED, _Use(0, 0) if pinned is None else _Use(pinned.size, pinned.used))])
    if devices is None:
        return
    pools = (pool for number in devices.numbers if (pool := devices.pool(number)) is not None)
    page.write(DEVICE_POOLS, [DEVICE_POOLS.row(_Use(pool.size, pool.used), str(pool.device)) for pool in pools])
    page.write(CALLS, [CALLS.row(seconds, str(number)) for number, seconds in devices.waits().items()])
    page.write(COPIES, [COPIES.row(counts, direction) for direction, counts in cuda.COPIES.totals().items()])
