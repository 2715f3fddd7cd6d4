"""The metrics of language models, made of their statistics when the page is asked for.

What vLLM has keeps vLLM's names and, as Triton shows it, the labels ``model`` and ``version``; the rest is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from nerite.core.engine_report import Ended, EngineReport
from nerite.observability.exposition import Family, Labels, Sample, Value, joined, label
from nerite.observability.token_statistics import BETWEEN, TokenStatistics

Labelled: TypeAlias = tuple[Labels, TokenStatistics, int]
"""The labels of a model version, what was counted there, and how many requests wait before its engines."""


class _Version(NamedTuple):
    """A model version, as the metrics are read of it."""

    counted: TokenStatistics
    reports: list[EngineReport]
    """The last of each engine that is there."""
    pending: int


class _Metric(NamedTuple):
    """A metric of a model version."""

    name: str
    type: str
    help: str
    read: Callable[[_Version], Value | Mapping[str, Value] | None]
    """Its value; or one for each value of ``label``; None where nobody knows it, and nothing is better than 0."""
    label: str = ""


_METRICS: Final = (
    _Metric("vllm:prompt_tokens_total", "counter",
            "Number of prefill tokens processed.", lambda v: v.counted.prompt_tokens),
    _Metric("vllm:generation_tokens_total", "counter",
            "Number of generation tokens processed.", lambda v: v.counted.generated_tokens),
    _Metric("vllm:num_preemptions_total", "counter",
            "Number of preemptions by the engine.", lambda v: v.counted.tallies["preemptions"]),
    _Metric("vllm:prefix_cache_queries_total", "counter",
            "Prompt tokens that were looked for in the prefix cache.", lambda v: v.counted.tallies["prefix_queries"]),
    _Metric("vllm:prefix_cache_hits_total", "counter",
            "Prompt tokens that were found in the prefix cache.", lambda v: v.counted.tallies["prefix_hits"]),
    _Metric("vllm:spec_decode_num_draft_tokens_total", "counter",
            "Tokens that were guessed ahead.", lambda v: v.counted.tallies["drafted"]),
    _Metric("vllm:spec_decode_num_accepted_tokens_total", "counter",
            "Tokens that were guessed ahead and right.", lambda v: v.counted.tallies["accepted"]),
    _Metric("nerite_llm_engine_failures_total", "counter",
            "Steps that failed, after which the engine began anew in its worker",
            lambda v: v.counted.tallies["failures"]),
    _Metric("vllm:request_success_total", "counter",
            "Requests that the engine is done with, by how they ended.",
            lambda v: _by_ending(v.counted.ended), "finished_reason"),
    _Metric("nerite_llm_wasted_tokens_total", "counter",
            "Tokens generated for requests that were cut, were too late, or failed",
            lambda v: _by_ending(v.counted.wasted_tokens), "reason"),
    _Metric("vllm:iteration_tokens_total", "histogram",
            "Tokens per step of the engine.", lambda v: v.counted.step_tokens),
    _Metric("vllm:time_to_first_token_seconds", "histogram",
            "Time to first token in seconds.", lambda v: v.counted.first_token),
    _Metric("vllm:time_per_output_token_seconds", "histogram",
            "Time per output token in seconds.", lambda v: v.counted.between_tokens.coarser(BETWEEN)),
    _Metric("vllm:inter_token_latency_seconds", "histogram",
            "Time per output token in seconds.", lambda v: v.counted.between_tokens),
    _Metric("vllm:e2e_request_latency_seconds", "histogram",
            "End to end request latency in seconds.", lambda v: v.counted.whole),
    _Metric("vllm:request_queue_time_seconds", "histogram",
            "Time until the engine took a request up.", lambda v: v.counted.queued),
    _Metric("vllm:request_inference_time_seconds", "histogram",
            "Time that a request was in the engine.", lambda v: v.counted.engaged),
    _Metric("vllm:request_prefill_time_seconds", "histogram",
            "Of that, until the first token.", lambda v: v.counted.reading),
    _Metric("vllm:request_decode_time_seconds", "histogram",
            "Of that, from the first to the last token.", lambda v: v.counted.writing),
    _Metric("vllm:request_prompt_tokens", "histogram",
            "Number of prefill tokens processed.", lambda v: v.counted.prompt_lengths),
    _Metric("vllm:request_generation_tokens", "histogram",
            "Number of generation tokens processed.", lambda v: v.counted.answer_lengths),
    _Metric("vllm:request_params_n", "histogram",
            "The n request parameter.", lambda v: v.counted.sequences),
    _Metric("vllm:num_requests_running", "gauge",
            "Sequences that the engine runs.", lambda v: sum(each.running for each in v.reports)),
    _Metric("vllm:num_requests_waiting", "gauge",
            "Requests that wait, before the engine or in it.",
            lambda v: v.pending + sum(each.waiting for each in v.reports)),
    _Metric("nerite_llm_requests", "gauge",
            "Requests that the engine has", lambda v: v.counted.under_way),
    _Metric("vllm:gpu_cache_usage_perc", "gauge",
            "KV cache usage. 1 means 100 percent.", lambda v: utilization(v.reports)),
    _Metric("vllm:kv_cache_usage_perc", "gauge",
            "KV cache usage. 1 means 100 percent.", lambda v: utilization(v.reports)),
    _Metric("nerite_llm_kv_block_tokens", "gauge",
            "Tokens that a block of the KV cache holds",
            lambda v: max((each.block_size for each in v.reports), default=0)),
    _Metric("nerite_llm_kv_blocks", "gauge",
            "Blocks of the KV cache", lambda v: dict(zip(("used", "free"), _blocks(v.reports), strict=True)), "state"),
)  # fmt: skip


def utilization(reports: Iterable[EngineReport]) -> float:
    """Return the share of the KV blocks of several engines that is in use."""
    used, free = _blocks(reports)
    return used / (used + free) if used + free else 0.0


def families(versions: Iterable[Labelled]) -> list[Family]:
    """Return the metrics of language models; none if there are no such models."""
    read = [(of, _Version(counted, counted.latest, pending)) for of, counted, pending in versions]
    if not read:
        return []
    return [Family(metric.name, metric.help, metric.type, list(_samples(metric, read))) for metric in _METRICS]


def _samples(metric: _Metric, versions: Iterable[tuple[Labels, _Version]]) -> Iterator[Sample]:
    for of, version in versions:
        value = metric.read(version)
        if isinstance(value, Mapping):
            yield from ((joined(of, label(metric.label, which)), each) for which, each in value.items())
        elif value is not None:
            yield of, value


def _by_ending(counts: Mapping[Ended, int]) -> dict[str, Value]:
    return {ended.value: count for ended, count in counts.items()}


def _blocks(reports: Iterable[EngineReport]) -> tuple[int, int]:
    """Return how many KV blocks are in use, and how many free."""
    total = free = 0
    for each in reports:
        total += each.total_blocks
        free += each.free_blocks
    return total - free, free
