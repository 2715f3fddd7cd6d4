"""What requests of agents cost: budgets, ledger and limits count them like chats, at a server and at a router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import agent_requests as recorded
from llm_models import TEMPLATE, language_model
from routing import ADMIN_KEY, ROUTER, pool, routing
from serving import ALL_TENANTS, Serving, eventually, serving
from text_models import parameter

CONFIG = 'backend: "llm"\n' + parameter("TOOL_CALL_PARSER", "hermes")
POLICY = """
[tenants.agent]
keys = ["agent-key"]

[tenants.poor]
keys = ["poor-key"]
output_tokens_per_minute = 1
output_tokens_burst = 20

[llms.small]
max_input_tokens = 10
"""
KEY = {"authorization": "Bearer agent-key"}
WORDS = "Say something."
MESSAGES = [{"role": "user", "content": WORDS}]
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 8}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 8}),
    "responses": ("/v1/responses", {"input": WORDS, "max_output_tokens": 8}),
}
PLAIN: dict[str, Any] = {"model": "chat", "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("budgets")
    for name in ("chat", "small"):
        (folder / "models" / name).mkdir(parents=True)
        version = language_model(folder / "models" / name / "1")
        (version / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "models" / name / "config.pbtxt").write_text(CONFIG)
    policy = folder / "policy.toml"
    policy.write_text(POLICY)
    flags = [f"--policy-file={policy}", ALL_TENANTS, f"--ledger={folder / 'ledger.db'}", "--model-alias=claude-*=chat"]
    with serving(folder / "models", folder / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def router(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("router")
    (folder / "policy.toml").write_text(POLICY)
    settings = (
        f'{ROUTER}policy-file = "policy.toml"\n{ADMIN_KEY}ledger = "router.db"\nmodel-aliases = ["claude-*=chat"]\n'
    )
    with routing(folder, pool(server.http), router=settings) as running:
        eventually(lambda: running.ready())
        yield running


@pytest.fixture(params=["server", "router"])
def place(request: pytest.FixtureRequest) -> Serving:
    """Whoever the agent is told to ask."""
    found: Serving = request.getfixturevalue(request.param)
    return found


def charged(place: Serving) -> tuple[int, int]:
    """Return the tokens of prompts and of answers that the tenant has been charged so far."""
    found = [each for each in place.json("GET", "/v2/quota")["use"] if (each["model"], each["tenant"]) == MINE]
    return (found[0]["input_tokens"], found[0]["output_tokens"]) if found else (0, 0)


MINE = ("chat", "agent")


def written(place: Serving) -> tuple[int, int, int]:
    """Return the requests in the ledger, and their tokens."""
    rows = place.json("GET", "/v2/usage?group_by=tenant,model")["data"]
    found = [each for each in rows if (each["model"], each["tenant"]) == MINE]
    names = ("requests", "prompt_tokens", "answer_tokens")
    return tuple(found[0][name] for name in names) if found else (0, 0, 0)  # type: ignore[return-value]


def told(api: str, text: bytes, stream: bool) -> tuple[int, int]:
    """Return the tokens of prompt and answer that an answer tells."""
    if not stream:
        usage = json.loads(text)["usage"]
    else:
        lines = [line.removeprefix(b"data: ") for line in text.split(b"\n") if line.startswith(b"data: {")]
        found = [json.loads(line) for line in lines]
        if api == "messages":
            usage = found[0]["message"]["usage"] | found[-2]["usage"]
        else:
            usage = found[-1]["response"]["usage"] if api == "responses" else found[-1]["usage"]
    names = ("prompt_tokens", "completion_tokens") if api == "chat" else ("input_tokens", "output_tokens")
    return usage[names[0]], usage[names[1]]


def differences(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(new - old for new, old in zip(now, before, strict=True))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_tokens_are_charged(place: Serving, api: str, stream: bool) -> None:
    path, body = APIS[api]
    options = {"stream_options": {"include_usage": True}} if api == "chat" and stream else {}
    before, rows = charged(place), written(place)
    status, _, text = place.ask("POST", path, {**PLAIN, **body, **options, "stream": stream}, **KEY)
    assert status == 200, text
    prompt, answer = told(api, text, stream)
    assert prompt == len("[user]") + len(WORDS) and 0 < answer <= 8
    eventually(lambda: written(place)[0] > rows[0])
    assert differences(written(place), rows) == (1, prompt, answer)
    assert differences(charged(place), before) == (prompt, answer)


def test_a_count_of_tokens_is_no_answer(place: Serving) -> None:
    before, rows = charged(place), written(place)
    asked = recorded.CLAUDE_COUNT
    status, _, text = place.ask("POST", asked.path, asked.body, x_api_key="agent-key")
    assert (status, json.loads(text)["input_tokens"] > 0) == (200, True), text
    eventually(lambda: written(place)[0] > rows[0])
    assert differences(written(place), rows)[2] == 0
    assert differences(charged(place), before)[1] == 0


def test_claude_code_with_a_limit_of_thoughts(place: Serving) -> None:
    """An engine takes its whole request."""
    asked = recorded.CLAUDE_CODE.changed(max_tokens=16, thinking={"type": "enabled", "budget_tokens": 8}, temperature=0)
    status, _, text = place.ask("POST", asked.path, asked.body, x_api_key="agent-key")
    assert (status, b"event: message_stop" in text) == (200, True), text[-500:]


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_who_has_used_up_a_budget(place: Serving, api: str) -> None:
    path, body = APIS[api]
    key = {"x_api_key": "poor-key"} if api == "messages" else {"authorization": "Bearer poor-key"}

    def ask() -> tuple[int, dict[str, str], bytes]:
        return place.ask("POST", path, {**PLAIN, **body}, **key)

    for _ in range(4):
        status, headers, text = ask()
        if status != 200:
            break
    error = json.loads(text)
    assert (status, int(headers["Retry-After"]) > 0) == (429, True), text
    if api == "messages":
        assert (error["type"], error["error"]["type"]) == ("error", "rate_limit_error")
    else:
        assert (error["error"]["type"], error["error"]["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "output_tokens_per_minute" in error["error"]["message"]


@pytest.mark.parametrize("api", ["messages", "responses"])
def test_prompts_that_are_too_long(server: Serving, api: str) -> None:
    path, body = APIS[api]
    status, _, text = server.ask("POST", path, {**PLAIN, **body, "model": "small"}, **KEY)
    error = json.loads(text)["error"]
    assert (status, "max_input_tokens of model 'small' is 10" in error["message"]) == (413, True)
    assert error["type"] == ("request_too_large" if api == "messages" else "invalid_request_error")
