"""What follows from the counts of a server."""

from __future__ import annotations

from typing import Any

from nerite.client import DurationCount, ModelStatistics

ENTRY: dict[str, Any] = {
    "name": "m",
    "version": "1",
    "last_inference": 5,
    "inference_count": 6,
    "execution_count": 2,
    "inference_stats": {
        "success": {"count": 3, "ns": 9_000_000},
        "fail": {"count": 1, "ns": 1_000_000},
        "queue": {"count": 3, "ns": 3_000_000},
        "compute_input": {"count": 3, "ns": 300_000},
        "compute_infer": {"count": 3, "ns": 6_000_000},
        "compute_output": {"count": 3, "ns": 600_000},
    },
}


def test_what_is_told_and_what_follows() -> None:
    version = ModelStatistics.read(ENTRY)
    assert (version.requests, version.fail.count, version.cache_hit) == (4, 1, DurationCount())
    assert (version.queue.mean_ms, version.mean_compute_ms, version.mean_batch) == (1.0, 2.3, 3.0)


def test_nothing_has_happened() -> None:
    version = ModelStatistics.read({"name": "m"})
    assert (version.requests, version.queue.mean_ms, version.mean_compute_ms, version.mean_batch) == (0, 0, 0, 0)


def test_what_has_happened_since() -> None:
    before = ModelStatistics.read(ENTRY)
    after = ModelStatistics.read(
        {
            **ENTRY,
            "last_inference": 9,
            "inference_count": 8,
            "execution_count": 3,
            "inference_stats": {**ENTRY["inference_stats"], "success": {"count": 5, "ns": 10_000_000}},
        }
    )
    since = after.since(before)
    assert (since.name, since.last_inference, since.requests, since.mean_batch) == ("m", 9, 2, 2.0)
    assert since.success == DurationCount(2, 1_000_000)
    assert after.since(None) is after


def test_a_server_that_has_begun_anew() -> None:
    before, after = ModelStatistics.read(ENTRY), ModelStatistics.read({"name": "m", "inference_count": 1})
    assert after.since(before) is after
