"""Valid requests that are no inference: loads, shared memory, settings, and what is asked under ``/v1``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fuzz import models
from fuzz.inference import PROMPTS, REGION_SIZE
from nerite.wire import grpc_service as wire
from nerite.wire.health import HealthCheckRequest
from serving import IDENTITY, adds


class Request(NamedTuple):
    """A request over HTTP, with its body as a document."""

    method: str
    path: str
    body: Any = None


KEY: Final = "nerite_fuzz_0000000"
"""Stands for the name of a shared memory file of this run, which is as long."""
SOURCES: Final = (
    IDENTITY,
    adds(1),
    "x = 1",
    "def execute(self, requests):\n    return None",
    "def initialize(self, args):\n    raise ValueError('a guest does not begin')",
    "def initialize(self, args):\n    raise SystemExit(3)",
    "def execute(self, requests) return",
    "\udcff",
    "def initialize(self, args):\n    self.a = args['nothing']\n",
    "def finalize(self):\n    raise ValueError('a guest does not end')\n" + IDENTITY,
    "@staticmethod\ndef auto_complete_config(config):\n    config.set_max_batch_size(-3)\n    return config\n"
    + IDENTITY,
    "@staticmethod\ndef auto_complete_config(config):\n    return 5\n" + IDENTITY,
)
"""Models that a load brings: whole programs, never changed by chance, as they run."""
_FILES: Final = (
    "1/model.py", "1/model.py", "1/model.py", "2/model.py", "1/other.py", "config.pbtxt", "1/labels.txt", "../x",
    "/x", "1", "", "1/a/b/c", "1/" + "n" * 300, "\udcff", "1/\0", "1//model.py", "./1/model.py", "é/é",
    "99999999999999999999/model.py", "01/model.py", "-1/model.py", "1/model.onnx",
)  # fmt: skip


def load(rng: random.Random) -> Request:
    """Return a load of a guest, with a configuration and files or without, an unload, or a look at the index."""
    kind = rng.randrange(10)
    model = rng.choice(models.GUESTS) if rng.random() < 0.8 else models.ON_DISK
    place = "/v2/repository" if rng.random() < 0.95 else "/v2/repository/some"
    if kind == 0:
        return Request("POST", f"{place}/index", rng.choice(({}, {"ready": True}, {"ready": False})))
    if kind <= 2:
        body = {"parameters": {"unload_dependents": rng.random() < 0.5}} if rng.random() < 0.5 else {}
        return Request("POST", f"{place}/models/{model}/unload", body)
    if kind == 3:
        return Request("POST", f"/v1/models/{model}/{rng.choice(('load', 'unload'))}", {})
    config = json.loads(models.BROUGHT_CONFIG)
    if rng.random() < 0.5:
        config |= rng.choice(_MORE)
    parameters = {"config": json.dumps(config)}
    for _ in range(rng.randint(0, 2)):
        parameters[f"file:{rng.choice(_FILES)}"] = models.brought(rng.choice(SOURCES))
    return Request("POST", f"{place}/models/{model}/load", {"parameters": parameters})


_MORE: Final[tuple[dict[str, Any], ...]] = (
    {"dynamic_batching": {"preferred_batch_size": [2, 4], "max_queue_delay_microseconds": 100}},
    {"sequence_batching": {"max_sequence_idle_microseconds": 100_000, "oldest": {"max_candidate_sequences": 4}}},
    {"instance_group": [{"kind": "KIND_CPU", "count": 2}]},
    {"instance_group": [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}]},
    {"version_policy": {"specific": {"versions": [1, 2]}}},
    {"version_policy": {"latest": {"num_versions": 2}}},
    {"model_transaction_policy": {"decoupled": True}},
    {"response_cache": {"enable": True}},
    {"parameters": {}},
    {"parameters": {"EXECUTION_MODE": {"string_value": "sideways"}}},
    {"model_warmup": [{"name": "w", "batch_size": 1, "inputs": {"INPUT0": {"data_type": "TYPE_FP32", "dims": [2]}}}]},
    {
        "platform": "ensemble",
        "backend": "",
        "ensemble_scheduling": {"step": [{"model_name": "foreign_segment", "model_version": -1}]},
    },
    {"optimization": {"priority": "PRIORITY_MAX"}},
    {"name": "foreign_segment"},
    {"backend": "onnxruntime"},
    {"default_model_filename": "other.py"},
)


def tamed(config: Any) -> Any:
    """Return a configuration in which no number of instances or turns is large, and no backend takes seconds.

    Who may load may have a thousand processes started, or have a large framework imported: that is no mistake.
    """
    if isinstance(config, dict):
        few = ("count", "max_batch_size", "batch_size", "dims", "num_versions")
        return {
            name: _few(each)
            if name in few
            else "python"
            if name in ("backend", "platform") and _heavy(each)
            else tamed(each)
            for name, each in config.items()
        }
    return [tamed(each) for each in config] if isinstance(config, list) else config


def _few(value: Any) -> Any:
    if isinstance(value, list):
        return [_few(each) for each in value]
    return value % 4 if isinstance(value, int) and value > 16 else value


def _heavy(name: Any) -> bool:
    return not isinstance(name, str) or any(
        word in name.lower() for word in ("torch", "tensor", "vino", "llm", "fil", "lite")
    )


def region(rng: random.Random) -> Request:
    """Return a registration of shared memory, a look at it, or its end."""
    kind = rng.randrange(8)
    name = rng.choice(("region_0", "region_1", "mine", "other", "é"))
    memory = "systemsharedmemory" if rng.random() < 0.85 else "cudasharedmemory"
    path = f"/v2/{memory}/region/{name}"
    if kind == 0:
        return Request("GET", f"/v2/{memory}/status")
    if kind == 1:
        return Request("GET", f"{path}/status")
    if kind == 2:
        return Request("POST", f"{path}/unregister")
    if memory.startswith("cuda"):
        return Request("POST", f"{path}/register", {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64})
    file = rng.choice((f"/{KEY}_a", f"/{KEY}_b", f"{KEY}_a", f"/{KEY}_none"))
    body = {"key": file, "offset": rng.choice((0, 64)), "byte_size": rng.choice((64, REGION_SIZE - 64, REGION_SIZE))}
    return Request("POST", f"{path}/register", body)


def setting(rng: random.Random) -> Request:
    """Return a change of what is logged or traced, or a look at it."""
    path = rng.choice(("/v2/logging", "/v2/trace/setting", "/v2/models/worker/trace/setting", "/v2/trace/setting"))
    if rng.random() < 0.1:
        return Request("GET", path)
    if path == "/v2/logging":
        values: dict[str, Any] = {
            "log_info": rng.random() < 0.5, "log_warning": rng.random() < 0.5, "log_error": rng.random() < 0.5,
            "log_verbose_level": rng.choice((0, 1, 2)), "log_format": rng.choice(("default", "ISO8601", "json")),
            "log_file": "x",
        }  # fmt: skip
    else:
        values = {
            "trace_level": rng.choice((["OFF"], ["TIMESTAMPS"], ["TENSORS"], ["TIMESTAMPS", "TENSORS"], None)),
            "trace_rate": rng.choice(("1", "7", "1000", None)), "trace_count": rng.choice(("-1", "0", "5", None)),
            "log_frequency": rng.choice(("0", "3", None)), "trace_file": "x", "trace_mode": "triton",
        }  # fmt: skip
    names = rng.sample(list(values), rng.randint(1, 3))
    return Request("POST", path, {name: values[name] for name in names})


SETTLED: Final = (
    Request(
        "POST",
        "/v2/logging",
        {"log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0, "log_format": "default"},
    ),
    Request(
        "POST",
        "/v2/trace/setting",
        {"trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0"},
    ),
    Request(
        "POST",
        "/v2/models/worker/trace/setting",
        {"trace_level": None, "trace_rate": None, "trace_count": None, "log_frequency": None},
    ),
)
"""What sets settings to what they were."""
_TOOL: Final = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


def openai(rng: random.Random) -> Request:
    """Return a request of OpenAI's kinds."""
    kind = rng.randrange(16)
    model = rng.choice(("words", "engine")) if rng.random() < 0.9 else rng.choice(("vectors", "nowhere", "worker"))
    if kind == 0:
        return Request("GET", rng.choice(("/v1/models", "/v1/models/words", "/v1/models/worker")))
    if kind == 1:
        texts = rng.choice(("a text", ["a", "b"], ["é"] * 20))
        made = {"model": "vectors", "input": texts, "encoding_format": rng.choice(("float", "base64"))}
        return Request("POST", "/v1/embeddings", made)
    if kind == 2:
        documents = rng.choice((["a", "bb"], [{"text": "a"}, "b"]))
        return Request("POST", "/v1/rerank", {"model": "ratings", "query": "q", "documents": documents, "top_n": 1})
    if kind >= 13:
        return _of_media(rng)
    if kind >= 10:
        return _of_agents(rng, model)
    made = {"model": model, "max_tokens": rng.choice((1, 3, 8)), "stream": rng.random() < 0.4}
    for name, value in rng.sample(_SAMPLING, rng.randint(0, 4)):
        made[name] = value
    if kind <= 5:
        made["prompt"] = rng.choice((*PROMPTS, ["a", "b"]))
        return Request(
            "POST", "/v1/completions", made | rng.choice(({}, {"echo": True}, {"logprobs": 2}, {"suffix": ""}))
        )
    said = [{"role": "user", "content": rng.choice(PROMPTS)}]
    if rng.random() < 0.4:
        said = [{"role": "system", "content": [{"type": "text", "text": "be brief"}]}, *said]
    if rng.random() < 0.1:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        said.append({"role": "user", "content": [image]})
    made["messages"] = said
    chats: tuple[dict[str, Any], ...] = (
        {}, {"tools": [_TOOL]}, {"tools": [_TOOL], "tool_choice": "auto"}, {"logprobs": True, "top_logprobs": 2},
        {"response_format": _SCHEMA}, {"response_format": {"type": "json_object"}}, {"chat_template_kwargs": {"a": 1}},
    )  # fmt: skip
    return Request("POST", "/v1/chat/completions", made | rng.choice(chats))


