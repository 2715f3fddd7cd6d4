"""What a client writes under /v1 and into parameters of language models holds nobody else up, and keeps no memory."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import PIL.Image
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from answering import answering
from llm_models import language_model
from nerite.core import memory
from process_family import helpers_of, ticks_of
from seeing_models import seeing_model
from serving import Serving, eventually, python_model, serving

HELLO = [{"role": "user", "content": "hello"}]
THRICE = """
{%- for a in messages -%}{%- for b in messages -%}{%- for c in messages -%}
{%- if a.role == b.role and b.role == c.role and c.content == "never" -%}!{%- endif -%}
{%- endfor -%}{%- endfor -%}{%- endfor -%}
{{ messages | length }}: {{ messages[-1].content }}"""
ECHO = """
backend: "python"
max_batch_size: 0
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
       { name: "sampling_parameters" data_type: TYPE_STRING dims: [ 1 ] optional: true }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU }]
"""
SAYS_ITS_PROMPT = """
def execute(self, requests):
    answers = []
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text], object))]))
    return answers
"""
WRITES_CALLS = """
def execute(self, requests):
    text = '<tool_call>{"name": "f", "arguments": {"numbers": [%s]}}</tool_call>' % ", ".join(["1"] * 500_000)
    output = pb_utils.Tensor("text_output", np.array([text.encode()], object))
    return [pb_utils.InferenceResponse([output]) for _ in requests]
"""
EMBEDS = """
def execute(self, requests):
    vector = np.ones((1, 1024), np.float32)
    answers = []
    for request in requests:
        rows = request.inputs()[0].as_numpy().shape[0]
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("embedding", np.repeat(vector, rows, 0))]))
    return answers
