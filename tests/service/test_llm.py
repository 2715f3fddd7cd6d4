"""A language model behind a server: all APIs, many at once, cut connections, refusals."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tritonclient.grpc as grpc_client
from prometheus_client.parser import text_string_to_metric_families

from faults import FRONTS
from llm_models import CONTEXT, language_model
from nerite.llm.demand import IMAGE_TOKENS
from nerite.router.load_reports import load_report_in
from nerite.wire import grpc_service as wire
from raw_grpc import INFER, STREAM, RawGrpc, framed
from seeing_models import MARK, TOKENS, seeing_model
from serving import Serving, eventually, serving

CHAT = 'parameters { key: "MAX_NUM_SEQS" value { string_value: "16" } }\n'
NARROW = 'backend: "llm"\nparameters { key: "MAX_NUM_SEQS" value { string_value: "1" } }\n'
SINGLE = 'backend: "openvino_genai"\nmodel_transaction_policy { decoupled: false }\n'
FEW = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}"
)
PICTURE = "data:image/png;base64,aGk="
ENDLESS = {**FEW, "max_tokens": CONTEXT}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("llm")
    models = folder / "models"
    for name, config in (("chat", CHAT), ("narrow", NARROW), ("single", SINGLE), ("unknown", SINGLE)):
        (models / name).mkdir(parents=True)
        language_model(models / name / "1")
        (models / name / "config.pbtxt").write_text(config)
    with serving(models, folder / "log") as running:
        yield running


def generate(server: Serving, model: str = "chat", **said: Any) -> tuple[int, Any]:
    status, _, body = server.ask("POST", f"/v2/models/{model}/generate", {"text_input": "once", **said})
    return status, json.loads(body)


class Stream:
    """A request to generate_stream, read event by event."""

    def __init__(self, server: Serving, model: str = "chat", **said: Any) -> None:
        self._connection = http.client.HTTPConnection(server.http, timeout=30)
        body = json.dumps({"text_input": "once", "stream": True, **said})
        self._connection.request("POST", f"/v2/models/{model}/generate_stream", body)
        self._answer = self._connection.getresponse()

    def event(self) -> Any:
        """Return the next event; None after the last."""
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                return json.loads(line.removeprefix(b"data: "))
        return None

    def rest(self) -> list[Any]:
        events = list(iter(self.event, None))
        self.cut()
        return events

    def cut(self) -> None:
        # The answer holds the socket, too.
        self._answer.close()
        self._connection.close()


def test_what_it_takes_and_gives(server: Serving) -> None:
    config = server.json("GET", "/v2/models/chat/config")
    assert (config["backend"], config["platform"], config["max_batch_size"]) == ("llm", "openvino_genai", 0)
    assert config["model_transaction_policy"]["decoupled"]
    assert [tensor["name"] for tensor in config["output"]] == [
        "text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens",
        "num_cached_tokens", "token_ids", "prompt_token_ids", "prompt_logprobs", "cum_log_probs", "output_log_probs",
    ]  # fmt: skip


def test_generate_gives_the_prompt_and_the_answer(server: Serving) -> None:
    status, whole = generate(server, parameters=FEW)
    assert status == 200
    assert whole["text_output"].startswith("once")
    _, bare = generate(server, sampling_parameters=json.dumps(FEW), exclude_input_in_output=True)
    assert whole["text_output"] == "once" + bare["text_output"]


TENSORRT_LLM = {"max_tokens": 8, "bad_words": "", "stop_words": "", "end_id": 2, "pad_id": 2, "random_seed": 1}
"""What the clients of TensorRT-LLM's backend send."""


def test_requests_as_tensorrt_llms_clients_send_them(server: Serving) -> None:
    greedy = {**TENSORRT_LLM, "temperature": 0, "exclude_input_in_output": True}
    _, whole = generate(server, parameters=FEW, exclude_input_in_output=True)
    status, answer = generate(server, **greedy, ignore_eos=True, beam_width=1, return_log_probs=True)
    assert (status, answer["text_output"]) == (200, whole["text_output"])
    assert sum(answer["output_log_probs"]) == pytest.approx(answer["cum_log_probs"], abs=1e-3)
    assert len(answer["output_log_probs"]) == FEW["max_tokens"]
    events = Stream(server, **greedy, ignore_eos=True, return_log_probs=True).rest()
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    word = whole["text_output"].split()[1]
    for stop in (word, [word], ["", word]):
        _, answer = generate(server, **{**greedy, "stop_words": stop}, ignore_eos=True)
        assert answer["text_output"] == whole["text_output"].partition(word)[0], stop
    for wrong in ({"beam_width": 2}, {"language": "en"}, {"return_context_logits": True}):
        status, refused = generate(server, **greedy, **wrong)
        assert status >= 400 and next(iter(wrong)) in refused["error"], refused


