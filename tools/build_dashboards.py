"""Writes the dashboards of deploy/grafana. A test says when they are out of date.

python tools/build_dashboards.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

FOLDER: Final = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_OF: Final = '{model=~"$model",instance=~"$instance"}'
_COLUMNS: Final = 3
_WIDTH, _HEIGHT = 24 // _COLUMNS, 8


class Panel(NamedTuple):
    """A plot: one line, or several, for each query."""

    title: str
    unit: str
    queries: Sequence[tuple[str, str]]
    """What is asked, and the legend."""
    about: str = ""
    kind: str = "timeseries"


def rate(metric: str, by: str = "model", only: str = "") -> str:
    """Return what a counter gains in a second."""
    of = _OF if not only else _OF[:-1] + f",{only}}}"
    return f"sum by ({by}) (rate({metric}{of}[$__rate_interval]))"


def gauge(metric: str, by: str = "model") -> str:
    """Return the values of a gauge."""
    return f"sum by ({by}) ({metric}{_OF})"


def percentile(share: float, metric: str, by: str = "model") -> str:
    """Return a percentile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', f'le, {by}')})"


def percentiles(metric: str) -> list[tuple[str, str]]:
    """Return the middle and the slow end of a histogram."""
    return [(percentile(share, metric), f"{{{{model}}}} p{share * 100:g}") for share in (0.5, 0.95, 0.99)]


def mean(metric: str, by: str = "model") -> str:
    """Return the mean of a histogram."""
    return f"{rate(f'{metric}_sum', by)} / {rate(f'{metric}_count', by)}"


_REFUSED: Final = 'reason=~"queue_full|queue_timeout|not_let_in"'
_THROUGHPUT: Final = Panel("Requests", "reqps", [(rate("nv_inference_request_success"), "{{model}}")])
_LATENCY: Final = Panel("Latency", "s", percentiles("nerite_request_duration_seconds"))
_FAILURES: Final = Panel(
    "Failures", "reqps", [(rate("nerite_request_failures_total", "model, reason"), "{{model}} {{reason}}")]
)
_GIVEN_UP: Final = Panel(
    "Given up",
    "reqps",
    [(rate("nerite_requests_given_up_total", "model, reason"), "{{model}} {{reason}}")],
    "Requests whose callers stopped waiting.",
)
_WAITING: Final = Panel("Waiting", "short", [(gauge("nv_inference_pending_request_count"), "{{model}}")])
_MEMORY: Final = Panel("Memory of models", "bytes", [(gauge("nerite_model_memory_bytes"), "{{model}}")])
_RESTARTS: Final = Panel("Workers that died", "short", [(rate("nerite_worker_restarts_total"), "{{model}}")])
_PROCESSOR: Final = Panel("Processor", "percentunit", [('nv_cpu_utilization{instance=~"$instance"}', "{{instance}}")])
_BACKGROUND: Final = Panel(
    "Background loops: stalled, and set aside",
    "short",
    [
        ('sum by (instance, loop) (nerite_background_stalled{instance=~"$instance"})', "{{instance}} {{loop}} stalled"),
        ('sum by (instance, loop) (nerite_background_set_aside{instance=~"$instance"})', "{{instance}} {{loop}} aside"),
    ],
    "All are to be 0.",
)
_MACHINE: Final = Panel(
    "Memory of the machine",
    "bytes",
    [
        ('nv_cpu_memory_used_bytes{instance=~"$instance"}', "{{instance}} used"),
        ('nv_cpu_memory_total_bytes{instance=~"$instance"}', "{{instance}} there"),
    ],
)


def of_arms(query: str) -> str:
    """Return the values of a query by model and version, for versions in a rollout: with the label ``arm``."""
    return (
        f"{query} * on (model, version) group_left (arm) max by (model, version, arm) (nerite_rollout_weight{_OF} ^ 0)"
    )


def towards_boundary(kind: str) -> str:
    """Return how far the evidence of each gate has grown towards its boundary."""
    of = _OF[:-1] + f',kind="{kind}"}}'
    return f"max by (model, gate) (nerite_rollout_evidence{of} / nerite_rollout_evidence_boundary{of})"


