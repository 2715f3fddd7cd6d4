"""The metrics that Triton exports. Those of Nerite alone are held complete by ``tests/unit/test_metrics_page.py``."""

from __future__ import annotations

from typing import Final

_COUNTED: Final = "service/test_metrics.py::test_histograms_agree_with_the_counters"
_CACHE: Final = "service/test_cache.py::test_what_the_metrics_tell"
_SUMMARIES: Final = "service/test_metrics.py::test_summaries_and_the_histogram_of_first_responses"
_MACHINE: Final = "service/test_metrics.py::test_the_machine"
_PINNED: Final = "service/test_models_on_a_gpu.py::test_the_pool_of_pinned_memory"
_GPUS: Final = "service/test_on_gpus.py::test_metrics"

METRICS: Final = {
    "nv_inference_request_success": _COUNTED,
    "nv_inference_request_failure": "service/test_metrics.py::test_why_requests_failed",
    "nv_inference_count": _COUNTED,
    "nv_inference_exec_count": _COUNTED,
    "nv_inference_request_duration_us": _COUNTED,
    "nv_inference_queue_duration_us": _COUNTED,
    "nv_inference_compute_input_duration_us": _COUNTED,
    "nv_inference_compute_infer_duration_us": _COUNTED,
    "nv_inference_compute_output_duration_us": _COUNTED,
    "nv_inference_pending_request_count": "service/test_queues.py::test_a_queue_of_three_admits_three",
    "nv_model_load_duration_secs": _COUNTED,
    "nv_inference_first_response_histogram_ms": _SUMMARIES,
    "nv_inference_request_summary_us": _SUMMARIES,
    "nv_inference_queue_summary_us": _SUMMARIES,
    "nv_inference_compute_input_summary_us": _SUMMARIES,
    "nv_inference_compute_infer_summary_us": _SUMMARIES,
    "nv_inference_compute_output_summary_us": _SUMMARIES,
    "nv_cache_num_hits_per_model": _CACHE,
    "nv_cache_num_misses_per_model": _CACHE,
    "nv_cache_hit_duration_per_model": _CACHE,
    "nv_cache_miss_duration_per_model": _CACHE,
    "nv_cache_hit_summary_per_model": _SUMMARIES,
    "nv_cache_miss_summary_per_model": _SUMMARIES,
    "nv_cache_util": _CACHE,
    "nv_cache_num_entries": _CACHE,
    "nv_cache_num_lookups": _CACHE,
    "nv_cache_num_hits": _CACHE,
    "nv_cache_num_misses": _CACHE,
    "nv_cache_num_evictions": _CACHE,
    "nv_cache_lookup_duration": _CACHE,
    "nv_cache_insertion_duration": _CACHE,
    "nv_cpu_utilization": _MACHINE,
    "nv_cpu_memory_total_bytes": _MACHINE,
    "nv_cpu_memory_used_bytes": _MACHINE,
    "nv_pinned_memory_pool_total_bytes": _PINNED,
    "nv_pinned_memory_pool_used_bytes": _PINNED,
    "nv_gpu_utilization": _GPUS,
    "nv_gpu_memory_total_bytes": _GPUS,
    "nv_gpu_memory_used_bytes": _GPUS,
    "nv_gpu_power_usage": _GPUS,
    "nv_gpu_power_limit": _GPUS,
    "nv_energy_consumption": _GPUS,
}