def test_one_answer_to_infer(server: Serving) -> None:
    """A model that may stream sends one answer to a request that does not ask for a stream."""
    _, whole = generate(server, parameters=FEW)
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["once"]}
    flag = {"name": "stream", "datatype": "BOOL", "shape": [1]}
    for more in ([], [{**flag, "data": [False]}]):
        status, _, body = server.ask("POST", "/v2/models/chat/infer", {"inputs": [text, *more], "parameters": FEW})
        assert status == 200, body
        found = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
        assert found["text_output"] == [whole["text_output"]]
    streamed = {"inputs": [text, {**flag, "data": [True]}], "parameters": FEW}
    for _ in range(2):
        status, _, body = server.ask("POST", "/v2/models/chat/infer", streamed)
        assert (status, "decoupled transaction policy" in body.decode()) == (501, True)
    with grpc_client.InferenceServerClient(server.grpc) as client:
        said = grpc_client.InferInput("text_input", [1], "BYTES")
        said.set_data_from_numpy(np.array([b"once"], object))
        answer = client.infer("chat", [said], parameters=dict(FEW))
        assert answer.as_numpy("text_output").tolist() == [whole["text_output"].encode()]


def test_a_stream_has_an_event_for_each_step(server: Serving) -> None:
    _, whole = generate(server, parameters=FEW, exclude_input_in_output=True)
    flags = {f"return_{what}": True for what in ("finish_reason", "num_input_tokens", "num_output_tokens")}
    events = Stream(server, parameters=FEW, **flags).rest()
    assert len(events) > 3
    assert "".join(event["text_output"] for event in events) == whole["text_output"]
    assert sum(event["num_output_tokens"] for event in events) == FEW["max_tokens"]
    assert {event["num_input_tokens"] for event in events} == {4}
    assert [event["finish_reason"] for event in events][-2:] == ["None", "length"]


def test_log_probabilities(server: Serving) -> None:
    said = {**FEW, "logprobs": 0, "n": 2, "temperature": 1, "seed": 5}
    _, answer = generate(
        server, sampling_parameters=json.dumps(said), return_logprobs=True, return_cumulative_logprob=True
    )
    assert len(answer["text_output"]) == 2
    for told, total in zip(answer["logprobs"], answer["cumulative_logprob"], strict=True):
        tokens = [each for token in json.loads(told) for each in token.values()]
        assert len(tokens) == FEW["max_tokens"]
        assert sum(token["logprob"] for token in tokens) == pytest.approx(total, rel=1e-4)


def test_infer_of_a_model_with_one_response(server: Serving) -> None:
    inputs = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["once"]}]
    answer = server.json("POST", "/v2/models/single/infer", {"inputs": inputs, "parameters": FEW})
    _, same = generate(server, parameters=FEW)
    assert answer["outputs"][0]["data"] == [same["text_output"]]
    status, refused = generate(server, "single", stream=True)
    assert (status, "omit 'stream'" in refused["error"]) == (400, True)


def test_a_grpc_stream_ends_with_the_final_flag(server: Serving) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    text, stream, said = (
        grpc_client.InferInput(name, [1], kind)
        for name, kind in (("text_input", "BYTES"), ("stream", "BOOL"), ("sampling_parameters", "BYTES"))
    )
    text.set_data_from_numpy(np.array([b"once"], object))
    stream.set_data_from_numpy(np.array([True]))
    said.set_data_from_numpy(np.array([json.dumps(FEW).encode()], object))
    with grpc_client.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("chat", [text, stream, said], request_id="a")
        texts, final = [], False
        while not final:
            result, error = answers.get(timeout=20)
            assert error is None
            texts.append(result.as_numpy("text_output")[0].decode())
            final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    _, whole = generate(server, parameters=FEW, exclude_input_in_output=True)
    assert len(texts) > 3
    assert "".join(texts) == whole["text_output"]