_ARM: Final = "{{model}} {{version}} {{arm}}"
_ROLLOUT: Final = (
    Panel("Rollout: weights", "percentunit",
          [(f"max by (model, version, arm) (nerite_rollout_weight{_OF})", _ARM)]),
    Panel("Rollout: requests", "reqps", [(rate("nerite_rollout_requests_total", "model, version, arm"), _ARM)]),
    Panel("Rollout: errors", "percentunit",
          [(rate("nerite_rollout_requests_total", "model, version, arm", 'outcome=~"error|timeout"') + " / "
            + rate("nerite_rollout_requests_total", "model, version, arm"), _ARM)],
          "Of all requests to a version."),
    *(
        Panel(f"Rollout: {title}", "s",
              [(of_arms(percentile(share, metric, "model, version")), f"{_ARM} p{share * 100:g}")],
              "Of all requests to a version, those that name it included.")
        for title, share, metric in (
            ("latency", 0.99, "nerite_request_duration_seconds"),
            ("time to first token", 0.95, "vllm:time_to_first_token_seconds"),
            ("time between tokens", 0.95, "vllm:inter_token_latency_seconds"),
        )
    ),
    Panel("Rollout: evidence of harm", "percentunit", [(towards_boundary("worse"), "{{model}} {{gate}}")],
          "At 100 % the candidate is rolled back."),
    Panel("Rollout: proof", "percentunit", [(towards_boundary("not_worse"), "{{model}} {{gate}}")],
          "Once all gates are at 100 %, the candidate may be promoted."),
    Panel("Rollout: decisions", "short",
          [(f"sum by (model, reason) (increase(nerite_rollout_decisions_total{_OF}[$__rate_interval]))",
            "{{model}} {{reason}}")]),
)  # fmt: skip

_ROUTER: Final = '{pool=~"$pool",instance=~"$instance"}'
_TENANTS: Final = 'instance=~"$instance"'


def routed(metric: str, by: str, only: str = "") -> str:
    """Return what a counter of a router gains in a second."""
    of = _ROUTER if not only else _ROUTER[:-1] + f",{only}}}"
    return f"sum by ({by}) (rate({metric}{of}[$__rate_interval]))"


def at_router(metric: str, by: str = "pool") -> str:
    """Return the values of a gauge of a router."""
    return f"sum by ({by}) ({metric}{_ROUTER})"


def of_tenants(metric: str, by: str, only: str = "") -> str:
    """Return what a counter of admission control gains in a second."""
    return f"sum by ({by}) (rate({metric}{{{_TENANTS}{only}}}[$__rate_interval]))"


_PLATFORM: Final = (
    Panel("Requests by member", "reqps", [(routed("nerite_router_requests", "pool, member"), "{{pool}} {{member}}")]),
    Panel("Requests by how they ended", "reqps",
          [(routed("nerite_router_requests", "pool, code"), "{{pool}} {{code}}")],
          "lost, cancelled: without an answer."),
    Panel("Latency", "s",
          [(f"histogram_quantile({share}, {routed('nerite_router_seconds_bucket', 'le, pool')})",
            f"{{{{pool}}}} p{share * 100:g}") for share in (0.5, 0.95, 0.99)],
          "From the arrival of a request to the end of its answer."),
    Panel("Members", "short",
          [(at_router("nerite_router_members"), "{{pool}} there"),
           (at_router("nerite_router_members_ready"), "{{pool}} ready"),
           (at_router("nerite_router_members_draining"), "{{pool}} draining"),
           (at_router("nerite_router_members_ejected"), "{{pool}} ejected")]),
    Panel("Requests at members", "short",
          [(at_router("nerite_router_member_requests", "pool, member"), "{{pool}} {{member}}")]),
    Panel("Work at members", "short",
          [(at_router("nerite_router_member_work", "pool, member"), "{{pool}} {{member}}")],
          "Tokens that are still to be computed."),
    Panel("Without an answer, by member", "reqps",
          [(routed("nerite_router_requests", "pool, member, code", 'code=~"lost|cancelled"'),
            "{{pool}} {{member}} {{code}}")]),
    Panel("Sent again", "reqps", [(routed("nerite_router_retries_total", "pool, reason"), "{{pool}} {{reason}}")]),
    Panel("Refused by the router", "reqps", [(of_tenants("nerite_router_refused_total", "code"), "{{code}}")]),
    Panel("Requests of tenants", "reqps", [(of_tenants("nerite_admission_offered", "tenant"), "{{tenant}}")]),
    Panel("Refused to tenants", "reqps",
          [(of_tenants("nerite_admission_refused", "tenant, reason"), "{{tenant}} {{reason}}")]),
    Panel("Tokens of tenants", "short",
          [(of_tenants("nerite_admission_input_tokens", "tenant"), "{{tenant}} of prompts"),
           (of_tenants("nerite_admission_output_tokens", "tenant"), "{{tenant}} of answers")]),
    Panel("Waiting to be admitted", "short",
          [(f"sum by (model) (nerite_admission_waiting{{{_TENANTS}}})", "{{model}}")]),
    Panel("Processor time", "percentunit",
          [('rate(nerite_route_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])', "{{instance}}")],
          "Of one processor."),
    Panel("Time of decisions", "s",
          [('histogram_quantile(0.99, sum by (le, instance) '
            '(rate(nerite_router_decision_seconds_bucket{instance=~"$instance"}[$__rate_interval])))',
            "{{instance}} p99")]),
    _BACKGROUND,
)  # fmt: skip

