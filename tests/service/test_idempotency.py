"""Idempotency keys on a real engine: the connection breaks in the middle, and who asks again hears all of it."""

from __future__ import annotations

import http.client
import json
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tritonclient.grpc as grpc_client

from llm_models import CONTEXT, language_model
from pages import Page, run
from serving import ALL_TENANTS, PATIENCE, Serving, eventually, serving
from tools import require

TOKENS = 200
SAID = {"max_tokens": TOKENS, "temperature": 1, "ignore_eos": True}
"""What comes is another text each time that it is generated."""
SINGLE = 'backend: "llm"\nmodel_transaction_policy { decoupled: false }\n'
CACHED = f"{SINGLE}response_cache {{ enable: true }}\n"
POLICY = '[tenants.acme]\nkeys = ["key"]\n[idempotency]\ngrace_seconds = '


class House:
    """A server, and its policy file."""

    def __init__(self, server: Serving, policy: Path) -> None:
        self.server = server
        self._policy = policy

    def grant(self, seconds: float) -> None:
        """Have another time of grace; return when the server has taken note."""
        self.server.follow(self._policy, f"{POLICY}{seconds}\n")

    def generated(self, model: str) -> tuple[float, float]:
        """Return the generations of a model, and their tokens."""
        told = self.server.metrics()
        labels = f'model="{model}",version="1"'
        ended = sum(count for name, count in told.items() if "vllm:request_success_total" in name and labels in name)
        return ended, told.get(f"vllm:generation_tokens_total{{{labels}}}", 0)

    def count(self, what: str, model: str) -> int:
        """Return how many requests to a model were ``admitted``, or have ``joined``."""
        use = self.server.json("GET", "/v2/quota")["use"]
        return sum(each[what] for each in use if each["model"] == model)

    @contextmanager
    def one_generation(self, model: str = "chat", tokens: int = TOKENS, joined: int = 1) -> Iterator[None]:
        (ended, before), joined = self.generated(model), joined + self.count("joined", model)
        yield
        eventually(lambda: self.generated(model) == (ended + 1, before + tokens))
        assert self.count("joined", model) == joined


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("idempotency")
    for name, config in (("chat", 'backend: "llm"'), ("single", SINGLE), ("cached", CACHED)):
        (folder / "models" / name).mkdir(parents=True)
        language_model(folder / "models" / name / "1")
        (folder / "models" / name / "config.pbtxt").write_text(config)
    policy = folder / "policy.toml"
    policy.write_text(f"{POLICY}60\n")
    flags = (f"--policy-file={policy}", ALL_TENANTS, "--cache-config=local,size=1048576")
    with serving(folder / "models", folder / "log", *flags) as server:
        yield House(server, policy)
    assert "Traceback" not in server.text


class Reader:
    """A request over HTTP whose answer is read event by event."""

    def __init__(self, house: House, path: str, body: dict[str, Any], key: str, **headers: str) -> None:
        self._connection = http.client.HTTPConnection(house.server.http, timeout=PATIENCE)
        self._connection.request("POST", path, json.dumps(body), {"Idempotency-Key": key, **headers})
        self._answer: http.client.HTTPResponse | None = None

    @property
    def answer(self) -> http.client.HTTPResponse:
        if self._answer is None:
            self._answer = self._connection.getresponse()
        return self._answer

    def event(self) -> Any:
        """Return the next event; None after the last."""
        while line := self.answer.readline():
            if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                return json.loads(line.removeprefix(b"data: "))
        return None

    def rest(self) -> list[Any]:
        events = list(iter(self.event, None))
        self.cut()
        return events

    def whole(self) -> tuple[int, Any]:
        found = self.answer.status, json.loads(self.answer.read())
        self.cut()
        return found

    def cut(self) -> None:
        if self._answer is not None:
            self._answer.close()  # it holds the socket, too
        self._connection.close()


def stream(house: House, key: str, **headers: str) -> Reader:
    body = {"text_input": "once", "stream": True, "parameters": SAID}
    return Reader(house, "/v2/models/chat/generate_stream", body, key, **headers)


def test_generate_stream(house: House) -> None:
    with house.one_generation():
        first = stream(house, "stream")
        heard = [first.event() for _ in range(3)]
        first.cut()
        events = stream(house, "stream").rest()
    assert events[:3] == heard
    with house.one_generation(tokens=TOKENS, joined=0):
        other = stream(house, "another stream").rest()
    assert other != events, "without its key it is another text"