def test_eight_run_at_once(server: Serving) -> None:
    streams = [Stream(server, parameters={**ENDLESS, "temperature": 1, "seed": seed}) for seed in range(8)]
    # None of them would end: that each answers says that all of them run.
    for _ in range(5):
        for stream in streams:
            assert "text_output" in stream.event()
    for stream in streams:
        stream.cut()
    assert generate(server, parameters=FEW)[0] == 200


def test_a_connection_that_is_cut_makes_room(server: Serving) -> None:
    for _ in range(3):
        stream = Stream(server, "narrow", parameters=ENDLESS)
        assert "text_output" in stream.event()
        stream.cut()
    # One sequence has room in the batch.
    assert generate(server, "narrow", parameters=FEW)[0] == 200
    eventually(lambda: server.metrics().get('nv_inference_pending_request_count{model="narrow",version="1"}', 0) == 0)


def test_an_engine_that_dies_fails_what_runs_and_comes_back(server: Serving) -> None:
    stream = Stream(server, "narrow", parameters=ENDLESS)
    assert "text_output" in stream.event()
    os.kill(server.workers()["narrow_0"], signal.SIGKILL)
    failed = [event["error"] for event in stream.rest() if "error" in event]
    assert len(failed) == 1
    assert "The worker died while it ran this request" in failed[0]
    eventually(lambda: server.ready("narrow"))
    assert generate(server, "narrow", parameters=FEW)[0] == 200


def test_the_metrics_of_a_language_model(server: Serving) -> None:
    def told(name: str) -> float:
        return server.metrics().get(f'{name}{{model="single",version="1"}}', 0)

    before = {name: told(name) for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")}
    assert generate(server, "single", parameters={**FEW, "n": 2, "temperature": 1})[0] == 200
    assert told("vllm:prompt_tokens_total") - before["vllm:prompt_tokens_total"] == 4
    assert told("vllm:generation_tokens_total") - before["vllm:generation_tokens_total"] == 2 * FEW["max_tokens"]
    assert told("vllm:time_to_first_token_seconds_count") == told("vllm:e2e_request_latency_seconds_count") > 0
    assert told("vllm:time_per_output_token_seconds_count") > told("vllm:time_to_first_token_seconds_count")
    assert 0 < told("vllm:time_to_first_token_seconds_sum") < told("vllm:e2e_request_latency_seconds_sum")
    page = server.ask("GET", "/metrics", service="Metrics")[2].decode()
    families = {family.name: family.type for family in text_string_to_metric_families(page)}
    assert families["vllm:request_params_n"] == "histogram"
    assert families["vllm:prompt_tokens"] == "counter"
    # What the engine does not tell is not there: a 0 would be taken for a number.
    unknown = ("vllm:prefix_cache_", "vllm:num_preemptions", "vllm:spec_decode_")
    assert not [name for name in server.metrics() if name.startswith(unknown)]


def test_a_deadline_cuts_an_answer(server: Serving) -> None:
    """That of a model whose speed nobody knows: else a request that will be too late is refused."""
    inputs = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["once"]}]
    body = {"inputs": inputs, "parameters": {**ENDLESS, "timeout": 1_000_000}}
    status, _, answer = server.ask("POST", "/v2/models/unknown/infer", body)
    assert (status, "would miss its deadline" in answer.decode()) == (503, True)
    eventually(
        lambda: server.metrics()['nerite_llm_wasted_tokens_total{model="unknown",reason="timeout",version="1"}'] > 0
    )
    assert server.metrics()['vllm:request_success_total{finished_reason="timeout",model="unknown",version="1"}'] == 1


@pytest.mark.parametrize("path", ["/v2/models/single/generate", "/v1/completions"])
def test_the_load_is_told_to_those_who_ask(server: Serving, path: str) -> None:
    asked = {"text_input": "once", "model": "single", "prompt": "once", "max_tokens": 4}
    body = {name: value for name, value in asked.items() if (name in ("model", "prompt")) == path.startswith("/v1")}
    assert "endpoint-load-metrics" not in server.ask("POST", path, body)[1]
    status, headers, _ = server.ask("POST", path, body, endpoint_load_metrics_format="json")
    kind, _, told = headers["endpoint-load-metrics"].partition(" ")
    figures = json.loads(told)["named_metrics"]
    names = {"kv_cache_utilization", "max_token_capacity", "num_requests_running", "num_requests_waiting"}
    assert (status, kind, figures.keys()) == (200, "JSON", names)
    assert 0 <= figures["kv_cache_utilization"] < 1 < figures["max_token_capacity"]
    _, headers, _ = server.ask("POST", path, body, endpoint_load_metrics_format="text")
    assert headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_utilization=0.")
    assert "endpoint-load-metrics" not in server.ask("POST", path, body, endpoint_load_metrics_format="xml")[1]


