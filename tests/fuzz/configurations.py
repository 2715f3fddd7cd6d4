"""Files that people write: config.pbtxt, its form in JSON, and policies; and the words that mean something in them."""

from __future__ import annotations

import contextlib
import json
import random
import re
from typing import Final

from fuzz import administration
from fuzz.mutators import documents, words
from nerite.wire import schema

_FIELDS: Final = (
    'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1, -1 ] reshape { shape: [ -1 ] } },'
    ' { name: "B" data_type: TYPE_STRING format: FORMAT_NONE dims: [ 1 ] optional: true } ]',
    'input { name: "X" data_type: TYPE_INT64 dims: -1 } input { name: "Y" data_type: TYPE_BOOL dims: [ 2, 2 ] }',
    'output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] label_filename: "" } ]',
    "output { name: 'Z' data_type: TYPE_BF16 dims: [ 1 ] reshape { shape: [ ] } }",
    'batch_input { kind: BATCH_ITEM_SHAPE target_name: "SHAPE" data_type: TYPE_FP32 source_input: "INPUT0" }',
    """sequence_batching {
  max_sequence_idle_microseconds: 5000000
  oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 10 }
  control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
                  { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } ]
  state [ { input_name: "IN" output_name: "OUT" data_type: TYPE_FP32 dims: [ 2 ]
            initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } ]
}""",
    """dynamic_batching < preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 preserve_ordering: false;
  priority_levels: 2, default_priority_level: 1
  priority_queue_policy { key: 2
    value { timeout_action: DELAY default_timeout_microseconds: 7 max_queue_size: 0x10 } } >""",
    """instance_group [ { name: "g" kind: KIND_CPU count: 2
    rate_limiter { resources [ { name: "R" count: 1 } ] priority: 1 } } ]""",
    'parameters: { key: "EXECUTION_MODE", value: { string_value: "in_process" } }  # a comment',
    """model_warmup [ { name: "w" batch_size: 1
    inputs { key: "INPUT0" value: { data_type: TYPE_FP32 dims: 4 zero_data: true } } } ]""",
    "version_policy: { specific { versions: [ 1, 3 ] } }",
    """optimization { graph { level: 1 } priority: PRIORITY_MAX cuda { graphs: true }
  execution_accelerators { cpu_execution_accelerator [ { name: "openvino" parameters { key: "a" value: "b" } } ] } }""",
    "response_cache { enable: true } model_transaction_policy { decoupled: false }",
    'metric_tags { key: "team" value: "a\\n\\x41\\101" } default_model_filename: "model" ".onnx"',
    """model_metrics { metric_control [ { metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 1, 2.5, 1e3 ] } } ] }""",
)
"""Fields of a configuration, most of which go together."""
_STEPS: Final = """platform: "ensemble" max_batch_size: 1
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { max_inflight_requests: 3 step [
  { model_name: "guest" model_version: -1
    input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "A" } },
  { model_name: "guest_b" model_version: 1
    input_map { key: "INPUT0" value: "A" } output_map { key: "OUTPUT0" value: "OUTPUT0" } }
] }
"""
_HEADS: Final = ('backend: "python" max_batch_size: 8', "platform: 'onnxruntime_onnx'\nmax_batch_size: 16\n")
POLICIES: Final = (
    """
header = "x-tenant"
[classes.interactive]
order = 1
share = 6
ttft_seconds = 1.0
[classes.batch]
order = 3
[tenants.acme]
keys = ["sha256:9e454ec450503ff91434ef39098bcadc858fb6894114f9ce31ece9c19063a92a", "a-key"]
header_values = ["acme"]
class = "interactive"
weight = 3
input_tokens_per_minute = 200_000
input_tokens_burst = 400_000
requests_per_minute = 600
bytes_per_minute = 100_000_000
concurrency = 64
retry_fraction = 0.1
[tenants.small]
header_values = ["small"]
requests_per_minute = 60
[default]
class = "batch"
""",
    """
[llms."*"]
max_sequences = 32
queue_length = 500
queue_tokens = 400_000
overcommit = 0.5
[llms.engine]
max_input_tokens = 6_000
context_window = 8_192
[models."*"]
max_bytes = 10_000_000
max_requests = 16
[models.worker]
queue_length = 3
queue_bytes = 200_000_000
[idempotency]
grace_seconds = 30
max_answers = 1000
max_bytes = 67_108_864
""",
)
_POLICY_WORDS: Final = (
    *sorted({word for policy in POLICIES for word in re.findall(r"[a-z_]+", policy)}),
    *("inf", "nan", "1979-05-27", "{}", "[[x]]", "0x1F", "'''", '"""'),
)


def _words_of_configurations() -> tuple[str, ...]:
    file = schema.pool().FindFileByName("nerite/wire/model_config.proto")
    found = set()
    todo = list(file.message_types_by_name.values())
    enums = list(file.enum_types_by_name.values())
    for message in todo:
        todo += message.nested_types
        enums += message.enum_types
        found.update(message.fields_by_name)
    return (
        *sorted(found),
        *sorted({name for enum in enums for name in enum.values_by_name}),
        "true",
        "false",
        "inf",
        "0x1F",
    )