def test_both_connections_are_open(house: House) -> None:
    with house.one_generation():
        first = stream(house, "open")
        heard = [first.event() for _ in range(3)]
        second = stream(house, "open")
        with ThreadPoolExecutor() as pool:
            rests = [each.result() for each in [pool.submit(reader.rest) for reader in (first, second)]]
    assert heard + rests[0] == rests[1]


def test_what_is_complete_is_given_again(house: House) -> None:
    with house.one_generation():
        first = stream(house, "complete").rest()
        assert stream(house, "complete").rest() == first


def test_the_page(house: House) -> None:
    require("curl")
    command = Page("docs/admission.md").block("Idempotency-Key")
    before = house.generated("chat")[0]
    assert run(command, house.server) == run(command, house.server)
    eventually(lambda: house.generated("chat")[0] == before + 1)


CHAT = {"messages": [{"role": "user", "content": "once"}]}
WHOLE = [
    ("chat", "/v2/models/chat/generate", {"text_input": "once", "parameters": SAID}),
    (
        "single",
        "/v2/models/single/infer",
        {
            "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["once"]}],
            "parameters": SAID,
        },
    ),
    ("single", "/v1/chat/completions", {"model": "single", **CHAT, **SAID}),
]


@pytest.mark.parametrize(("model", "path", "body"), WHOLE)
def test_answers_in_one(house: House, model: str, path: str, body: dict[str, Any]) -> None:
    admitted = house.count("admitted", model)
    with house.one_generation(model, joined=2):
        first = Reader(house, path, body, path)
        eventually(lambda: house.count("admitted", model) > admitted)
        first.cut()
        status, answer = Reader(house, path, body, path).whole()
        status_again, again = Reader(house, path, body, path).whole()
    assert (status, status_again) == (200, 200)
    for said in (answer, again):  # under /v1 each answer has its own
        said.pop("id", None), said.pop("created", None)
    assert answer == again


@pytest.mark.parametrize(
    ("path", "more"),
    [("completions", {"prompt": "once"}), ("completions", {"prompt": "x", "n": 2}), ("chat/completions", CHAT)],
)
def test_streams_of_openai(house: House, path: str, more: dict[str, Any]) -> None:
    body = {"model": "chat", "stream": True, "stream_options": {"include_usage": True}, **SAID, **more}
    count = body.get("n", 1)
    before, joined = house.generated("chat"), house.count("joined", "chat")
    first = Reader(house, f"/v1/{path}", body, f"{path} {count}")
    heard = [first.event() for _ in range(6)]
    first.cut()
    events = Reader(house, f"/v1/{path}", body, f"{path} {count}").rest()
    assert events[-1]["usage"]["completion_tokens"] == count * TOKENS
    texts = {text_of(events, index) for index in range(count)}
    assert len(texts) == count, "each choice is one of its own"
    for index in range(count):
        assert text_of(events, index).startswith(text_of(heard, index))
    eventually(lambda: house.generated("chat") == (before[0] + count, before[1] + count * TOKENS))
    assert house.count("joined", "chat") == joined + count


def text_of(events: list[Any], index: int) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def inputs() -> list[grpc_client.InferInput]:
    text, on, said = (
        grpc_client.InferInput(name, [1], kind)
        for name, kind in (("text_input", "BYTES"), ("stream", "BOOL"), ("sampling_parameters", "BYTES"))
    )
    text.set_data_from_numpy(np.array([b"once"], object))
    on.set_data_from_numpy(np.array([True]))
    said.set_data_from_numpy(np.array([json.dumps(SAID).encode()], object))
    return [text, on, said]