@pytest.mark.skipif(FRONTS > 1, reason="front processes do not have the reports of engines, as docs/llm.md says")
@pytest.mark.parametrize("path", [INFER, STREAM])
def test_the_load_is_told_over_grpc_too(server: Serving, path: str) -> None:
    request = wire.ModelInferRequest(model_name="single")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\4\0\0\0once")
    raw = RawGrpc(server)
    for form in ("", "bin", "xml"):
        stream = raw.begin(path, **({"endpoint_load_metrics_format": form} if form else {}))
        raw.send(stream, framed(request.SerializeToString()), end=True)
        assert raw.status(stream)[0] == 0
        trailer = raw.headers[stream].get(b"endpoint-load-metrics-bin")
        assert (trailer is not None) is (form == "bin")
        if trailer is not None:
            told = load_report_in(trailer)
            assert told is not None
            assert told.waiting == 0 <= told.running <= 1
            assert 0 <= told.kv_used < 1
    raw.close()


def test_those_that_wait_for_room_are_served_in_turn(server: Serving) -> None:
    with ThreadPoolExecutor(4) as callers:
        answers = list(callers.map(lambda _: generate(server, "narrow", parameters=FEW), range(4)))
    assert {status for status, _ in answers} == {200}
    assert len({answer["text_output"] for _, answer in answers}) == 1


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"sampling_parameters": "{"}, "'sampling_parameters' is not valid JSON"),
        ({"sampling_parameters": "[" * 100_000}, "'sampling_parameters' is not valid JSON"),
        ({"sampling_parameters": '{"max_token": 3}'}, "Did you mean max_tokens?"),
        ({"sampling_parameters": '{"top_p": 3}'}, "'top_p' must be above 0"),
        ({"sampling_parameters": '{"logit_bias": {"1": 2}}'}, "'logit_bias' is not supported"),
        ({"sampling_parameters": '{"structured_outputs": {"json": {"type": "a"}}}'}, "structured output (json_schema)"),
        ({"sampling_parameters": '{"structured_outputs": {"json": {"type": "null", "enum": []}}}'}, "has no instances"),
        ({"sampling_parameters": '{"structured_outputs": {"grammar": "root ::= root"}}'}, "whose text never ends"),
        ({"sampling_parameters": '{"guided_decoding": "{\\"regex\\": \\"[\\"}"}'}, "structured output (regex)"),
        ({"sampling_parameters": '{"lora_name": "a"}'}, "LoRA feature is not enabled."),
        ({"sampling_parameters": '{"logprobs": 5}'}, "reports the probability of the chosen token only"),
        ({"stream": True, "exclude_input_in_output": False}, "When streaming, `exclude_input_in_output` = False"),
        ({"text_input": "x" * CONTEXT}, f"the prompt has {CONTEXT} tokens, but the model's context is {CONTEXT}"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"image": ["aGk="]}, "takes no images"),
    ],
)
def test_what_is_refused(server: Serving, said: dict[str, Any], text: str) -> None:
    status, answer = generate(server, **said)
    assert (status, answer["error"].startswith("Error generating stream: ")) == (400, True)
    assert text in answer["error"]


