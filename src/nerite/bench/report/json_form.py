"""Outcomes as JSON: every figure under its name, times in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nerite.bench.figures import Spread, Tokens
from nerite.bench.search import Search
from nerite.bench.session import Outcome
from nerite.client import ModelStatistics


def render(model: str, outcomes: Sequence[Outcome], search: Search | None = None) -> str:
    """Return the document."""
    document: dict[str, Any] = {"model": model}
    if search is not None:
        best = search.best
        document["within"] = {
            "measure": search.limit.measure,
            "limit_ms": search.limit.milliseconds,
            "level": best.level.value if best else None,
            "requests_per_second": best.figures.rate if best else None,
        }
    document["levels"] = [level(outcome) for outcome in outcomes]
    return json.dumps(document, indent=2) + "\n"


def level(outcome: Outcome) -> dict[str, Any]:
    """Return all figures of a level."""
    figures = outcome.figures
    document: dict[str, Any] = {
        outcome.level.kind: outcome.level.value,
        **({"arrivals": outcome.level.arrivals} if outcome.level.open else {}),
        "requests_per_second": figures.rate,
        "requests": figures.answered,
        "seconds": figures.seconds,
        "failed": figures.failed,
        "failures": dict(figures.failures),
        "stable": outcome.stable,
        "latency_ms": _spread(figures.latency),
        "client": {
            "busy": outcome.busy,
            "processor_us_per_request": outcome.spent * 1e6,
            "sent_late_ms": _spread(figures.lag),
            "is_the_limit": outcome.client_is_the_limit,
        },
        "windows": [
            {"seconds": window.seconds, "requests_per_second": window.rate, "mean_latency_ms": window.latency * 1e3}
            for window in outcome.windows
        ],
    }
    if figures.goodput is not None:
        document["good_requests_per_second"] = figures.goodput
    if figures.tokens is not None:
        document["tokens"] = _tokens(figures.tokens)
    if outcome.server is not None:
        document["server"] = _server(outcome.server)
    return document


def _spread(spread: Spread) -> dict[str, float]:
    ends = {"mean": spread.mean, "deviation": spread.deviation, "min": spread.least, "max": spread.most}
    return {**ends, **spread.quantiles}


def _tokens(tokens: Tokens) -> dict[str, Any]:
    return {
        "per_second": tokens.rate,
        "per_request": tokens.mean,
        "time_to_first_ms": _spread(tokens.first),
        "inter_token_ms": _spread(tokens.between) if tokens.between else None,
        "gaps_ms": _spread(tokens.gaps) if tokens.gaps else None,
    }


def _server(server: ModelStatistics) -> dict[str, Any]:
    return {
        "requests": server.requests,
        "failed": server.fail.count,
        "inferences": server.inference_count,
        "executions": server.execution_count,
        "mean_batch": server.mean_batch,
        "queue_ms": server.queue.mean_ms,
        "compute_input_ms": server.compute_input.mean_ms,
        "compute_infer_ms": server.compute_infer.mean_ms,
        "compute_output_ms": server.compute_output.mean_ms,
        "cache_hits": server.cache_hit.count,
    }
