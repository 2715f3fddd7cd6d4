"""What happened between two looks at a server: one line for each version of a model, and one for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from nerite.client import ModelVersion
from nerite.client.metrics import MetricsPage, quantile


class Look(NamedTuple):
    """A server at one moment."""

    at: float
    """Seconds."""
    models: Sequence[ModelVersion]
    metrics: MetricsPage


@dataclass(frozen=True)
class Happening:
    """Of one version of a model. None: the server does not tell."""

    model: str
    version: str
    state: str
    requests: float | None = None
    """Answered a second."""
    failures: float | None = None
    median: float | None = None
    """Seconds."""
    slowest: float | None = None
    """Seconds that 99 of 100 do not exceed."""
    waiting: float | None = None
    """Requests that are in the queue now."""
    batch: float | None = None
    """Rows that ran together, on average."""
    tokens: float | None = None
    """Generated a second, by a language model."""
    memory: float | None = None
    """Bytes."""
    restarts: float | None = None
    """Of workers, since the model was loaded."""


ORDERS: Final[Mapping[str, Callable[[Happening], float]]] = {
    "requests": lambda each: each.requests or 0.0,
    "failures": lambda each: each.failures or 0.0,
    "p99": lambda each: each.slowest or 0.0,
    "queue": lambda each: each.waiting or 0.0,
    "memory": lambda each: each.memory or 0.0,
}
"""By what lines may be sorted, the largest first, beside the name."""


def ordered(happened: Iterable[Happening], by: str) -> list[Happening]:
    """Return the lines in an order, and by name where that says nothing."""
    named = sorted(happened, key=lambda each: (each.model, each.version))
    return sorted(named, key=ORDERS[by], reverse=True) if by in ORDERS else named


def between(before: Look, after: Look) -> list[Happening]:
    """Return what happened from one look to the next, of everything that is in the index at the second."""
    return [_of(version, before, after) for version in after.models]


def _of(version: ModelVersion, before: Look, after: Look) -> Happening:
    seconds = after.at - before.at
    labels = {"model": version.name, "version": version.version}

    def now(name: str) -> float | None:
        return after.metrics.total(name, **labels)

    def more(name: str) -> float | None:
        """Return by how much a counter has grown: from nothing, where the model was loaded meanwhile."""
        counted, earlier = now(name), before.metrics.total(name, **labels) or 0.0
        return None if counted is None else counted - earlier if counted >= earlier else counted

    def rate(name: str) -> float | None:
        grown = more(name)
        return None if grown is None else grown / seconds

    took = _grown(*(look.metrics.buckets("nerite_request_duration_seconds", **labels) for look in (before, after)))
    rows, batches = more("nv_inference_count"), more("nv_inference_exec_count")
    return Happening(
        version.name,
        version.version,
        version.state,
        rate("nv_inference_request_success"),
        rate("nv_inference_request_failure"),
        quantile(took, 0.5),
        quantile(took, 0.99),
        now("nv_inference_pending_request_count"),
        rows / batches if rows and batches else None,
        rate("vllm:generation_tokens_total"),
        now("nerite_model_memory_bytes"),
        now("nerite_worker_restarts_total"),
    )


def _grown(before: Mapping[float, float], after: Mapping[float, float]) -> dict[float, float]:
    if max(before.values(), default=0.0) > max(after.values(), default=0.0):  # the model was loaded anew
        before = {}
    return {bound: count - before.get(bound, 0.0) for bound, count in after.items()}


def whole(happened: Sequence[Happening], look: Look) -> dict[str, float | None]:
    """Return what is said of the server: sums over its models, and the machine's share in use."""

    def total(part: Callable[[Happening], float | None]) -> float:
        return sum(part(each) or 0.0 for each in happened)

    used, there = look.metrics.total("nv_cpu_memory_used_bytes"), look.metrics.total("nv_cpu_memory_total_bytes")
    return {
        "requests": total(lambda each: each.requests),
        "failures": total(lambda each: each.failures),
        "waiting": total(lambda each: each.waiting),
        "processors": look.metrics.total("nv_cpu_utilization"),
        "memory": used / there if used is not None and there else None,
    }