_SCHEMA_OF_TOOL: Final = {"type": "object", "properties": {"at": {"type": "string"}}}
_BLOCKS: Final[list[dict[str, Any]]] = [
    {"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "t", "content": "blue"},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "b"}]},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
]  # fmt: skip
_ITEMS: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "a"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}]},
    {"type": "function_call", "call_id": "t", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "t", "output": "blue"},
]  # fmt: skip


def _of_agents(rng: random.Random, model: str) -> Request:
    """Return a request to an API that agents speak."""
    stream = rng.random() < 0.4
    path = rng.choice(("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/tokenize", "/detokenize"))
    if path == "/tokenize":
        return Request("POST", path, {"model": model, "prompt": rng.choice(PROMPTS)})
    if path == "/detokenize":
        return Request("POST", path, {"model": model, "tokens": [5, 6, 7]})
    if path == "/v1/responses":
        made = {"model": model, "input": rng.sample(_ITEMS, 3), "stream": stream, "max_output_tokens": 3}
        tool = {"type": "function", "name": "look", "parameters": _SCHEMA_OF_TOOL}
        kept = {"store": True, "previous_response_id": rng.choice(("resp_0", "resp_x"))}
        if rng.random() < 0.1:
            return Request(rng.choice(("GET", "DELETE")), rng.choice((f"{path}/resp_0", f"{path}/resp_0/input_items")))
        more = rng.choice(({}, {"tools": [tool]}, {"instructions": "be brief"}, {"store": False}, kept))
        return Request("POST", path, made | more)
    calls = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    messages = [{"role": "user", "content": rng.sample(_BLOCKS, 2)}, {"role": "assistant", "content": [calls]}]
    made = {"model": model, "messages": messages, "max_tokens": 3, "stream": stream}
    tool = {"name": "look", "input_schema": _SCHEMA_OF_TOOL}
    more = rng.choice(
        ({}, {"tools": [tool]}, {"system": [{"type": "text", "text": "be brief"}]}, {"stop_sequences": ["a"]})
    )
    return Request("POST", path, made | more)