"""
VECTORS = """
backend: "python"
max_batch_size: 64
dynamic_batching {}
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "embedding" data_type: TYPE_FP32 dims: [ 1024 ] }]
instance_group [{ kind: KIND_CPU }]
"""
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("limits")
    models = folder / "models"
    python_model(models, "echo", SAYS_ITS_PROMPT, ECHO)
    python_model(models, "slow", SAYS_ITS_PROMPT, ECHO)
    (models / "slow" / "1" / "chat_template.jinja").write_text(THRICE)
    python_model(models, "calls", WRITES_CALLS, ECHO + parameter("TOOL_CALL_PARSER", "hermes"))
    python_model(models, "vectors", EMBEDS, VECTORS)
    (language_model(models / "chat" / "1") / "generation_config.json").write_text('{"temperature": 0.0}')
    seeing_model(models / "seer" / "1")
    with serving(models, folder / "log", "--generation-config=vllm") as running:
        yield running


def ask(server: Serving, path: str, **fields: Any) -> tuple[int, Any]:
    status, _, body = server.ask("POST", path, json.dumps(fields, separators=(",", ":")).encode())
    return status, json.loads(body)


def chat(server: Serving, model: str, messages: Any, **fields: Any) -> tuple[int, Any]:
    return ask(server, "/v1/chat/completions", model=model, messages=messages, **fields)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        (
            {"tools": [{"type": "function", "function": {"name": f"f{number}"}} for number in range(400_000)]},
            "tools",
            "array_above_max_length",
        ),
        ({"messages": HELLO * 400_000}, "messages", "array_above_max_length"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 400_000}]},
            "messages[0].content",
            "array_above_max_length",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}] * 400_000}]},
            "messages[0].tool_calls",
            "array_above_max_length",
        ),
        ({"stop": ["a"] * 1_000_000}, "stop", "array_above_max_length"),
        ({"logit_bias": {str(token): 1 for token in range(400_000)}}, "logit_bias", "object_above_max_properties"),
        ({"n": 1_000_000}, "n", "invalid_value"),
        ({"chat_template_kwargs": {"x": [[]] * 10_000_000}}, None, "content_too_large"),
    ],
    ids=["tools", "messages", "parts", "calls", "stop", "bias", "n", "values"],
)
def test_numbers_without_end(server: Serving, fields: dict[str, Any], param: str | None, code: str) -> None:
    body = json.dumps({"model": "echo", "messages": HELLO, **fields}, separators=(",", ":")).encode()
    before = memory.memory_of(server.process.pid)
    with answering(server):
        status, _, answer = server.ask("POST", "/v1/chat/completions", body)
    error = json.loads(answer)["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert status == (400 if param else 413)
    eventually(lambda: memory.memory_of(server.process.pid) < before + (64 << 20), what="the memory did not return")


def test_large_bodies_say_the_same_as_small_ones(server: Serving) -> None:
    for size in (10, 1_000_000):
        text = "é" * size
        status, answer = chat(server, "echo", [{"role": "user", "content": text}], n=2, seed=1)
        said = [choice["message"]["content"] for choice in answer["choices"]]
        assert (status, said) == (200, [f"user: {text}\nassistant:"] * 2)
        status, answer = ask(server, "/v1/completions", model="echo", prompt=[text, "b"], echo=True)
        assert [choice["text"] for choice in answer["choices"]] == [text * 2, "bb"]
        status, answer = ask(server, "/v1/embeddings", model="vectors", input=[text, "b"], dimensions=2)
        assert [each["index"] for each in answer["data"]] == [0, 1]
        status, answer = chat(server, "ecko", [{"role": "user", "content": text}])
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = chat(server, "echo", [{"role": "nobody", "content": text}])
        assert (status, answer["error"]["param"]) == (400, "messages[0].role")
        status, answer = chat(server, "echo", [{"role": "user", "content": [image(b"x" * size)]}])
        assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].type")


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_json_that_is_nested_deeply(server: Serving, size: int, depth: int) -> None:
    """It is refused wherever it stands, and by whom it is read."""
    text, deep = "x" * size, "[" * depth + "]" * depth
    said = json.dumps({"model": "echo", "messages": [{"role": "user", "content": text}]})[:-1]
    for field in (
        f'"chat_template_kwargs": {{"x": {deep}}}',
        f'"structured_outputs": {deep}',
        f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "x", "schema": {{"x": {deep}}}}}}}',
        f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {deep}}}}}}}]',
    ):
        status, _, body = server.ask("POST", "/v1/chat/completions", f"{said}, {field}}}".encode())
        assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error"), field[:40]


def test_a_template_that_takes_long_is_rendered_beside(server: Serving) -> None:
    status, answer = chat(server, "slow", HELLO)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "1: hello")
    with answering(server):
        status, answer = chat(server, "slow", HELLO * 80)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "80: hello")


def test_a_template_that_never_ends_is_ended(server: Serving) -> None:
    with answering(server):
        status, answer = chat(server, "slow", HELLO * 2048)
    assert (status, answer["error"]["code"]) == (400, "request_too_complex")
    assert answer["error"]["message"].startswith("rendering the chat template took more than 10 s")


def test_a_client_that_goes_ends_the_rendering(server: Serving) -> None:
    def ticks() -> dict[int, int]:
        """Return the processor time that each helper process has used. One may end meanwhile."""
        used = {}
        for pid in helpers_of(server.process.pid):
            with suppress(OSError):
                used[pid] = ticks_of(pid)
        return used

    body = json.dumps({"model": "slow", "messages": HELLO * 2048})
    before = ticks()
    gone = []
    for _ in range(8):  # more than there are helper processes
        connection = http.client.HTTPConnection(server.http, timeout=30)
        connection.request("POST", "/v1/chat/completions", body)
        gone.append(connection)
    eventually(lambda: sum(used - before.get(pid, 0) > 5 for pid, used in ticks().items()) > 1, what="none renders")
    for connection in gone:
        connection.close()
    status, answer = chat(server, "slow", HELLO * 20)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "20: hello")


def test_calls_of_any_length_are_read_in_their_time(server: Serving) -> None:
    with answering(server):
        status, answer = chat(server, "calls", HELLO, tools=[TOOL])
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert status == 200
    assert len(json.loads(call["function"]["arguments"])["numbers"]) == 500_000


def test_many_embeddings(server: Serving) -> None:
    with answering(server, 1.5):
        status, answer = ask(server, "/v1/embeddings", model="vectors", input=["text"] * 2048)
    assert (status, len(answer["data"]), len(answer["data"][2047]["embedding"])) == (200, 2048, 1024)
    status, answer = ask(server, "/v1/embeddings", model="vectors", input=["text"] * 2049)
    assert (status, answer["error"]["code"]) == (400, "array_above_max_length")


def test_prompts_of_all_choices_are_as_large_as_a_body_may_be(server: Serving) -> None:
    before = memory.memory_of(server.process.pid)
    with answering(server):
        status, answer = ask(server, "/v1/completions", model="echo", prompt="x" * 20_000_000, n=128, echo=True)
    assert (status, answer["error"]["param"]) == (400, "n")
    assert "All choices together have 2560" in answer["error"]["message"]
    eventually(lambda: memory.memory_of(server.process.pid) < before + (64 << 20), what="the memory did not return")


MILLION = 1_000_000
ASKS_TOO_MUCH = [
    ({"n": MILLION}, "'n' must be 1 to 128, got 1000000"),
    ({"stop": ["a"] * 65}, "'stop' must be no more than 64 texts"),
    ({"stop": ["x" * 5000]}, "'stop' must be no more than 4096 characters in total"),
    ({"stop_token_ids": [1] * 1025}, "'stop_token_ids' must be no more than 1024 tokens"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "'logit_bias' must be for no more than 1024 tokens"),
    ({"allowed_token_ids": [1] * 65_537}, "'allowed_token_ids' must be no more than 65536 tokens"),
    ({"bad_words": ["a"] * 257}, "'bad_words' must be no more than 256 texts"),
    ({"stop": "x" * 2_000_000}, "'sampling_parameters' has 2000012 bytes; the maximum is 1048576"),
]


@pytest.mark.parametrize(("said", "text"), ASKS_TOO_MUCH, ids=lambda each: str(each)[:20])
def test_sampling_parameters_have_bounds(server: Serving, said: dict[str, Any], text: str) -> None:
    status, _, body = server.ask(
        "POST",
        "/v2/models/chat/generate",
        json.dumps({"text_input": "once", "sampling_parameters": json.dumps(said)}).encode(),
    )
    assert status == 400
    assert text in json.loads(body)["error"]


def test_sequences_are_counted_on_each_way_in(server: Serving) -> None:
    """Before anything is made for each of them."""
    (worker,) = [pid for name, pid in server.workers().items() if name.startswith("chat")]
    before = memory.memory_of(worker)
    with answering(server):
        for body in (
            {"text_input": "once", "parameters": {"n": MILLION}},
            {"text_input": "once", "n": MILLION},
            {"text_input": "once", "sampling_parameters": json.dumps({"n": MILLION})},
        ):
            status, answer = ask(server, "/v2/models/chat/generate", **body)
            assert (status, "'n' must be 1 to 128" in answer["error"]) == (400, True)
        answers: list[Any] = []
        came = threading.Event()
        with grpc_client.InferenceServerClient(server.grpc) as client:

            def take(result: Any, error: InferenceServerException | None) -> None:
                answers.append(error)
                came.set()

            client.start_stream(take)
            prompt = grpc_client.InferInput("text_input", [1], "BYTES")
            prompt.set_data_from_numpy(np.array([b"once"], object))
            client.async_stream_infer("chat", [prompt], parameters={"n": MILLION})
            assert came.wait(60)
            client.stop_stream()
        assert "'n' must be 1 to 128" in str(answers[0])
    assert memory.memory_of(worker) < before + (64 << 20)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def image(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}


def test_images_are_counted_before_they_are_decoded(server: Serving) -> None:
    bomb = png(8000, 8000)
    assert len(bomb) < 20_000
    (worker,) = [pid for name, pid in server.workers().items() if name.startswith("seer")]
    before = memory.memory_of(worker)
    with answering(server):
        for files, text in (
            ([png(2, 2)] * 65, "no more than 64 images"),
            (
                [bomb] * 3,
                "'image_url' 2 has 8000 x 8000 pixels; the maximum of all together is 134217728 pixels",
            ),
            ([png(10_000, 10_000)], "'image_url' 0 has 10000 x 10000 pixels; the maximum is 67108864 pixels"),
        ):
            parts = [image(file) for file in files]
            status, answer = chat(server, "seer", [{"role": "user", "content": parts}])
            assert status == 400
            assert text in answer["error"]["message"]
        files = [base64.b64encode(png(2, 2)).decode()] * 65
        status, answer = ask(server, "/v2/models/seer/generate", text_input="what is it", image=files)
        assert (status, "'image' has 65 images; the maximum is 64" in answer["error"]) == (400, True)
    assert memory.memory_of(worker) < before + (64 << 20)


def test_what_it_takes_for_a_prompt_is_known_before_it_is_tokenized(server: Serving) -> None:
    with answering(server):
        status, answer = ask(server, "/v2/models/chat/generate", text_input="x" * 26_000_000)
    assert status == 400
    assert "the prompt has 26000000 characters, which do not fit into a context of 100000 tokens" in answer["error"]


def test_what_is_tokenized_fits_into_the_context(server: Serving) -> None:
    """A token is a byte here, and the context has 100,000."""
    with answering(server):
        for path, body, told in (
            ("/tokenize", {"prompt": "x" * 1_500_000}, "of 1500000 characters of the prompt do not fit into a context"),
            ("/tokenize", {"prompt": "x" * 20_000_000}, "the prompt has 20000000 characters"),
            ("/tokenize", {"prompt": "x" * 100_001}, "the prompt has 100001 tokens, but the model's context is 100000"),
            ("/v1/completions", {"prompt": "x" * 1_500_000}, "of 1500000 characters of the prompt do not fit"),
            ("/v1/completions", {"prompt": "x" * 1_500_000, "truncate_prompt_tokens": 10}, ""),
            ("/detokenize", {"tokens": [50] * 100_001}, "there are 100001 tokens, but the model's context is 100000"),
            ("/detokenize", {"tokens": [50] * 100_000}, ""),
        ):
            status, answer = ask(server, path, model="chat", **body)
            assert (status, told in json.dumps(answer)) == (400 if told else 200, True), (path, answer)


def test_defaults_of_a_checkpoint_are_left_out(server: Serving) -> None:
    texts = set()
    for _ in range(3):
        body = {"model": "chat", "prompt": "a", "max_tokens": 16, "ignore_eos": True}
        texts.add(json.loads(server.ask("POST", "/v1/completions", body)[2])["choices"][0]["text"])
    assert len(texts) > 1