_ROUTE: Final = """
sticky = ["header:x-user", "tenant"]
salt = "a"

[[arm]]
version = 1
weight = 90

[[arm]]
model = "other"
version = 2
weight = 10.5

[shadow]
version = 2
share = "10%"
tolerance = 0.001
timeout = 30
concurrency = 8
samples = "/tmp/m.jsonl"
contents = true
"""
_ROUTE_WORDS: Final = tuple(
    sorted({*re.findall(r"[a-z_]+|[\[\]=.]", _ROUTE), "prompt", "sequence", "inf", "nan", "1e400%"})
)
_ROLLOUT: Final = """
to = "2"
from = "1"
steps = [1, 5, 25.5, 50, 100]
hold = "5m"
gate = ["errors", "p99=+10%", "restarts<=0", "errors=+50%,5%"]
deadline = "2h"
requests = 20
shadow = "10%"
sticky = "tenant"
at-deadline = "stay"
webhook = "https://u:p@hooks.example:8443/rollouts?a=b#c"
record = true
force = false
"""
_ROLLOUT_WORDS: Final = tuple(
    sorted({*re.findall(r"[a-z0-9-]+|[\[\]=%+<,.:/@]", _ROLLOUT), "inf", "nan", "1979-05-27", '"http://a..b/x"'})
)
_CONFIG_WORDS: Final = _words_of_configurations()
_URLS: Final = ("/v1/completions", "/v1/chat/completions", "/v2/models/m/infer", "/v2/models/m/versions/1/infer")
_BATCH_WORDS: Final = (*_URLS, "custom_id", "method", "POST", "url", "body", "model", "stream", "true", "null", "1e999")


def config(rng: random.Random) -> bytes:
    """Return the text of a configuration, with mistakes."""
    text = _STEPS
    if rng.random() < 0.9:
        text = "\n".join((rng.choice(_HEADS), *rng.sample(_FIELDS, rng.randint(0, 4)), ""))
    return words.mutated(rng, text, _CONFIG_WORDS)


def policy(rng: random.Random) -> bytes:
    """Return the text of a policy, with mistakes."""
    return words.mutated(rng, rng.choice(POLICIES), _POLICY_WORDS)


def route(rng: random.Random) -> bytes:
    """Return the text of a route file, with mistakes."""
    return words.mutated(rng, _ROUTE, _ROUTE_WORDS)


def rollout(rng: random.Random) -> bytes:
    """Return the text of a rollout file, with mistakes."""
    return words.mutated(rng, _ROLLOUT, _ROLLOUT_WORDS)


def batch(rng: random.Random) -> bytes:
    """Return the text of the input of a batch, with mistakes."""
    url = rng.choice(_URLS)
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": {"model": "m"}})
        for number in range(rng.randint(0, 5))
    ]
    return words.mutated(rng, "\n".join((*lines, "")), _BATCH_WORDS)


def config_for_load(rng: random.Random) -> bytes:
    """Return a configuration with mistakes that may be loaded: nothing in it is large, and no backend takes seconds."""
    text = config(rng).decode("latin-1").replace("onnxruntime_onnx", "python")
    text = re.sub(r"[0-9]{3,}", lambda digits: digits[0][:2], text)
    for framework in ("tensorrt", "tensorflow", "pytorch", "openvino", "vllm", "litert"):
        text = re.sub(framework, "python", text, flags=re.IGNORECASE)
    return text.encode("latin-1")


def config_document(rng: random.Random) -> bytes:
    """Return a configuration in JSON, with mistakes."""
    return documents.mutated(rng, _DOCUMENT)


_DOCUMENT: Final = {
    "name": "foreign_segment", "backend": "python", "max_batch_size": 4,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1, "4"], "format": "FORMAT_NONE"}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": ["1"], "reshape": {"shape": []}}],
    "dynamic_batching": {"preferred_batch_size": [4], "max_queue_delay_microseconds": "100"},
    "instance_group": [{"kind": "KIND_CPU", "count": 1}], "version_policy": {"latest": {"num_versions": 1}},
    "parameters": {"a": {"string_value": "b"}},
    "model_warmup": [{"inputs": {"INPUT0": {"dims": [1], "zero_data": True}}}],
    "optimization": {"priority": "PRIORITY_MAX", "graph": {"level": -1}}, "metric_tags": {"a": "b"},
}  # fmt: skip


def load_with_changed_config(rng: random.Random) -> administration.Request:
    """Return a load that brings a configuration with mistakes."""
    request = administration.load(rng)
    if isinstance(request.body, dict) and "config" in request.body.get("parameters", {}):
        text = documents.mutated(rng, json.loads(request.body["parameters"]["config"]), 2)
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(administration.tamed(json.loads(text))).encode()
        request.body["parameters"]["config"] = text.decode(errors="surrogateescape")
    return request