def _of_media(rng: random.Random) -> Request:
    """Return a request for speech, images or classes, or for the score of a text."""
    kind = rng.randrange(5)
    if kind == 0:
        made = {"model": "speaks", "input": rng.choice(PROMPTS), "voice": "alice"}
        more = ({}, {"response_format": "pcm"}, {"speed": 1.5}, {"stream_format": "audio"}, {"voice": ""})
        return Request("POST", "/v1/audio/speech", made | rng.choice(more))
    if kind == 1:
        made = {"model": "paints", "prompt": rng.choice(PROMPTS), "n": rng.choice((1, 2))}
        images: tuple[dict[str, Any], ...] = (
            {}, {"size": "64x48"}, {"size": "auto"}, {"seed": 7}, {"num_inference_steps": 2}, {"guidance_scale": 2.5},
            {"negative_prompt": "tea"}, {"response_format": "b64_json"},
        )  # fmt: skip
        return Request("POST", "/v1/images/generations", made | rng.choice(images))
    texts = rng.choice(("a text", ["a", "b"], ["é"] * 20))
    if kind == 2:
        return Request("POST", "/v1/score", {"model": "ratings", "text_1": "q", "text_2": texts})
    path = rng.choice(("/v1/classify", "/classify"))
    return Request("POST", path, {"model": "classes", "input": texts} | rng.choice(({}, {"use_activation": False})))


