"""Statistics in the JSON form of Triton's statistics extension."""

from __future__ import annotations

from typing import Any

from nerite.observability.statistics import BatchStatistics, Duration, ResponseStatistics, VersionStatistics


def counted(statistics: VersionStatistics, *, decoupled: bool) -> dict[str, Any]:
    """Return what was counted. Only models that are ``decoupled`` have statistics by response."""
    return {
        "last_inference": statistics.last_inference_ms,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.fail),
            "queue": _duration(statistics.queue),
            "compute_input": _duration(statistics.compute_input),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(statistics.compute_output),
            "cache_hit": _duration(statistics.cache_hit),
            "cache_miss": _duration(statistics.cache_miss),
        },
        "response_stats": {
            str(place): _response(response) for place, response in enumerate(statistics.responses) if decoupled
        },
        "batch_stats": [_batch(size, batch) for size, batch in sorted(statistics.batches.items())],
    }


def memory(size: int) -> list[dict[str, Any]]:
    """Return the bytes of memory that a model's instances take, if there is something to tell."""
    return [{"type": "CPU", "id": 0, "byte_size": size}] if size else []


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}


def _response(response: ResponseStatistics) -> dict[str, Any]:
    return {
        "compute_infer": _duration(response.compute_infer),
        "compute_output": _duration(response.compute_output),
        "success": _duration(response.success),
        "fail": _duration(response.fail),
        "empty_response": _duration(response.empty_response),
        "cancel": _duration(response.cancel),
    }


def _batch(size: int, batch: BatchStatistics) -> dict[str, Any]:
    return {
        "batch_size": size,
        "compute_input": _duration(batch.compute_input),
        "compute_infer": _duration(batch.compute_infer),
        "compute_output": _duration(batch.compute_output),
    }