DASHBOARDS: Final = {
    "router": ("Nerite: routers and pools", _PLATFORM),
    "overview": (
        "Nerite: overview",
        (_THROUGHPUT, _LATENCY, _FAILURES, _WAITING, _GIVEN_UP, _RESTARTS, _PROCESSOR, _MACHINE, _MEMORY, _BACKGROUND),
    ),
    "model": (
        "Nerite: a model",
        (
            _THROUGHPUT,
            _LATENCY,
            Panel(
                "Latency, all requests", "s",
                [(rate("nerite_request_duration_seconds_bucket", "le"), "{{le}}")], kind="heatmap",
            ),
            Panel("Where the time goes", "s", [(mean("nerite_stage_duration_seconds", "stage"), "{{stage}}")],
                  "Mean of each stage; a request has all the time of its batch."),
            Panel("Slowest of a hundred, by stage", "s",
                  [(percentile(0.99, "nerite_stage_duration_seconds", "stage"), "{{stage}}")]),
            Panel("Queue", "short", [(gauge("nerite_queue_requests", "model, priority"), "{{model}} {{priority}}")]),
            Panel("Rows and executions", "ops",
                  [(rate("nv_inference_count"), "{{model}} rows"),
                   (rate("nv_inference_exec_count"), "{{model}} runs")]),
            Panel("Rows of an execution", "short", [(mean("nerite_batch_rows"), "{{model}} mean"),
                                                    (percentile(0.9, "nerite_batch_rows"), "{{model}} p90")]),
            Panel("Why batches begin", "ops", [(rate("nerite_batch_releases_total", "reason"), "{{reason}}")]),
            _FAILURES,
            _GIVEN_UP,
            Panel("Answers from the cache", "percentunit",
                  [(f"{rate('nv_cache_num_hits_per_model')} / ({rate('nv_cache_num_hits_per_model')} + "
                    f"{rate('nv_cache_num_misses_per_model')})", "{{model}}")]),
            _MEMORY,
            _RESTARTS,
            Panel("Time to load", "s", [(f"max by (model) (nv_model_load_duration_secs{_OF})", "{{model}}")]),
            *_ROLLOUT,
        ),
    ),
    "llm": (
        "Nerite: language models",
        (
            Panel("Tokens", "ops", [(rate("vllm:generation_tokens_total"), "{{model}} written"),
                                    (rate("vllm:prompt_tokens_total"), "{{model}} read")]),
            Panel("Time to first token", "s", percentiles("vllm:time_to_first_token_seconds")),
            Panel("Time between tokens", "s", percentiles("vllm:inter_token_latency_seconds")),
            Panel("Whole requests", "s", percentiles("vllm:e2e_request_latency_seconds")),
            Panel("Running and waiting", "short", [(gauge("vllm:num_requests_running"), "{{model}} running"),
                                                   (gauge("vllm:num_requests_waiting"), "{{model}} waiting")]),
            Panel("KV memory", "percentunit", [(f"max by (model) (vllm:kv_cache_usage_perc{_OF})", "{{model}}")]),
            Panel("How requests end", "reqps",
                  [(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")]),
            Panel("Tokens for nobody", "ops", [(rate("nerite_llm_wasted_tokens_total", "reason"), "{{reason}}")]),
            Panel("Found in the prefix cache", "percentunit",
                  [(f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}",
                    "{{model}}")]),
            Panel("Guesses that were right", "percentunit",
                  [(f"{rate('vllm:spec_decode_num_accepted_tokens_total')} / "
                    f"{rate('vllm:spec_decode_num_draft_tokens_total')}", "{{model}}")]),
            Panel("Length of prompts and answers", "short",
                  [(percentile(0.9, "vllm:request_prompt_tokens"), "{{model}} prompt p90"),
                   (percentile(0.9, "vllm:request_generation_tokens"), "{{model}} answer p90")]),
            Panel("Tenants", "ops", [(rate("nerite_admission_output_tokens", "tenant"), "{{tenant}}")],
                  "Tokens that were generated for each."),
            Panel("Refused", "reqps", [(rate("nerite_admission_refused", "tenant, reason"), "{{tenant}} {{reason}}")]),
            Panel("Preempted, and engines that failed", "ops",
                  [(rate("vllm:num_preemptions_total"), "{{model}} preempted"),
                   (rate("nerite_llm_engine_failures_total"), "{{model}} failed")]),
        ),
    ),
    "capacity": (
        "Nerite: capacity",
        (
            Panel("Share of the time in the queue", "percentunit",
                  [(rate("nerite_stage_duration_seconds_sum", only='stage="queue"') + " / "
                    + rate("nerite_request_duration_seconds_sum"), "{{model}}")],
                  "Near 0 there is room; near 1 more instances, or larger batches, would help."),
            Panel("Refused", "percentunit",
                  [(f"{rate('nerite_request_failures_total', only=_REFUSED)} / "
                    f"({rate('nv_inference_request_success')} + {rate('nerite_request_failures_total')})",
                    "{{model}}")],
                  "Of all requests."),
            _WAITING,
            Panel("Rows of an execution", "short", [(mean("nerite_batch_rows"), "{{model}}")]),
            _MEMORY,
            Panel("KV memory that is left", "short",
                  [('sum by (model) (nerite_llm_kv_blocks{state="free",model=~"$model",instance=~"$instance"})',
                    "{{model}} blocks")]),
            _PROCESSOR,
            _MACHINE,
            Panel("GPUs", "percentunit", [('nv_gpu_utilization{instance=~"$instance"}', "{{gpu_uuid}}")]),
            Panel("Memory of GPUs", "percentunit",
                  [('nv_gpu_memory_used_bytes{instance=~"$instance"} / nv_gpu_memory_total_bytes', "{{gpu_uuid}}")]),
            Panel("Power of GPUs", "watt", [('nv_gpu_power_usage{instance=~"$instance"}', "{{gpu_uuid}}")]),
        ),
    ),
}  # fmt: skip


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    title, panels = DASHBOARDS[name]
    chosen = (
        ("instance", "nv_inference_request_success"),
        ("model", 'nv_inference_request_success{instance=~"$instance"}'),
    )
    if name == "router":
        chosen = ("instance", "nerite_router_members"), ("pool", 'nerite_router_members{instance=~"$instance"}')
    return {
        "uid": f"nerite-{name}",
        "title": title,
        "tags": ["nerite"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"title": "Nerite", "type": "dashboards", "tags": ["nerite"], "keepTime": True, "includeVars": True}],
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                *(_variable(label, of) for label, of in chosen),
            ]
        },
        "panels": [_panel(place, panel) for place, panel in enumerate(panels)],
    }


def _variable(label: str, of: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f"label_values({of}, {label})", "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(place: int, panel: Panel) -> dict[str, Any]:
    heatmap = panel.kind == "heatmap"
    row, column = divmod(place, _COLUMNS)
    return {
        "id": place + 1,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"yAxis": {"unit": panel.unit}} if heatmap else {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
                "format": "heatmap" if heatmap else "time_series",
            }
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def text(name: str) -> str:
    """Return the file of a dashboard."""
    return json.dumps(dashboard(name), indent=2) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(text(each))
