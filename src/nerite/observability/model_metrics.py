"""Metrics of model versions, which are read from their statistics when the page is requested.

Those of language models that vLLM has keep vLLM's names, with the label ``model_name`` of vLLM beside ``model`` and
``version`` of Triton.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from nerite.core.engine_report import EngineReport, RequestEnded
from nerite.observability.exposition import Labels, Metric, MetricTable, Value, labels
from nerite.observability.histogram import BOUNDS, Histogram, QuantileSum
from nerite.observability.statistics import FIRST_RESPONSE, Duration, VersionStatistics
from nerite.observability.token_statistics import BETWEEN, TokenStatistics, kv_blocks, kv_utilization


class MeteredVersion(NamedTuple):
    """State of a model version from which its metrics are read."""

    model: str
    version: str
    namespace: str
    """Empty if models have no namespaces."""
    tags: dict[str, str]
    statistics: VersionStatistics
    pending: int
    load_seconds: float
    restarts: int
    """Number of workers that were started to replace workers that died."""
    memory: int
    """Bytes of private memory of its workers, or what it takes of the server's own process."""
    waiting: Mapping[int, int]
    """Number of requests that wait for an instance, by priority."""
    releases: Mapping[str, int]
    """Number of batches, by the reason for which they started."""
    max_rows: int
    """Maximum rows of a batch; 1 if requests have no rows."""
    cached: bool
    """The model is configured to use the response cache, even if the server has none."""
    tokens: TokenStatistics | None = None
    """Token counts of its engines, if it has engines."""
    memory_source: str = ""
    """How its memory is known: "workers", "load", or "files" for an estimate; empty if it has none."""


_Read: TypeAlias = Callable[[MeteredVersion], Value | Mapping[str, Value] | None]


def version_labels(version: MeteredVersion, *, vllm: bool = False) -> Labels:
    """Return the labels of a version: the names of ``metric_tags`` get an underscore, as with Triton.

    ``vllm``: for metrics that vLLM has, too.
    """
    pairs = {"model": version.model, "version": version.version}
    if vllm:
        pairs["model_name"] = version.model
    if version.namespace:
        pairs["namespace"] = version.namespace
    pairs.update((f"_{name}", value) for name, value in version.tags.items())
    return labels(pairs)


def _request_duration(version: MeteredVersion) -> Histogram | None:
    """Return None before the first answer, to keep the page of a thousand idle models short."""
    counted = version.statistics
    if counted.stages is None or not counted.success.count:
        return None
    return Histogram.of(BOUNDS, counted.stages.whole, counted.success.ns / 1e9, counted.stages.exemplars)


def _stage_durations(version: MeteredVersion) -> dict[str, Value] | None:
    counted = version.statistics
    stages = counted.stages
    if stages is None or not counted.success.count:
        return None
    return {
        "queue": Histogram.of(BOUNDS, stages.queue, counted.queue.ns / 1e9),
        "input": Histogram.of(BOUNDS, stages.compute_input, counted.compute_input.ns / 1e9),
        "compute": Histogram.of(BOUNDS, stages.compute_infer, counted.compute_infer.ns / 1e9),
        "output": Histogram.of(BOUNDS, stages.compute_output, counted.compute_output.ns / 1e9),
    }


def _batch_rows(version: MeteredVersion) -> Histogram | None:
    """Return the histogram of rows, made of the count of each size. The bounds are powers of two."""
    batches = version.statistics.batches
    if not batches:
        return None
    sizes = Histogram(_powers_up_to(version.max_rows))
    for rows, batch in batches.items():
        sizes.note(rows, batch.compute_infer.count)
    return sizes


@lru_cache
def _powers_up_to(most: int) -> tuple[int, ...]:
    return (*(2**power for power in range(max(most - 1, 0).bit_length())), most)