class Stream:
    """A gRPC stream."""

    def __init__(self, house: House, **options: Any) -> None:
        self._came: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client = grpc_client.InferenceServerClient(house.server.grpc)
        self._client.start_stream(lambda result, error: self._came.put((result, error)), **options)

    def ask(self, **options: Any) -> None:
        self._client.async_stream_infer("chat", inputs(), **options)

    def next(self) -> tuple[str, str, bool]:
        """Return the id, the text, and whether it is the last."""
        result, error = self._came.get(timeout=PATIENCE)
        if error is not None:
            return "", str(error), True
        response = result.get_response()
        return (
            response.id,
            result.as_numpy("text_output")[0].decode(),
            response.parameters["triton_final_response"].bool_param,
        )

    def rest(self) -> str:
        texts, final = [], False
        while not final:
            _, text, final = self.next()
            texts.append(text)
        return "".join(texts)

    def cut(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


@pytest.mark.parametrize("how", ["metadata", "parameter"])
def test_grpc_streams(house: House, how: str) -> None:
    metadata = {"headers": {"idempotency-key": how}} if how == "metadata" else {}
    parameter = {"parameters": {"idempotency-key": how}} if how == "parameter" else {}
    with house.one_generation():
        first = Stream(house, **metadata)
        first.ask(request_id="a", **parameter)
        heard = "".join(first.next()[1] for _ in range(3))
        first.cut()
        second = Stream(house, **metadata)
        second.ask(request_id="b", **parameter)
        name, text, _ = second.next()
        text += second.rest()
        second.cut()
    assert name == "b", "the answer is to the request that was sent again"
    assert text.startswith(heard)
    assert len(text) > len(heard)


def test_several_requests_of_a_grpc_stream(house: House) -> None:
    with house.one_generation(joined=1):
        calls = Stream(house)
        for name in ("a", "b"):
            calls.ask(request_id=name, parameters={"idempotency-key": "several"})
        texts, open_ = {"a": "", "b": ""}, 2
        while open_:
            name, text, final = calls.next()
            texts[name] += text
            open_ -= final
        calls.cut()
    assert texts["a"] == texts["b"]


def test_a_grpc_call(house: House) -> None:
    asked = [each for each in inputs() if each.name() != "stream"]
    key = {"headers": {"idempotency-key": "call"}}
    admitted = house.count("admitted", "single")
    with house.one_generation("single"), grpc_client.InferenceServerClient(house.server.grpc) as client:
        call = client.async_infer("single", asked, lambda result, error: None, **key)
        eventually(lambda: house.count("admitted", "single") > admitted)
        call.cancel()
        answer = client.infer("single", asked, request_id="again", **key)
    assert answer.get_response().id == "again"


def test_a_model_with_a_response_cache(house: House) -> None:
    def ask(prompt: str, key: str) -> tuple[int, Any]:
        body = {"text_input": prompt, "parameters": SAID}
        status, answer = Reader(house, "/v2/models/cached/generate", body, key).whole()
        return status, answer.get("text_output")

    with house.one_generation("cached", joined=2):
        (_, known), known_again = ask("twice", "of twice"), ask("twice", "of twice, too")
        assert known_again == (200, known), "the cache has it"
        assert ask("twice", "of twice, too") == (200, known)
        assert ask("twice", "of twice") == (200, known)
    assert ask("once", "of twice, too")[0] == 422
    assert ask("once", "of once")[0] == 200
    assert ask("twice", "of once")[0] == 422, "though the cache has it"


def test_the_key_of_another_request(house: House) -> None:
    first = stream(house, "taken")
    first.event()
    body = {"text_input": "twice", "stream": True, "parameters": SAID}
    refused = Reader(house, "/v2/models/chat/generate_stream", body, "taken")
    assert refused.answer.status == 422
    assert "the idempotency key 'taken' belongs to a different request to model 'chat'" in refused.event()["error"]
    refused.cut()
    with (
        openai.OpenAI(base_url=f"http://{house.server.http}/v1", api_key="any") as client,
        pytest.raises(openai.UnprocessableEntityError, match="'taken'") as error,
    ):
        client.completions.create(model="chat", prompt="once", extra_headers={"Idempotency-Key": "taken"})
    assert error.value.code == "idempotency_key_reused"
    calls = Stream(house, headers={"idempotency-key": "taken"})
    calls.ask()
    assert "'taken'" in calls.next()[1]
    calls.cut()
    answer = stream(house, "taken", Authorization="Bearer key")
    assert answer.answer.status == 200, "another tenant has keys of its own"
    assert answer.event() is not None
    for each in (first, answer):
        each.cut()


def test_after_the_grace_it_is_stopped(house: House) -> None:
    """Last: the policy is another one from here on."""
    house.grant(0.05)
    aborted = 'vllm:request_success_total{finished_reason="abort",model="chat",version="1"}'
    before = house.server.metrics().get(aborted, 0)
    body = {"text_input": "once", "stream": True, "parameters": {**SAID, "max_tokens": CONTEXT}}
    first = Reader(house, "/v2/models/chat/generate_stream", body, "gone")
    first.event()
    first.cut()
    eventually(lambda: house.server.metrics().get(aborted, 0) == before + 1)
    eventually(lambda: house.server.metrics()['nerite_llm_requests{model="chat",version="1"}'] == 0)
