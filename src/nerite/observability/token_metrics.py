"""The metrics of language models, made of their statistics when the page is asked for.

What vLLM has keeps vLLM's names and, as Triton shows it, the labels ``model`` and ``version``; the rest is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from nerite.core.engine_report import EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.request import InferenceRequest
from nerite.observability.exposition import Labels, MetricFamily, Sample, Value, joined, label
from nerite.observability.histogram import Histogram, one_two_five

# Counting tokens: what the reports of the engines of one model version add up to.
#
# As in ``statistics``, all of it happens on the loop's thread, and a token costs an addition.

# Those of Triton's vLLM backend, so that dashboards read the same.
_FIRST: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
BETWEEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_CLOSER: Final = (0.001, 0.0025, 0.005, *BETWEEN, 5.0, 7.5, 10.0)
_REQUEST: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_STEP: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SEQUENCES: Final = (1, 2, 5, 10, 20)

TALLIES: Final = ("prefix_queries", "prefix_hits", "preemptions", "drafted", "accepted", "failures")
"""What an engine counts by itself, since it began."""


class _Course:
    """A request that an engine has."""

    __slots__ = ("begun", "engine", "first_ns", "last_ns", "late", "tokens")

    def __init__(self, engine: object) -> None:
        self.engine = engine
        self.begun: RequestBegun | None = None
        self.tokens = 0
        self.first_ns = 0
        """When the first token was here."""
        self.last_ns = 0
        self.late = False
        """Its deadline has passed."""


class TokenStatistics:
    """Those of one model version, from the first report to its unload."""

    def __init__(self, context_length: int) -> None:
        """``context_length``: tokens of prompt and answer that a sequence can have."""
        lengths = one_two_five(context_length)
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.wasted_tokens = dict.fromkeys((RequestEnded.CANCELLED, RequestEnded.TOO_LATE, RequestEnded.FAILED), 0)
        """Generated for requests that had no good end."""
        self.ended = dict.fromkeys(RequestEnded, 0)
        self.tallies: dict[str, int | None] = dict.fromkeys(TALLIES)
        """What the engines have counted, those that are gone, too; None if none of them tells."""
        self.step_tokens = Histogram(_STEP)
        self.first_token = Histogram(_FIRST)
        self.between_tokens = Histogram(_CLOSER)
        self.whole = Histogram(_REQUEST)
        self.queued = Histogram(_REQUEST)
        self.engaged = Histogram(_REQUEST)
        self.reading = Histogram(_REQUEST)
        self.writing = Histogram(_REQUEST)
        self.prompt_lengths = Histogram(lengths)
        self.answer_lengths = Histogram(lengths)
        self.sequences = Histogram(_SEQUENCES)
        self._courses: dict[InferenceRequest, _Course] = {}
        self._latest: dict[object, EngineReport] = {}

    @property
    def under_way(self) -> int:
        """Requests that engines have."""
        return len(self._courses)

    @property
    def latest(self) -> list[EngineReport]:
        """The last report of each engine that is there."""
        return list(self._latest.values())

    def reported(self, engine: object, report: EngineReport | None, now: int) -> None:
        """Count what an engine says; None: it is gone, and what it had has failed."""
        before = self._latest.pop(engine, None)
        if report is None:
            for request, course in list(self._courses.items()):
                if course.engine is engine:
                    self._end(request, course, RequestEnded.FAILED, now)
            return
        self._latest[engine] = report
        tallies = self.tallies
        for name in TALLIES:
            count = getattr(report, name)
            if count is not None:
                known = getattr(before, name, None) or 0
                tallies[name] = (tallies[name] or 0) + max(count - known, 0)
        if report.progress:
            self.step_tokens.note(sum([self._advance(engine, progress, now) for progress in report.progress]))

    def too_late(self, request: InferenceRequest) -> None:
        """Note that a request is cut because its deadline has passed."""
        if request in self._courses:
            self._courses[request].late = True

    def _advance(self, engine: object, progress: RequestProgress, now: int) -> int:
        """Count what a step has brought to a request; return the tokens that the step had to do with."""
        request, tokens, begun, ended = progress
        course = self._courses.get(request)
        if course is None:
            course = self._courses[request] = _Course(engine)
        done = tokens
        if begun is not None:
            course.begun = begun
            done += begun.prompt_tokens
            self.prompt_tokens += begun.prompt_tokens
            self.queued.note((begun.at_ns - request.arrived_ns) / 1e9)
        if tokens:
            self.generated_tokens += tokens
            if course.tokens:
                self.between_tokens.note((now - course.last_ns) / 1e9)
            else:
                course.first_ns = now
                self.first_token.note((now - request.arrived_ns) / 1e9)
            course.tokens += tokens
            course.last_ns = now
        if ended is not None:
            self._end(request, course, ended, now)
        return done

    def _end(self, request: InferenceRequest, course: _Course, ended: RequestEnded, now: int) -> None:
        del self._courses[request]
        if course.late and ended is RequestEnded.CANCELLED:
            ended = RequestEnded.TOO_LATE
        self.ended[ended] += 1
        if ended in self.wasted_tokens:
            self.wasted_tokens[ended] += course.tokens
        self.whole.note((now - request.arrived_ns) / 1e9)
        begun = course.begun
        if begun is None:
            return
        self.engaged.note((now - begun.at_ns) / 1e9)
        self.prompt_lengths.note(begun.prompt_tokens)
        self.answer_lengths.note(course.tokens)
        self.sequences.note(begun.sequences)
        if course.tokens:
            self.reading.note((course.first_ns - begun.at_ns) / 1e9)
            self.writing.note((course.last_ns - course.first_ns) / 1e9)


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
            "KV cache usage. 1 means 100 percent.", lambda v: kv_utilization(v.reports)),
    _Metric("vllm:kv_cache_usage_perc", "gauge",
            "KV cache usage. 1 means 100 percent.", lambda v: kv_utilization(v.reports)),
    _Metric("nerite_llm_kv_block_tokens", "gauge",
            "Tokens that a block of the KV cache holds",
            lambda v: max((each.block_size for each in v.reports), default=0)),
    _Metric("nerite_llm_kv_blocks", "gauge",
            "Blocks of the KV cache", lambda v: dict(zip(("used", "free"), _blocks(v.reports), strict=True)), "state"),
)  # fmt: skip


def kv_utilization(reports: Iterable[EngineReport]) -> float:
    """Return the share of the KV blocks of several engines that is in use."""
    used, free = _blocks(reports)
    return used / (used + free) if used + free else 0.0


def token_families(versions: Iterable[Labelled]) -> list[MetricFamily]:
    """Return the metrics of language models; none if there are no such models."""
    read = [(of, _Version(counted, counted.latest, pending)) for of, counted, pending in versions]
    if not read:
        return []
    return [MetricFamily(metric.name, metric.help, metric.type, list(_samples(metric, read))) for metric in _METRICS]


def _samples(metric: _Metric, versions: Iterable[tuple[Labels, _Version]]) -> Iterator[Sample]:
    for of, version in versions:
        value = metric.read(version)
        if isinstance(value, Mapping):
            yield from ((joined(of, label(metric.label, which)), each) for which, each in value.items())
        elif value is not None:
            yield of, value


def _by_ending(counts: Mapping[RequestEnded, int]) -> dict[str, Value]:
    return {ended.value: count for ended, count in counts.items()}


def _blocks(reports: Iterable[EngineReport]) -> tuple[int, int]:
    """Return how many KV blocks are in use, and how many free."""
    total = free = 0
    for each in reports:
        total += each.total_blocks
        free += each.free_blocks
    return total - free, free