def _summary(stage: str, read: Callable[[VersionStatistics], Duration]) -> _Read:
    """Return the reader of a summary: the total since the load, with the quantiles of the last minute."""

    def read_summary(version: MeteredVersion) -> QuantileSum | None:
        counted = version.statistics
        quantiles = None if counted.optional is None else counted.optional.quantiles(stage)
        if quantiles is None:
            return None
        duration = read(counted)
        return QuantileSum(duration.count, duration.ns // 1000, quantiles)

    return read_summary


def _tokens(read: Callable[[TokenStatistics], Value | None]) -> _Read:
    return lambda v: None if v.tokens is None else read(v.tokens)


def _tally(name: str) -> _Read:
    """Return the reader of a count that engines keep. No sample if no engine reports it: that is better than 0."""
    return _tokens(lambda t: t.tallies[name])


def _reports(read: Callable[[Iterable[EngineReport]], float]) -> _Read:
    return _tokens(lambda t: read(t.latest))


def _by_ending(read: Callable[[TokenStatistics], Mapping[RequestEnded, int]]) -> _Read:
    return lambda v: None if v.tokens is None else {ended.value: count for ended, count in read(v.tokens).items()}


def _kv_blocks(version: MeteredVersion) -> dict[str, Value] | None:
    if version.tokens is None:
        return None
    used, free = kv_blocks(version.tokens.latest)
    return {"used": used, "free": free}


def _cache_config(version: MeteredVersion) -> dict[str, Value] | None:
    """Return vLLM's description of the KV cache, as labels."""
    reports = [] if version.tokens is None else version.tokens.latest
    blocks = sum(each.total_blocks for each in reports)
    if not blocks:
        return None
    size = max(each.block_size for each in reports)
    return {labels({"block_size": str(size), "num_gpu_blocks": str(blocks)}): 1}


def _adapters(version: MeteredVersion) -> dict[str, Value] | None:
    """Return the LoRA adapters in use as labels, and the time: of several samples, the latest counts."""
    known = [] if version.tokens is None else [each.adapters for each in version.tokens.latest if each.adapters.most]
    if not known:
        return None
    running = sorted({name for each in known for name in each.running})
    waiting = sorted({name for each in known for name in each.waiting})
    told = {
        "max_lora": str(max(each.most for each in known)),
        "running_lora_adapters": ",".join(running),
        "waiting_lora_adapters": ",".join(waiting),
    }
    return {labels(told): time.time()}


_VERSION: Final = ("model", "version")

COUNTS: Final = MetricTable[MeteredVersion]((
    Metric("nv_inference_request_success", "counter",
           "Number of successful inference requests, all batch sizes", lambda v: v.statistics.success.count),
    Metric("nv_inference_request_failure", "counter",
           "Number of failed inference requests, all batch sizes",
           lambda v: v.statistics.coarse_failures(), "reason"),
    Metric("nv_inference_count", "counter",
           "Number of inferences performed (does not include cached requests)",
           lambda v: v.statistics.inference_count),
    Metric("nv_inference_exec_count", "counter",
           "Number of model executions performed (does not include cached requests)",
           lambda v: v.statistics.execution_count),
), _VERSION)  # fmt: skip

DURATIONS: Final = MetricTable[MeteredVersion]((
    Metric("nv_inference_request_duration_us", "counter",
           "Cumulative inference request duration in microseconds (includes cached requests)",
           lambda v: v.statistics.success.ns // 1000),
    Metric("nv_inference_queue_duration_us", "counter",
           "Cumulative inference queuing duration in microseconds (includes cached requests)",
           lambda v: v.statistics.queue.ns // 1000),
    Metric("nv_inference_compute_input_duration_us", "counter",
           "Cumulative compute input duration in microseconds (does not include cached requests)",
           lambda v: v.statistics.compute_input.ns // 1000),
    Metric("nv_inference_compute_infer_duration_us", "counter",
           "Cumulative compute inference duration in microseconds (does not include cached requests)",
           lambda v: v.statistics.compute_infer.ns // 1000),
    Metric("nv_inference_compute_output_duration_us", "counter",
           "Cumulative inference compute output duration in microseconds (does not include cached requests)",
           lambda v: v.statistics.compute_output.ns // 1000),
), _VERSION, option="counter_latencies")  # fmt: skip

STATE: Final = MetricTable[MeteredVersion]((
    Metric("nv_inference_pending_request_count", "gauge",
           "Instantaneous number of pending requests awaiting execution per-model.", lambda v: v.pending),
    Metric("nv_model_load_duration_secs", "gauge", "Model load time in seconds", lambda v: v.load_seconds),
), _VERSION)  # fmt: skip

OURS: Final = MetricTable[MeteredVersion]((
    # Without the setting stage_histograms the first two have no samples.
    Metric("nerite_request_duration_seconds", "histogram",
           "Duration of successful requests, from the complete request to the last response", _request_duration),
    Metric("nerite_stage_duration_seconds", "histogram",
           "Duration of the stages of successful requests: queue, input, compute, output", _stage_durations, "stage"),
    Metric("nerite_batch_rows", "histogram", "Rows per execution", _batch_rows),
    Metric("nerite_batch_releases_total", "counter",
           "Batches by the reason for their release", lambda v: v.releases, "reason"),
    Metric("nerite_request_failures_total", "counter",
           "Failed requests, by reason",
           lambda v: {outcome.value: count for outcome, count in v.statistics.failures.items()}, "reason"),
    Metric("nerite_requests_given_up_total", "counter",
           "Requests whose caller stopped waiting, by reason, regardless of their outcome",
           lambda v: {why.value: count for why, count in v.statistics.given_up.items()}, "reason"),
    Metric("nerite_queue_requests", "gauge",
           "Requests that wait for an instance, by priority",
           lambda v: {str(priority): count for priority, count in v.waiting.items()}, "priority"),
    Metric("nerite_worker_restarts_total", "counter",
           "Workers started to replace workers that died", lambda v: v.restarts),
    Metric("nerite_model_memory_bytes", "gauge",
           "Memory of a model in bytes: of its workers, or of the server's process if it is there", lambda v: v.memory),
    Metric("nerite_model_memory_source", "gauge",
           "1 for how the memory of a model is known: of its workers, by the growth of the process during its load, or "
           "estimated by its files", lambda v: {v.memory_source: 1} if v.memory_source else None, "source"),
), _VERSION)  # fmt: skip

CACHED: Final = MetricTable[MeteredVersion]((
    Metric("nv_cache_num_hits_per_model", "counter",
           "Number of cache hits per model", lambda v: v.statistics.cache_hit.count),
    Metric("nv_cache_hit_duration_per_model", "counter",
           "Total cache hit duration per model, in microseconds", lambda v: v.statistics.cache_hit.ns // 1000),
    Metric("nv_cache_num_misses_per_model", "counter",
           "Number of cache misses per model", lambda v: v.statistics.cache_miss.count),
    Metric("nv_cache_miss_duration_per_model", "counter",
           "Total cache miss (insert+lookup) duration per model, in microseconds",
           lambda v: v.statistics.cache_miss.ns // 1000),
), _VERSION, option="counter_latencies", applies=lambda v: v.cached)  # fmt: skip

UNCACHED_SUMMARIES: Final = MetricTable[MeteredVersion]((
    Metric("nv_inference_request_summary_us", "summary",
           "Summary of inference request duration in microseconds (includes cached requests)",
           _summary("request", lambda s: s.success)),
), _VERSION, option="summary_latencies", applies=lambda v: not v.cached)  # fmt: skip

SUMMARIES: Final = MetricTable[MeteredVersion]((
    Metric("nv_inference_queue_summary_us", "summary",
           "Summary of inference queuing duration in microseconds (includes cached requests)",
           _summary("queue", lambda s: s.queue)),
    Metric("nv_inference_compute_input_summary_us", "summary",
           "Cumulative compute input duration in microseconds (does not include cached requests)",
           _summary("compute_input", lambda s: s.compute_input)),
    Metric("nv_inference_compute_infer_summary_us", "summary",
           "Cumulative compute inference duration in microseconds (does not include cached requests)",
           _summary("compute_infer", lambda s: s.compute_infer)),
    Metric("nv_inference_compute_output_summary_us", "summary",
           "Cumulative inference compute output duration in microseconds (does not include cached requests)",
           _summary("compute_output", lambda s: s.compute_output)),
), _VERSION, option="summary_latencies", applies=lambda v: True)  # fmt: skip

CACHED_SUMMARIES: Final = MetricTable[MeteredVersion]((
    Metric("nv_cache_hit_summary_per_model", "summary",
           "Summary of cache hit counts/durations per model, in microseconds.", _summary("hit", lambda s: s.cache_hit)),
    Metric("nv_cache_miss_summary_per_model", "summary",
           "Summary of cache miss counts/durations per model, in microseconds.",
           _summary("miss", lambda s: s.cache_miss)),
), _VERSION, option="summary_latencies", applies=lambda v: v.cached)  # fmt: skip

FIRST_RESPONSES: Final = MetricTable[MeteredVersion]((
    Metric(FIRST_RESPONSE, "histogram", "Duration from request to first response in milliseconds",
           lambda v: None if v.statistics.optional is None else v.statistics.optional.first_response),
), _VERSION, option="histogram_latencies", applies=lambda v: True)  # fmt: skip

TOKENS: Final = MetricTable[MeteredVersion]((
    Metric("vllm:prompt_tokens_total", "counter",
           "Number of prefill tokens processed.", _tokens(lambda t: t.prompt_tokens)),
    Metric("vllm:generation_tokens_total", "counter",
           "Number of generation tokens processed.", _tokens(lambda t: t.generated_tokens)),
    Metric("vllm:num_preemptions_total", "counter",
           "Number of preemptions by the engine.", _tally("preemptions")),
    Metric("vllm:prefix_cache_queries_total", "counter",
           "Prompt tokens that were looked for in the prefix cache.", _tally("prefix_queries")),
    Metric("vllm:prefix_cache_hits_total", "counter",
           "Prompt tokens that were found in the prefix cache.", _tally("prefix_hits")),
    Metric("vllm:spec_decode_num_draft_tokens_total", "counter", "Tokens that were guessed ahead.", _tally("drafted")),
    Metric("vllm:spec_decode_num_accepted_tokens_total", "counter",
           "Tokens that were guessed ahead and right.", _tally("accepted")),
    Metric("vllm:request_success_total", "counter",
           "Requests that the engine is done with, by how they ended.",
           _by_ending(lambda t: t.ended), "finished_reason"),
    Metric("vllm:iteration_tokens_total", "histogram",
           "Tokens per step of the engine.", _tokens(lambda t: t.step_tokens)),
    Metric("vllm:time_to_first_token_seconds", "histogram",
           "Time to first token in seconds.", _tokens(lambda t: t.first_token)),
    Metric("vllm:time_per_output_token_seconds", "histogram",
           "Time per output token in seconds.", _tokens(lambda t: t.between_tokens.coarser(BETWEEN))),
    Metric("vllm:inter_token_latency_seconds", "histogram",
           "Time per output token in seconds.", _tokens(lambda t: t.between_tokens)),
    Metric("vllm:e2e_request_latency_seconds", "histogram",
           "End to end request latency in seconds.", _tokens(lambda t: t.whole)),
    Metric("vllm:request_queue_time_seconds", "histogram",
           "Time until the engine took a request up.", _tokens(lambda t: t.queued)),
    Metric("vllm:request_inference_time_seconds", "histogram",
           "Time that a request was in the engine.", _tokens(lambda t: t.engaged)),
    Metric("vllm:request_prefill_time_seconds", "histogram",
           "Of that, until the first token.", _tokens(lambda t: t.reading)),
    Metric("vllm:request_decode_time_seconds", "histogram",
           "Of that, from the first to the last token.", _tokens(lambda t: t.writing)),
    Metric("vllm:request_prompt_tokens", "histogram",
           "Number of prefill tokens processed.", _tokens(lambda t: t.prompt_lengths)),
    Metric("vllm:request_generation_tokens", "histogram",
           "Number of generation tokens processed.", _tokens(lambda t: t.answer_lengths)),
    Metric("vllm:request_params_n", "histogram", "The n request parameter.", _tokens(lambda t: t.sequences)),
    Metric("vllm:num_requests_running", "gauge",
           "Sequences that the engine runs.", _reports(lambda reports: sum(each.running for each in reports))),
    Metric("vllm:num_requests_waiting", "gauge",
           "Requests that wait, before the engine or in it.",
           lambda v: None if v.tokens is None else v.pending + sum(each.waiting for each in v.tokens.latest)),
    Metric("vllm:gpu_cache_usage_perc", "gauge", "KV cache usage. 1 means 100 percent.", _reports(kv_utilization)),
    Metric("vllm:kv_cache_usage_perc", "gauge", "KV cache usage. 1 means 100 percent.", _reports(kv_utilization)),
    Metric("vllm:cache_config_info", "gauge",
           "Blocks of the KV cache, and tokens per block.", _cache_config, "block_size,num_gpu_blocks"),
    Metric("vllm:lora_requests_info", "gauge", "Running stats on lora requests.",
           _adapters, "max_lora,running_lora_adapters,waiting_lora_adapters"),
), ("model", "version", "model_name"), applies=lambda v: v.tokens is not None)  # fmt: skip

ENGINES: Final = MetricTable[MeteredVersion]((
    Metric("nerite_llm_engine_failures_total", "counter",
           "Failed steps, after which the engine restarted in its worker", _tally("failures")),
    Metric("nerite_llm_wasted_tokens_total", "counter",
           "Tokens generated for requests that were cancelled, missed their deadline or failed",
           _by_ending(lambda t: t.wasted_tokens), "reason"),
    Metric("nerite_llm_requests", "gauge", "Requests in the engine", _tokens(lambda t: t.under_way)),
    Metric("nerite_llm_kv_block_tokens", "gauge",
           "Tokens per block of the KV cache",
           _reports(lambda reports: max((each.block_size for each in reports), default=0))),
    Metric("nerite_llm_kv_blocks", "gauge", "Blocks of the KV cache", _kv_blocks, "state"),
), _VERSION, applies=lambda v: v.tokens is not None)  # fmt: skip

TABLES: Final = (
    COUNTS, DURATIONS, STATE, OURS, CACHED, UNCACHED_SUMMARIES, SUMMARIES, CACHED_SUMMARIES, FIRST_RESPONSES, TOKENS,
    ENGINES,
)  # fmt: skip
"""All metrics of versions, in the order of the page."""
