"""What reports of engines add up to, and the page that is made of it, as a real parser reads it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from doubles import request, written
from nerite.core.engine_report import AdapterUse, EngineReport, RequestBegun, RequestEnded, RequestProgress
from nerite.core.request import InferenceRequest
from nerite.observability.exposition import Page
from nerite.observability.histogram import Histogram, one_two_five
from nerite.observability.model_metrics import ENGINES, TOKENS, MeteredVersion, version_labels
from nerite.observability.statistics import VersionStatistics
from nerite.observability.token_statistics import TokenStatistics

MS = 1_000_000
LABELS = {"model": "m", "version": "1"}


def written_tokens(statistics: TokenStatistics | None) -> bytes:
    version = MeteredVersion("m", "1", "", {}, VersionStatistics(), 2, 0, 0, 0, {}, {}, 1, False, statistics)

    def write(page: Page) -> None:
        page.write(TOKENS, [(version_labels(version, vllm=True), version)])
        page.write(ENGINES, [(version_labels(version), version)])

    return written(write)


class Bench:
    """Engines that report, at times of our own."""

    def __init__(self) -> None:
        self.statistics = TokenStatistics(100)
        self.now = 0

    def says(self, *progress: RequestProgress, engine: str = "a", after: int = 10, **state: Any) -> None:
        """``after`` so many milliseconds."""
        self.now += after * MS
        self.statistics.reported(engine, EngineReport(progress=progress, **state), self.now)

    def dies(self, engine: str = "a") -> None:
        self.statistics.reported(engine, None, self.now)

    def begun(self, prompt: int = 4, sequences: int = 1) -> RequestBegun:
        return RequestBegun(self.now + 2 * MS, prompt, 0, sequences)

    def arrives(self) -> InferenceRequest:
        return request(arrived_ns=self.now)

    def samples(self) -> dict[str, float]:
        """Return the page by name and what is not a label of every sample."""
        page = written_tokens(self.statistics).decode()
        found = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                own = {name: value for name, value in sample.labels.items() if name not in LABELS}
                assert own.pop("model_name", None) == ("m" if sample.name.startswith("vllm:") else None)
                assert sample.labels.items() >= LABELS.items()
                found[sample.name + "".join(f" {value}" for value in own.values())] = sample.value
        return found


def test_the_course_of_a_request() -> None:
    bench = Bench()
    asked = bench.arrives()
    begun = bench.begun(prompt=30, sequences=2)
    bench.says(RequestProgress(asked, 0, begun))
    bench.says(RequestProgress(asked, 2))
    assert bench.statistics.under_way == 1
    bench.says(RequestProgress(asked, 2), after=30)
    bench.says(RequestProgress(asked, 1, None, RequestEnded.LENGTH))
    found = bench.samples()
    assert bench.statistics.under_way == 0
    expected = {
        "vllm:prompt_tokens_total": 30,
        "vllm:generation_tokens_total": 5,
        "vllm:time_to_first_token_seconds_sum": 0.02,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_bucket 0.01": 0,
        "vllm:time_to_first_token_seconds_bucket 0.02": 1,
        "vllm:time_per_output_token_seconds_sum": 0.04,
        "vllm:time_per_output_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_bucket 0.01": 1,
        "vllm:inter_token_latency_seconds_bucket 0.05": 2,
        "vllm:e2e_request_latency_seconds_sum": 0.06,
        "vllm:request_queue_time_seconds_sum": 0.002,
        "vllm:request_inference_time_seconds_sum": 0.058,
        "vllm:request_prefill_time_seconds_sum": 0.018,
        "vllm:request_decode_time_seconds_sum": 0.04,
        "vllm:request_prompt_tokens_bucket 20": 0,
        "vllm:request_prompt_tokens_bucket 50": 1,
        "vllm:request_generation_tokens_sum": 5,
        "vllm:request_params_n_sum": 2,
        "vllm:request_params_n_bucket 2": 1,
        "vllm:iteration_tokens_total_sum": 35,
        "vllm:iteration_tokens_total_count": 4,
        "vllm:request_success_total length": 1,
        "vllm:request_success_total stop": 0,
        "nerite_llm_wasted_tokens_total abort": 0,
        "nerite_llm_requests": 0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_tokens_of_those_without_a_good_end_are_wasted() -> None:
    bench = Bench()
    for tokens, ended in (
        (3, RequestEnded.CANCELLED),
        (5, RequestEnded.TOO_LATE),
        (7, RequestEnded.FAILED),
        (9, RequestEnded.STOP),
    ):
        asked = bench.arrives()
        bench.says(RequestProgress(asked, tokens, bench.begun()))
        bench.says(RequestProgress(asked, 0, None, ended))
    found = bench.samples()
    assert [found[f"nerite_llm_wasted_tokens_total {why}"] for why in ("abort", "timeout", "error")] == [3, 5, 7]
    assert found["vllm:generation_tokens_total"] == 24
    assert found["vllm:request_success_total timeout"] == 1


def test_one_that_is_cut_because_it_is_late_is_no_client_that_went() -> None:
    bench = Bench()
    asked = bench.arrives()
    bench.says(RequestProgress(asked, 3, bench.begun()))
    bench.statistics.too_late(asked)
    bench.says(RequestProgress(asked, 1, None, RequestEnded.CANCELLED))
    bench.statistics.too_late(asked)
    found = bench.samples()
    assert (found["vllm:request_success_total timeout"], found["vllm:request_success_total abort"]) == (1, 0)
    assert found["nerite_llm_wasted_tokens_total timeout"] == 4


def test_a_request_that_never_began_has_ended_and_no_more() -> None:
    bench = Bench()
    bench.says(RequestProgress(bench.arrives(), 0, None, RequestEnded.FAILED))
    found = bench.samples()
    assert found["vllm:request_success_total error"] == 1
    assert found["vllm:request_inference_time_seconds_count"] == found["vllm:request_params_n_count"] == 0


def test_how_the_engines_are() -> None:
    bench = Bench()
    bench.says(running=2, waiting=1, total_blocks=100, free_blocks=90, block_size=16)
    bench.says(engine="b", running=3, total_blocks=100, free_blocks=60, block_size=16)
    found = bench.samples()
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (5, 3)
    assert found["vllm:gpu_cache_usage_perc"] == found["vllm:kv_cache_usage_perc"] == 0.25
    assert (found["nerite_llm_kv_blocks used"], found["nerite_llm_kv_blocks free"]) == (50, 150)
    assert found["nerite_llm_kv_block_tokens"] == 16


def test_what_a_picker_reads_of_the_cache_and_of_adapters() -> None:
    bench = Bench()
    bench.says(total_blocks=100, block_size=16, adapters=AdapterUse(2, ("a",), ("b",)))
    bench.says(engine="b", total_blocks=50, block_size=16, adapters=AdapterUse(2, ("b",)))
    page = {family.name: family for family in text_string_to_metric_families(written_tokens(bench.statistics).decode())}
    (cache,) = page["vllm:cache_config_info"].samples
    own = {"model_name": "m", "block_size": "16", "num_gpu_blocks": "150"}
    assert (cache.labels, cache.value) == ({**LABELS, **own}, 1)
    (use,) = page["vllm:lora_requests_info"].samples
    own = {"model_name": "m", "max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "b"}
    assert use.labels == {**LABELS, **own}
    assert abs(use.value - time.time()) < 3600


def test_engines_without_adapters_and_blocks_have_no_such_samples() -> None:
    bench = Bench()
    bench.says()
    assert not [name for name in bench.samples() if "_info" in name]


def test_what_an_engine_does_not_tell_is_not_there() -> None:
    bench = Bench()
    bench.says()
    assert not [name for name in bench.samples() if "prefix" in name or "preempt" in name or "spec" in name]
    bench.says(prefix_queries=0, preemptions=0)
    found = bench.samples()
    assert found["vllm:prefix_cache_queries_total"] == found["vllm:num_preemptions_total"] == 0
    assert "vllm:prefix_cache_hits_total" not in found


def test_an_engine_that_dies_takes_its_requests_and_leaves_what_it_counted() -> None:
    bench = Bench()
    lost, other = bench.arrives(), bench.arrives()
    bench.says(RequestProgress(lost, 4, bench.begun()), running=1, total_blocks=10, free_blocks=1, prefix_hits=7)
    bench.says(RequestProgress(other, 4, bench.begun()), engine="b", total_blocks=10, free_blocks=10, prefix_hits=1)
    bench.dies()
    found = bench.samples()
    assert (found["vllm:num_requests_running"], found["nerite_llm_kv_blocks used"]) == (0, 0)
    assert (found["nerite_llm_requests"], found["vllm:request_success_total error"]) == (1, 1)
    assert found["nerite_llm_wasted_tokens_total error"] == 4
    # The new one begins to count from nothing.
    bench.says(prefix_hits=2)
    bench.says(prefix_hits=5)
    assert bench.samples()["vllm:prefix_cache_hits_total"] == 13
    bench.dies("b")
    bench.dies("b")
    assert bench.samples()["nerite_llm_requests"] == 0


def test_without_language_models_nothing_is_said_of_them() -> None:
    assert written_tokens(None) == b""


@given(st.lists(st.floats(0, 20)))
def test_a_distribution(values: list[float]) -> None:
    made = Histogram((0.5, 1.0, 10.0))
    for value in values:
        made.note(value)
    assert sum(made.counts) == len(values)
    assert made.counts[0] == sum(value <= 0.5 for value in values)
    assert made.counts[-1] == sum(value > 10 for value in values)
    assert made.total == pytest.approx(sum(values))
    few = Histogram((1.0,))
    for value in values:
        few.note(value)
    assert made.coarser((1.0,)).counts == few.counts


def test_bounds_of_lengths() -> None:
    assert one_two_five(100) == [1, 2, 5, 10, 20, 50, 100]
    assert one_two_five(99) == [1, 2, 5, 10, 20, 50]
    assert one_two_five(0) == []
