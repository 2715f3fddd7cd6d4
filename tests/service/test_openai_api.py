"""The official client of OpenAI against a server whose models are written here."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serving import Serving, eventually, pbtxt, python_model, serving
from text_models import add_header, engine, parameter

SHOUT = """
def execute(self, requests):
    answers = []
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
        told = json.loads(request.parameters())
        text = json.dumps(told) if "settings" in text else text.upper()
        output = pb_utils.Tensor("text_output", np.array([[text.encode()]], object))
        answers.append(pb_utils.InferenceResponse([output]))
    return answers
"""
SIMPLE = """
backend: "python"
max_batch_size: 4
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }]
instance_group [{ kind: KIND_CPU }]
"""
EMBED = """
def execute(self, requests):
    answers = []
    for request in requests:
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0]
        vector = np.array([[len(text), 0, 3, 4]], np.float32)
        tokens = pb_utils.Tensor("num_input_tokens", np.array([[len(text.split())]], np.uint32))
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("embedding", vector), tokens]))
    return answers
"""
COUNTED = ', { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [ 1 ] }'
VECTORS = SIMPLE.replace(
    'output [{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }]',
    f'output [{{ name: "embedding" data_type: TYPE_FP32 dims: [ 4 ] }}{COUNTED}]',
)
CALLS = 'I see. <tool_call>\n{"name": "look", "arguments": {"at": "a \\"star\\"", "often": [1, 2]}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("openai")
    models = folder / "models"
    version = engine(models, "words")
    (version / "chat_template.jinja").write_text(
        "{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}{% if tools %}"
        "{{ raise_exception('no tools, please') if messages|length > 3 }}{% endif %}"
    )
    hermes = parameter("TOOL_CALL_PARSER", "hermes") + parameter("CHAT_TEMPLATE", "chatml")
    engine(models, "caller", CALLS, hermes)
    engine(models, "arguments", '{"at": "sky"}')
    broken = '<tool_call> {"name": "look", "arguments": {...}} </tool_call>'
    engine(models, "sloppy", broken, parameter("TOOL_CALL_PARSER", "qwen"))
    add_header(python_model(models, "shout", SHOUT, SIMPLE), "\nimport json\n")
    engine(models, "twice", f"{CALLS}\n{CALLS.partition('. ')[2]}", hermes)
    python_model(models, "vectors", EMBED, VECTORS)
    uncounted = VECTORS.replace(COUNTED, "")
    python_model(models, "uncounted", EMBED.replace("vector), tokens]", "vector)]"), uncounted)
    python_model(models, "numbers", "def execute(self, requests): pass", pbtxt())
    flags = ["--http-restricted-api=statistics:authorization=Bearer k", "--openai-strict=true"]
    with serving(models, folder / "log", *flags) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="k", max_retries=0, timeout=30) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [
        "arguments",
        "caller",
        "shout",
        "sloppy",
        "twice",
        "uncounted",
        "vectors",
        "words",
    ]
    assert client.models.retrieve("words").object == "model"
    for name in ("numbers", "none"):
        with pytest.raises(openai.NotFoundError, match=f"Unknown model: {name}"):
            client.models.retrieve(name)


def test_a_completion(client: openai.OpenAI) -> None:
    done = client.completions.create(model="words", prompt="one two three")
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("one two three", "length", None)
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 3, 6)
    done = client.completions.create(model="words", prompt=["a b", "c"], n=2, echo=True, max_tokens=1)
    assert [choice.text for choice in done.choices] == ["a ba", "a ba", "cc", "cc"]
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage is not None and (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 4)


def test_a_stream_of_text(client: openai.OpenAI) -> None:
    events = list(
        client.completions.create(
            model="words", prompt="one two three", stream=True, stream_options={"include_usage": True}, logprobs=2
        )
    )
    assert [event.choices[0].text for event in events[:-1]] == ["one ", "two ", "three", ""]
    assert events[-2].choices[0].finish_reason == "length"
    likely = events[1].choices[0].logprobs
    assert likely is not None and likely.text_offset == [4] and likely.top_logprobs == [{"two ": -0.5, "other": -1.5}]
    assert events[-1].choices == [] and events[-1].usage is not None and events[-1].usage.total_tokens == 6


def test_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    done = client.chat.completions.create(model="words", messages=messages, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in done.choices] == ["[system] Be brief. [user] Hello "] * 2
    assert done.choices[0].finish_reason == "stop"
    likely = done.choices[0].logprobs
    assert likely is not None and likely.content is not None
    assert [token.token for token in likely.content][:2] == ["[system] ", "Be "]
    assert len(likely.content[0].top_logprobs) == 1


def test_a_stream_of_a_chat(client: openai.OpenAI, server: Serving) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    events = list(client.chat.completions.create(model="words", messages=messages, stream=True, n=2))
    for index in (0, 1):
        choices = [event.choices[0] for event in events if event.choices[0].index == index]
        assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
        assert "".join(choice.delta.content or "" for choice in choices) == "[user] Hello "
        assert [choice.finish_reason for choice in choices[-2:]] == [None, "stop"]
    body = {"model": "words", "messages": messages, "stream": True}
    status, headers, text = server.ask("POST", "/v1/chat/completions", body)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    assert text.endswith(b"\n\ndata: [DONE]\n\n")


def settings_of(client: openai.OpenAI, model: str, **asked: Any) -> dict[str, Any]:
    """Return what a model is told."""
    done = client.completions.create(model=model, prompt="settings", **asked)
    told: dict[str, Any] = json.loads(done.choices[0].text)
    return told


def test_what_the_engine_is_told(client: openai.OpenAI) -> None:
    told = settings_of(
        client,
        "words",
        temperature=0.5,
        seed=3,
        stop="x",
        logit_bias={"5": -2},
        user="me",
        extra_body={"top_k": 4, "response_format": {"type": "json_object"}},
    )
    assert json.loads(told.pop("guided_decoding")) == {"json_object": True}
    expected = {"temperature": 0.5, "seed": 3, "stop": ["x"], "logit_bias": {"5": -2}, "top_k": 4, "max_tokens": 16}
    assert told == expected
    done = client.completions.create(model="words", prompt="settings", seed=3, n=2)
    assert [json.loads(choice.text)["seed"] for choice in done.choices] == [3, 4]
    chat = client.chat.completions.create(model="words", messages=[{"role": "user", "content": "settings"}])
    # As many as there is room for: that is what OpenAI has for chats.
    assert json.loads(chat.choices[0].message.content or "") == {"max_tokens": None}


def test_a_model_without_the_tensors_of_an_engine(client: openai.OpenAI) -> None:
    done = client.completions.create(model="shout", prompt="hello")
    assert (done.choices[0].text, done.choices[0].finish_reason, done.usage) == ("HELLO", "stop", None)
    assert settings_of(client, "shout", temperature=0.5, seed=1) == {"max_tokens": 16, "temperature": 0.5, "seed": 1}
    messages: Any = [{"role": "user", "content": "hi"}]
    chunks = list(
        client.chat.completions.create(
            model="shout", messages=messages, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "USER: HI\nASSISTANT:"
    for asked in ({"stop": "x"}, {"logit_bias": {"5": 1}}, {"logprobs": 1}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="shout", prompt="hello", **asked)  # type: ignore[call-overload]
        assert (refused.value.param, refused.value.code) == (next(iter(asked)), "unsupported_parameter")


def test_no_template(server: Serving, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="shout", messages=[{"role": "user", "content": "hi"}])
    assert server.text.count("model 'shout' has no chat template, so the built-in plain one is used") == 1


@pytest.mark.parametrize(
    ("asked", "kind", "param", "code"),
    [
        ({"model": "wrods"}, openai.NotFoundError, "model", "model_not_found"),
        ({"model": "numbers"}, openai.BadRequestError, "model", "model_not_supported"),
        ({"temprature": 1}, openai.BadRequestError, "temprature", "unknown_parameter"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"n": "2"}, openai.BadRequestError, "n", "invalid_type"),
        ({"messages": []}, openai.BadRequestError, "messages", "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0].content", "missing_required_parameter"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs", "invalid_parameter"),
        ({"stream_options": {}}, openai.InternalServerError, None, None),
        ({"messages": [{"role": "user", "content": "raise"}]}, openai.InternalServerError, None, None),
        ({"tools": [TOOL]}, openai.BadRequestError, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice", None),
        ({"add_special_tokens": True}, openai.BadRequestError, "add_special_tokens", "unsupported_parameter"),
    ],
)
def test_refusals(
    client: openai.OpenAI, asked: dict[str, Any], kind: type[openai.APIStatusError], param: str, code: str
) -> None:
    messages = [{"role": "user", "content": "raise"}]
    body = {"model": "words", "messages": messages, **asked}
    with pytest.raises(kind) as refused:
        client.post("/chat/completions", body=body, cast_to=dict[str, Any])
    assert (refused.value.param, refused.value.code) == (param, code)


def test_other_refusals(server: Serving) -> None:
    for method, path, status, code in (
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/completions", 400, "invalid_json"),
    ):
        said, _, body = server.ask(method, path)
        assert (said, json.loads(body)["error"]["code"]) == (status, code)


def test_an_error_in_the_middle(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="words", prompt="one break three", stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="it broke"):
        for event in stream:
            texts.append(event.choices[0].text)
    assert texts == ["one "]


def test_a_client_that_hangs_up_ends_the_work(client: openai.OpenAI, server: Serving) -> None:
    before = server.text.count("cancelled by the client")
    with client.completions.create(model="words", prompt="for ever", stream=True, n=2) as stream:
        assert next(iter(stream)).choices[0].text == "on "
    eventually(lambda: server.text.count("cancelled by the client") == before + 2)


def test_tools(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Look at the star."}]
    done = client.chat.completions.create(model="caller", messages=messages, tools=[TOOL])
    (choice,) = done.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I see.")
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.function.name == "look"
    assert json.loads(call.function.arguments) == {"at": 'a "star"', "often": [1, 2]}
    messages += [choice.message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "It shines."}]
    parts = []
    for event in client.chat.completions.create(model="caller", messages=messages, tools=[TOOL], stream=True):
        for delta in event.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            parts.append(delta.function.arguments or "")
    assert len(parts) > 3
    assert json.loads("".join(parts)) == {"at": 'a "star"', "often": [1, 2]}
    done = client.chat.completions.create(model="caller", messages=messages, tools=[TOOL], tool_choice="none")
    assert "<tool_call>" in (done.choices[0].message.content or "")


@pytest.mark.parametrize(("parallel", "count"), [(None, 2), (True, 2), (False, 1)])
def test_calls_at_a_time(client: openai.OpenAI, parallel: bool | None, count: int) -> None:
    """Clients that send false with every request get at most one call."""
    messages: Any = [{"role": "user", "content": "Look at the star."}]
    more: Any = {} if parallel is None else {"parallel_tool_calls": parallel}
    done = client.chat.completions.create(model="twice", messages=messages, tools=[TOOL], **more)
    assert (done.choices[0].finish_reason, len(done.choices[0].message.tool_calls or ())) == ("tool_calls", count)
    stream = client.chat.completions.create(model="twice", messages=messages, tools=[TOOL], stream=True, **more)
    assert len({call.id for event in stream for call in event.choices[0].delta.tool_calls or () if call.id}) == count


def test_a_call_that_is_none(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Look."}]
    done = client.chat.completions.create(model="sloppy", messages=messages, tools=[TOOL])
    message = done.choices[0].message
    assert (message.tool_calls, "{...}" in (message.content or "")) == (None, True)
    with pytest.raises(openai.APIError, match=r"'\.' where a key should be"):
        list(client.chat.completions.create(model="sloppy", messages=messages, tools=[TOOL], stream=True))


def test_a_tool_that_must_be_called(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "look"}}
    messages: Any = [{"role": "user", "content": "Look."}]
    done = client.chat.completions.create(model="arguments", messages=messages, tools=[TOOL], tool_choice=named)
    (call,) = done.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("look", '{"at": "sky"}')


def test_embeddings(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="vectors", input=["one", "one two"])
    assert [each.embedding for each in made.data] == [[3, 0, 3, 4], [7, 0, 3, 4]]
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (3, 3)
    made = client.embeddings.create(model="uncounted", input=["one", "one two"])
    assert (len(made.data), made.usage.prompt_tokens, made.usage.total_tokens) == (2, 0, 0)
    made = client.embeddings.create(model="vectors", input="four", encoding_format="float", dimensions=3)
    assert made.data[0].embedding == pytest.approx([0.8, 0, 0.6])
    for asked, param in (({"dimensions": 5}, "dimensions"), ({"input": []}, "input"), ({"input": [[1]]}, "input")):
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(**{"model": "vectors", "input": "x", **asked})  # type: ignore[arg-type]
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError, match="Model 'words' is not an embedding model"):
        client.embeddings.create(model="words", input="x")


def test_models_that_come_and_go(tmp_path: Path) -> None:
    models = tmp_path / "models"
    engine(models, "words")
    python_model(models, "broken", "def execute(:", SIMPLE)

    def ask(server: Serving, name: str, what: str) -> tuple[int, Any]:
        status, _, body = server.ask("POST", f"/v1/models/{name}/{what}")
        return status, json.loads(body)

    def refusal(server: Serving, name: str, what: str) -> tuple[int, str, str]:
        status, told = ask(server, name, what)
        return status, told["error"]["message"], told["error"]["code"]

    with serving(models, tmp_path / "log", "--model-control-mode=explicit") as server:
        assert server.json("GET", "/v1/models")["data"] == []
        status, told = ask(server, "words", "load")
        assert (status, told["id"], told["object"]) == (200, "words", "model")
        assert server.json("GET", "/v1/models")["data"] == [{**told, "task": "generate"}]
        taken = (400, "Model 'words' is already loaded", "model_already_loaded")
        assert refusal(server, "words", "load") == taken
        unknown = (400, "Unknown model: wods. Did you mean 'words'?", "model_not_found")
        assert refusal(server, "wods", "load") == refusal(server, "wods", "unload") == unknown
        status, message, _ = refusal(server, "broken", "load")
        assert (status, message.startswith("Failed to load model 'broken': load failed for model 'broken'")) == (
            400,
            True,
        )
        assert ask(server, "words", "unload") == (200, told)
        assert server.json("GET", "/v1/models")["data"] == []
        assert refusal(server, "words", "unload") == (400, "Unknown model: words", "model_not_found")
        assert ask(server, "words", "load")[0] == 200


def test_models_that_are_there_to_stay(server: Serving) -> None:
    for what in ("load", "unload"):
        status, _, body = server.ask("POST", f"/v1/models/words/{what}")
        told = json.loads(body)["error"]["message"]
        assert (status, told) == (400, "Model load/unload requires --model-control-mode=explicit")


def test_keys(tmp_path: Path) -> None:
    engine(tmp_path / "models", "words")
    flag = "--http-restricted-api=inference:authorization=Bearer secret"
    with serving(tmp_path / "models", tmp_path / "log", flag, "--access-log=true") as server:
        for key, opens in (("secret", True), ("wrong", False)):
            with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0) as client:
                if opens:
                    assert client.completions.create(model="words", prompt="one").choices[0].text == "one"
                else:
                    with pytest.raises(openai.AuthenticationError, match="expecting header 'authorization'"):
                        client.completions.create(model="words", prompt="one")
        eventually(lambda: "POST /v1/completions 200" in server.text and "words/1" in server.text)


def test_many_at_once(server: Serving) -> None:
    """Answers go where they belong, also over connections that are used again."""
    wrong: list[Any] = []

    def ask(name: str) -> None:
        connection = http.client.HTTPConnection(server.http, timeout=30)
        for number in range(10):
            body = json.dumps({"model": "words", "prompt": f"{name} {number}", "n": 2})
            connection.request("POST", "/v1/completions", body)
            answer = json.loads(connection.getresponse().read())
            if [choice["text"] for choice in answer["choices"]] != [f"{name} {number}"] * 2:
                wrong.append(answer)
        connection.close()

    threads = [threading.Thread(target=ask, args=(f"thread{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