@pytest.mark.parametrize(
    ("said", "message", "param"),
    [
        ({"logit_bias": {"1": 2}}, "'logit_bias' is not supported", "logit_bias"),
        ({"logprobs": True, "top_logprobs": 5}, "'top_logprobs' is 5", "top_logprobs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "'response_format.json_schema.schema.not' cannot be enforced",
            "response_format",
        ),
        ({"lora_name": "a"}, "LoRA feature is not enabled.", "lora_name"),
        ({"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "the prompt has", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]},
            "the model takes no",
            "messages",
        ),
    ],
)
def test_what_is_refused_under_v1(server: Serving, said: dict[str, Any], message: str, param: str) -> None:
    asked = {"model": "chat", "messages": [{"role": "user", "content": "a"}], **said}
    status, _, body = server.ask("POST", "/v1/chat/completions", asked)
    error = json.loads(body)["error"]
    assert (status, error["param"].partition("[")[0], error["type"]) == (400, param, "invalid_request_error")
    assert message in error["message"]
    assert "Error generating stream" not in error["message"]


def test_images_by_each_way(server: Serving, tmp_path: Path) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (10, 20, 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    encoded = base64.b64encode(file.getvalue()).decode()
    models = tmp_path / "models"
    seeing_model(models / "sees" / "1")
    (models / "sees" / "1" / "chat_template.jinja").write_text(TEMPLATE)
    with serving(models, tmp_path / "log") as other:
        said = {"text_input": f"{MARK}what is it", "exclude_input_in_output": True, "parameters": FEW}
        status, told = generate(other, "sees", **said, image=[encoded], return_num_input_tokens=True)
        assert (status, told["num_input_tokens"]) == (200, len("?what is it") + IMAGE_TOKENS), "it is the first image"
        told = generate(other, "sees", **said, image=[encoded], return_num_input_tokens=True)[1]
        # The mark gives way to the tokens of the image and an end of line.
        assert told["num_input_tokens"] == len("what is it\n") + TOKENS
        (use,) = other.json("GET", "/v2/quota")["use"]
        assert use["input_tokens"] == 2 * told["num_input_tokens"] + IMAGE_TOKENS - TOKENS
        assert generate(other, "sees", **{**said, "text_input": "what is it"})[1]["text_output"] != told["text_output"]
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
            {"type": "text", "text": "what is it"},
        ]
        asked = {"model": "sees", "messages": [{"role": "user", "content": parts}], **FEW}
        chosen = other.json("POST", "/v1/chat/completions", asked)
        assert chosen["choices"][0]["message"]["content"] == told["text_output"]
        assert chosen["usage"]["prompt_tokens"] == told["num_input_tokens"]
        for image, text in (
            ("?", "'image' 0 is not valid base64"),
            ("aGk=", "'image' 0 is not in one of the formats JPEG"),
        ):
            status, refused = generate(other, "sees", **said, image=[image])
            assert (status, text in refused["error"]) == (400, True)


def test_tools_and_json_under_v1(server: Serving) -> None:
    colour = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    tools = [{"type": "function", "function": {"name": name, "parameters": colour}} for name in ("paint", "wash")]
    asked = {"model": "chat", "messages": [{"role": "user", "content": "Paint it."}], "max_tokens": 400}
    for seed in range(3):
        told = server.json(
            "POST", "/v1/chat/completions", {**asked, "seed": seed, "tools": tools[:1], "tool_choice": "required"}
        )
        for call in told["choices"][0]["message"]["tool_calls"]:
            assert call["function"]["name"] == "paint"
            assert json.loads(call["function"]["arguments"])["colour"] in ("red", "green")
        named = {"type": "function", "function": {"name": "wash"}}
        told = server.json(
            "POST", "/v1/chat/completions", {**asked, "seed": seed, "tools": tools, "tool_choice": named}
        )
        (call,) = told["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "wash"
    chosen = {**asked, "structured_outputs": {"choice": ["red", "green"]}}
    told = server.json("POST", "/v1/chat/completions", chosen)
    assert told["choices"][0]["message"]["content"] in ("red", "green")
    told = server.json("POST", "/v1/chat/completions", {**asked, "seed": 1, "response_format": {"type": "json_object"}})
    choice = told["choices"][0]
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
    refused = {**asked, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}
    status, _, body = server.ask("POST", "/v1/chat/completions", refused)
    assert (status, "cannot be enforced" in json.loads(body)["error"]["message"]) == (400, True)


def test_a_precision_that_this_processor_does_not_have_fails_the_load_by_name(tmp_path: Path) -> None:
    """Where a processor has it, the model answers."""
    model = tmp_path / "models" / "precise"
    model.mkdir(parents=True)
    language_model(model / "1")
    (model / "config.pbtxt").write_text(
        'backend: "llm"\nparameters { key: "KV_CACHE_PRECISION" value { string_value: "f32" } }\n'
    )
    with serving(tmp_path / "models", tmp_path / "log", "--exit-on-error=false") as server:
        if server.ready("precise"):
            assert generate(server, "precise", parameters=FEW)[0] == 200
        else:
            (told,) = server.json("POST", "/v2/repository/index")
            assert "KV_CACHE_PRECISION=f32" in told["reason"]
