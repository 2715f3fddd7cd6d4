"""What a later release of Nerite will have."""

from __future__ import annotations

from conformance.differences.difference import Difference

DIFFERENCES = (
    Difference(
        "Metrics of pinned memory",
        "Nerite keeps no pool of pinned memory, so that there is nothing to measure.",
        {
            "counting/metrics of the machine#2": (
                "metrics: nv_pinned_memory_pool_total_bytes, nv_pinned_memory_pool_used_bytes",
                "metrics: none",
            )
        },
    ),
)