_SAMPLING: Final[list[tuple[str, Any]]] = [
    ("n", 2), ("temperature", 0.5), ("top_p", 0.9), ("top_k", 3), ("min_p", 0.1), ("seed", 7), ("stop", ["c", "d"]),
    ("stop", "x"), ("presence_penalty", 0.5), ("frequency_penalty", -0.5), ("logit_bias", {"5": 1.5}), ("user", "me"),
    ("priority", 1), ("stream_options", {"include_usage": True}), ("ignore_eos", True), ("min_tokens", 1),
    ("bad_words", ["a"]), ("stop_token_ids", [3]), ("allowed_token_ids", [1, 2]), ("repetition_penalty", 1.1),
    ("add_special_tokens", True), ("structured_outputs", {"regex": "a+"}), ("structured_outputs", {"choice": ["a"]}),
    ("metadata", {}),
    ("skip_special_tokens", False),
]  # fmt: skip

_SERVICE: Final = "/inference.GRPCInferenceService/"


def _loaded(rng: random.Random) -> Any:
    request = wire.RepositoryModelLoadRequest(model_name=rng.choice(models.GUESTS))
    request.parameters["config"].string_param = models.BROUGHT_CONFIG
    if rng.random() < 0.5:
        request.parameters["file:1/model.py"].bytes_param = b"x = 1"
    return request


def _registered(rng: random.Random) -> Any:
    key = f"/{KEY}_{rng.choice('ab')}"
    return wire.SystemSharedMemoryRegisterRequest(name="mine", key=key, offset=0, byte_size=REGION_SIZE)


def _traced(rng: random.Random) -> Any:
    request = wire.TraceSettingRequest(model_name=rng.choice(("", "worker")))
    request.settings["trace_rate"].value.append("1000")
    if rng.random() < 0.5:
        request.settings["trace_level"].value.extend(["OFF"])
    return request


def _logged(rng: random.Random) -> Any:
    request = wire.LogSettingsRequest()
    request.settings["log_verbose_level"].uint32_param = 0
    request.settings["log_info"].bool_param = True
    request.settings["log_format"].string_param = "default"
    return request


def _about(kind: Any) -> Callable[[random.Random], Any]:
    """Return what makes a request for messages of a kind that name a model."""
    return lambda rng: kind(name=rng.choice(("worker", "text", "nowhere", "")), version=rng.choice(("", "1", "2")))


METHODS: Final[dict[str, Callable[[random.Random], Any]]] = {
    f"{_SERVICE}ServerLive": lambda rng: wire.ServerLiveRequest(),
    f"{_SERVICE}ServerReady": lambda rng: wire.ServerReadyRequest(),
    f"{_SERVICE}ServerMetadata": lambda rng: wire.ServerMetadataRequest(),
    f"{_SERVICE}ModelReady": _about(wire.ModelReadyRequest),
    f"{_SERVICE}ModelMetadata": _about(wire.ModelMetadataRequest),
    f"{_SERVICE}ModelConfig": _about(wire.ModelConfigRequest),
    f"{_SERVICE}ModelStatistics": _about(wire.ModelStatisticsRequest),
    f"{_SERVICE}RepositoryIndex": lambda rng: wire.RepositoryIndexRequest(ready=rng.random() < 0.5),
    f"{_SERVICE}RepositoryModelLoad": _loaded,
    f"{_SERVICE}RepositoryModelUnload": lambda rng: wire.RepositoryModelUnloadRequest(model_name="foreign_segment"),
    f"{_SERVICE}SystemSharedMemoryStatus": lambda rng: wire.SystemSharedMemoryStatusRequest(),
    f"{_SERVICE}SystemSharedMemoryRegister": _registered,
    f"{_SERVICE}SystemSharedMemoryUnregister": lambda rng: wire.SystemSharedMemoryUnregisterRequest(name="mine"),
    f"{_SERVICE}CudaSharedMemoryStatus": lambda rng: wire.CudaSharedMemoryStatusRequest(name="mine"),
    f"{_SERVICE}CudaSharedMemoryRegister": lambda rng: wire.CudaSharedMemoryRegisterRequest(
        name="mine", raw_handle=b"x"
    ),
    f"{_SERVICE}CudaSharedMemoryUnregister": lambda rng: wire.CudaSharedMemoryUnregisterRequest(name="mine"),
    f"{_SERVICE}TraceSetting": _traced,
    f"{_SERVICE}LogSettings": _logged,
    "/grpc.health.v1.Health/Check": lambda rng: HealthCheckRequest(service="worker"),
}
"""The methods that carry one message and are no inference, and what makes a valid message of each."""
