"""Language models with a policy: tokens are counted, and those that wait do so in the server."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from test_llm import ENDLESS, FEW, NARROW, Stream

from llm_models import TEMPLATE, chat_tokens, language_model, write_tokenizer
from serving import ALL_TENANTS, PATIENCE, Serving, eventually, serving

POLICY = """
[tenants.paying]
keys = ["key"]
output_tokens_per_minute = 10
output_tokens_burst = 30

[llms.strict]
max_input_tokens = 20
max_output_tokens = 12
"""
ALL = {"temperature": 0, "ignore_eos": True, "max_tokens": None}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tokens")
    for name in ("strict", "narrow"):
        (folder / "models" / name).mkdir(parents=True)
        language_model(folder / "models" / name / "1")
        (folder / "models" / name / "config.pbtxt").write_text(NARROW)
    write_tokenizer(folder / "models" / "narrow" / "1", begin=True)
    (folder / "models" / "narrow" / "1" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "models" / "narrow" / "1" / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "</s>"}'
    )
    policy = folder / "policy.toml"
    policy.write_text(POLICY)
    with serving(folder / "models", folder / "log", f"--policy-file={policy}", ALL_TENANTS) as running:
        yield running
    assert "Traceback" not in running.text


def generate(server: Serving, model: str, text: str = "once", key: str = "", **sampling: Any) -> tuple[int, Any]:
    body = {"text_input": text, "sampling_parameters": json.dumps(sampling), "return_num_output_tokens": True}
    status, _, answer = server.ask("POST", f"/v2/models/{model}/generate", body, authorization=f"Bearer {key}")
    return status, json.loads(answer)


def use(server: Serving, model: str, tenant: str = "default") -> dict[str, Any]:
    found = server.json("GET", "/v2/quota")["use"]
    (one,) = [each for each in found if (each["model"], each["tenant"]) == (model, tenant)]
    return dict(one)


def test_lengths(server: Serving) -> None:
    """A token is a byte here. Nobody in the server knows that before the engine says so."""
    assert any("nerite_llm_kv_blocks" in name for name in server.metrics()), "engines speak before they are asked"
    status, answer = generate(server, "strict", **ALL)
    assert (status, answer["num_output_tokens"]) == (200, 12)
    told = use(server, "strict")
    assert (told["output_tokens"], told["finished"]) == (12, {"complete": 1})
    assert told["input_tokens"] == len("once")
    status, answer = generate(server, "strict", "x" * 21, max_tokens=5)
    assert status == 413
    assert "max_input_tokens of model 'strict' is 20, now 21" in answer["error"]
    status, answer = generate(server, "strict", max_tokens=13)
    assert (status, "max_output_tokens" in answer["error"]) == (400, True)
    told = use(server, "strict")
    assert (told["refused"], told["output_tokens"]) == ({"max_input_tokens": 1, "max_output_tokens": 1}, 12)


def test_who_says_nothing_gets_what_is_allowed(server: Serving) -> None:
    """The policy has 12, and an engine 16 by itself; the model knows no end."""
    said = {"text_input": "once", "return_num_output_tokens": True, "return_finish_reason": True}
    for extra in ({"parameters": {"ignore_eos": True}}, {"sampling_parameters": '{"ignore_eos": true}'}):
        status, _, body = server.ask("POST", "/v2/models/strict/generate", said | extra)
        assert (status, json.loads(body)["num_output_tokens"]) == (200, 12)
    for path, asked in (
        ("completions", {"prompt": "once"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        status, _, body = server.ask("POST", f"/v1/{path}", {"model": "strict", "ignore_eos": True, **asked})
        answer = json.loads(body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 12)
        assert answer["choices"][0]["finish_reason"] == "length"


def test_rates(server: Serving) -> None:
    """What is charged in advance is an estimate; what is paid in the end are the tokens that were generated."""
    for _ in range(2):
        assert generate(server, "narrow", key="key", **FEW | {"max_tokens": 10})[0] == 200
    eventually(lambda: use(server, "narrow", "paying")["finished"] == {"complete": 2})
    (tenant,) = [each for each in server.json("GET", "/v2/quota")["tenants"] if each["tenant"] == "paying"]
    (rate,) = tenant["rates"]
    assert (rate["limit"], 10 <= rate["left"] <= 12) == ("output_tokens_per_minute", True)
    asked = {"model": "narrow", "prompt": "once", "max_tokens": 30}
    status, headers, body = server.ask("POST", "/v1/completions", asked, authorization="Bearer key")
    assert (status, "Retry-After" in headers) == (429, True)
    assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"


def test_tokens_of_chats(server: Serving) -> None:
    """Those of a chat are those that Hugging Face has for it, to the client and in the accounts."""
    chat = [{"role": "user", "content": "once"}]
    tokens = chat_tokens(chat)
    assert generate(server, "narrow", **FEW)[0] == 200

    def charged(path: str, **said: Any) -> tuple[int, int]:
        before = use(server, "narrow")["input_tokens"]
        answer = server.json("POST", path, {"model": "narrow", **FEW, **said})
        assert "prompt_tokens_details" not in answer["usage"], "the engine does not tell what it had cached"
        return answer["usage"]["prompt_tokens"], use(server, "narrow")["input_tokens"] - before

    assert charged("/v1/chat/completions", messages=chat) == (len(tokens),) * 2
    assert charged("/v1/chat/completions", messages=chat, add_special_tokens=True) == (len(tokens) + 1,) * 2
    assert charged("/v1/completions", prompt="once") == (5, 5)
    assert charged("/v1/completions", prompt="once", add_special_tokens=False) == (4, 4)


def test_what_a_prompt_costs(server: Serving) -> None:
    """Nothing if it is refused, and once however many answers there are to it."""
    before = use(server, "narrow")
    asked = {"model": "narrow", "prompt": "once", "logit_bias": {"1": 1}}
    status, _, body = server.ask("POST", "/v1/completions", asked)
    assert (status, json.loads(body)["error"]["param"]) == (400, "logit_bias")
    told = use(server, "narrow")
    assert (told["input_tokens"], told["offered"]) == (before["input_tokens"], before["offered"] + 1)
    answer = server.json("POST", "/v1/completions", {"model": "narrow", "prompt": "once", "n": 3, **FEW})
    assert (answer["usage"]["prompt_tokens"], len(answer["choices"])) == (5, 3)
    assert use(server, "narrow")["input_tokens"] == before["input_tokens"] + 5


def waiting(server: Serving) -> int:
    (found,) = [each for each in server.json("GET", "/v2/quota")["models"] if each["model"] == "narrow"]
    return int(found["waiting"])


def test_those_that_wait_outlive_the_engine(server: Serving) -> None:
    runs = Stream(server, "narrow", parameters=ENDLESS)
    assert runs.event()["text_output"] is not None
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(generate, server, "narrow", **FEW) for _ in range(3)]
        eventually(lambda: waiting(server) == 3)
        assert server.metrics()['vllm:num_requests_waiting{model="narrow",version="1"}'] == 3
        os.kill(server.workers()["narrow_0"], signal.SIGKILL)
        while (event := runs.event()) is not None and "error" not in event:
            pass
        assert event is not None
        assert "The worker died while it ran this request" in event["error"]
        runs.cut()
        assert [answer.result()[0] for answer in waits] == [200] * 3
    assert waiting(server) == 0


def by_grpc(server: Serving) -> None:
    inputs = [grpc_client.InferInput(name, [1], "BYTES") for name in ("text_input", "sampling_parameters")]
    for tensor, text in zip(inputs, (b"once", json.dumps(LONG).encode()), strict=True):
        tensor.set_data_from_numpy(np.array([text], object))
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc_client.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("narrow", inputs, priority=5)
        assert answers.get(timeout=PATIENCE)[1] is None
        client.stop_stream()


LONG = {**FEW, "max_tokens": 300}
CHAT = {"model": "narrow", "messages": [{"role": "user", "content": "a"}]}
WAYS = {
    "a parameter": ("/v2/models/narrow/generate", {"text_input": "once", "parameters": {**LONG, "priority": 5}}),
    "sampling": (
        "/v2/models/narrow/generate",
        {"text_input": "once", "sampling_parameters": json.dumps({**LONG, "priority": 5})},
    ),
    "completions": ("/v1/completions", {"model": "narrow", "prompt": "once", "priority": 5, **LONG}),
    "chats": ("/v1/chat/completions", {**CHAT, "priority": 5, **LONG}),
}


@pytest.mark.feature("openvino_genai", "priorities")
@pytest.mark.parametrize("way", [*WAYS, "grpc"])
def test_a_request_that_may_wait_longer(server: Serving, way: str) -> None:
    """The one that runs has no end, and what is said to wait is the longer of the two that wait."""
    ended: list[str] = []

    def low() -> None:
        if way == "grpc":
            by_grpc(server)
        else:
            assert server.ask("POST", *WAYS[way])[0] == 200
        ended.append("low")

    def usual() -> None:
        assert generate(server, "narrow", **FEW)[0] == 200
        ended.append("usual")

    runs = Stream(server, "narrow", parameters=ENDLESS)
    runs.event()
    with ThreadPoolExecutor() as pool:
        asked = []
        for count, call in enumerate((low, usual), 1):
            asked.append(pool.submit(call))
            eventually(lambda count=count: waiting(server) == count)  # type: ignore[misc]
        runs.cut()
        for each in asked:
            each.result()
    assert ended == ["usual", "low"]


@pytest.mark.parametrize("path", ["/v2/models/narrow/generate", "/v1/completions"])
def test_nobody_puts_themselves_before_others(server: Serving, path: str) -> None:
    body = {"text_input": "once", "parameters": {"priority": -1}}
    if path.startswith("/v1"):
        body = {"model": "narrow", "prompt": "once", "priority": -1}
    status, _, answer = server.ask("POST", path, body)
    assert (status, "priority" in answer.decode()) == (400, True)


def test_who_goes_leaves_at_once(server: Serving) -> None:
    before = use(server, "narrow")
    runs = Stream(server, "narrow", parameters=ENDLESS)
    runs.event()
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(generate, server, "narrow", **FEW)
        eventually(lambda: waiting(server) == 1)
        runs.cut()
        assert waits.result()[0] == 200
    told = use(server, "narrow")
    assert told["finished"]["cancelled"] == before["finished"].get("cancelled", 0) + 1
    assert told["finished_tokens"]["cancelled"] > 0
