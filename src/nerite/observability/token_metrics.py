"""The metrics of language models, made of their statistics when the page is asked for.

What vLLM has keeps vLLM's names and, as Triton shows it, the labels ``model`` and ``version``; the rest is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from nerite.core.engine_report import EngineReport
from nerite.observability.distribution import Distribution
from nerite.observability.exposition import Family
from nerite.observability.token_statistics import BETWEEN, TokenStatistics

Labelled: TypeAlias = tuple[Mapping[str, str], TokenStatistics, int]
"""The labels of a model version, what was counted there, and how many requests wait before its engines."""

_COUNTERS: Final[tuple[tuple[str, str, Callable[[TokenStatistics], float | None]], ...]] = (
    ("vllm:prompt_tokens_total", "Number of prefill tokens processed.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens_total", "Number of generation tokens processed.", lambda s: s.generated_tokens),
    ("vllm:num_preemptions_total", "Number of preemptions by the engine.", lambda s: s.tallies["preemptions"]),
    (
        "vllm:prefix_cache_queries_total",
        "Prompt tokens that were looked for in the prefix cache.",
        lambda s: s.tallies["prefix_queries"],
    ),
    (
        "vllm:prefix_cache_hits_total",
        "Prompt tokens that were found in the prefix cache.",
        lambda s: s.tallies["prefix_hits"],
    ),
    (
        "vllm:spec_decode_num_draft_tokens_total",
        "Tokens that were guessed ahead.",
        lambda s: s.tallies["drafted"],
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_total",
        "Tokens that were guessed ahead and right.",
        lambda s: s.tallies["accepted"],
    ),
    (
        "nerite_llm_engine_failures_total",
        "Steps that failed, after which the engine began anew in its worker",
        lambda s: s.tallies["failures"],
    ),
)

_GAUGES: Final[tuple[tuple[str, str, Callable[[list[EngineReport]], float]], ...]] = (
    ("vllm:num_requests_running", "Sequences that the engine runs.", lambda r: sum(each.running for each in r)),
    ("vllm:gpu_cache_usage_perc", "KV cache usage. 1 means 100 percent.", lambda r: utilization(r)),
    ("vllm:kv_cache_usage_perc", "KV cache usage. 1 means 100 percent.", lambda r: utilization(r)),
    (
        "nerite_llm_kv_block_tokens",
        "Tokens that a block of the KV cache holds",
        lambda r: max((each.block_size for each in r), default=0),
    ),
)

_HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[TokenStatistics], Distribution]], ...]] = (
    ("vllm:iteration_tokens_total", "Tokens per step of the engine.", lambda s: s.step_tokens),
    ("vllm:time_to_first_token_seconds", "Time to first token in seconds.", lambda s: s.first_token),
    (
        "vllm:time_per_output_token_seconds",
        "Time per output token in seconds.",
        lambda s: s.between_tokens.coarser(BETWEEN),
    ),
    ("vllm:inter_token_latency_seconds", "Time per output token in seconds.", lambda s: s.between_tokens),
    ("vllm:e2e_request_latency_seconds", "End to end request latency in seconds.", lambda s: s.whole),
    ("vllm:request_queue_time_seconds", "Time until the engine took a request up.", lambda s: s.queued),
    ("vllm:request_inference_time_seconds", "Time that a request was in the engine.", lambda s: s.engaged),
    ("vllm:request_prefill_time_seconds", "Of that, until the first token.", lambda s: s.reading),
    ("vllm:request_decode_time_seconds", "Of that, from the first to the last token.", lambda s: s.writing),
    ("vllm:request_prompt_tokens", "Number of prefill tokens processed.", lambda s: s.prompt_lengths),
    ("vllm:request_generation_tokens", "Number of generation tokens processed.", lambda s: s.answer_lengths),
    ("vllm:request_params_n", "The n request parameter.", lambda s: s.sequences),
)


def utilization(reports: Iterable[EngineReport]) -> float:
    """Return the share of the KV blocks of several engines that is in use."""
    total = free = 0
    for each in reports:
        total += each.total_blocks
        free += each.free_blocks
    return (total - free) / total if total else 0.0


def families(versions: Iterable[Labelled], *, counters: bool = True) -> list[Family]:
    """Return the metrics of language models; none if there are no such models.

    Without ``counters`` nothing that counts requests has values.
    """
    all_versions = list(versions)
    if not all_versions:
        return []
    listed = [(labels, statistics) for labels, statistics, _ in all_versions]
    counted = listed if counters else []
    made = [
        Family(name, text, "counter", [(labels, count) for labels, s in counted if (count := read(s)) is not None])
        for name, text, read in _COUNTERS
    ]
    made += [
        Family(name, text, "histogram", [(labels, read(s)) for labels, s in counted])
        for name, text, read in _HISTOGRAMS
    ]
    made += [
        Family(name, text, "gauge", [(labels, read(s.latest)) for labels, s in listed]) for name, text, read in _GAUGES
    ]
    return [
        *made,
        Family(
            "vllm:num_requests_waiting",
            "Requests that wait, before the engine or in it.",
            "gauge",
            [(labels, pending + sum(each.waiting for each in s.latest)) for labels, s, pending in all_versions],
        ),
        Family(
            "vllm:request_success_total",
            "Requests that the engine is done with, by how they ended.",
            "counter",
            [({**labels, "finished_reason": e.value}, count) for labels, s in counted for e, count in s.ended.items()],
        ),
        Family(
            "nerite_llm_wasted_tokens_total",
            "Tokens generated for requests that were cut, were too late, or failed",
            "counter",
            [
                ({**labels, "reason": ended.value}, count)
                for labels, s in counted
                for ended, count in s.wasted_tokens.items()
            ],
        ),
        Family(
            "nerite_llm_kv_blocks",
            "Blocks of the KV cache",
            "gauge",
            [({**labels, "state": state}, count) for labels, s in listed for state, count in _blocks(s.latest).items()],
        ),
        Family(
            "nerite_llm_requests",
            "Requests that the engine has",
            "gauge",
            [(labels, s.under_way) for labels, s in listed],
        ),
    ]


def _blocks(reports: Iterable[EngineReport]) -> dict[str, int]:
    total = free = 0
    for each in reports:
        total += each.total_blocks
        free += each.free_blocks
    return {"used": total - free, "free": free}
