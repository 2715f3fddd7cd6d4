"""What Claude Code, Codex and Open WebUI send, answered by a server, and by a router in front of it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

import agent_requests as recorded
from agent_requests import AgentRequest
from routing import ROUTER, pool, routing
from serving import PATIENCE, Serving, eventually, serving
from text_models import engine, parameter

TEMPLATE = (
    "{% for each in messages %}[{{ each.role }}]{% if each.reasoning_content %}({{ each.reasoning_content }})"
    "{% endif %}{{ each.content }}{% for call in each.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}|{% endfor %}"
)
THINKING = TEMPLATE + "{% if tools %}<tool_call>{% endif %}<think>"
SCRIPT = 'Let me see. </think>Looking. <tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
SHELL = {"command": ["ls", "-l"], "timeout_ms": 1000}
PATCH = "*** Begin Patch\n*** End Patch\n"
ALIASES = ("claude-haiku-*=titles", "claude-*=thinker")
MODELS = ["patcher", "sheller", "thinker", "titles", "words"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("recorded")
    models = folder / "models"
    (engine(models, "thinker", SCRIPT) / "chat_template.jinja").write_text(THINKING)
    (engine(models, "titles", '{"title": "Sky"}') / "chat_template.jinja").write_text(TEMPLATE)
    (engine(models, "words") / "chat_template.jinja").write_text(TEMPLATE)
    for name, script in (
        ("sheller", CALL % ("local_shell", json.dumps(SHELL))),
        ("patcher", CALL % ("apply_patch", json.dumps({"input": PATCH}))),
    ):
        made = engine(models, name, script, parameter("TOOL_CALL_PARSER", "hermes"))
        (made / "chat_template.jinja").write_text(TEMPLATE)
    flags = [f"--model-alias={alias}" for alias in ALIASES]
    with serving(models, folder / "log", *flags, f"--responses={folder / 'responses.db'}") as running:
        yield running


@pytest.fixture(scope="module")
def router(server: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("router")
    settings = f"{ROUTER}model-aliases = {json.dumps(ALIASES)}\n"
    with routing(folder, pool(server.http), router=settings) as running:
        eventually(lambda: running.ready())
        yield running


@pytest.fixture(params=["server", "router"])
def place(request: pytest.FixtureRequest) -> Serving:
    """Whoever the agent is told to ask."""
    found: Serving = request.getfixturevalue(request.param)
    return found


def post(place: Serving, asked: AgentRequest) -> tuple[int, http.client.HTTPMessage, str]:
    """Send a request with the headers as they are; return status, headers and body of the answer."""
    connection = http.client.HTTPConnection(place.http, timeout=PATIENCE)
    try:
        connection.request("POST", asked.path, json.dumps(asked.body), {**asked.headers, "authorization": "Bearer any"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def whole(place: Serving, asked: AgentRequest) -> Any:
    """Return the JSON of an answer."""
    status, _, text = post(place, asked)
    assert status == 200, text
    return json.loads(text)


def events(place: Serving, asked: AgentRequest) -> list[Any]:
    """Return the data of the events of an answer, each of which has the name that its data has, if any."""
    status, headers, text = post(place, asked)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), text
    found = []
    for event in text.strip().split("\n\n"):
        *names, data = event.split("\n")
        if data != "data: [DONE]":
            found.append(json.loads(data.removeprefix("data: ")))
        assert names == ([f"event: {found[-1]['type']}"] if "type" in found[-1] else [])
    return found


# Claude Code


def test_claude_code(place: Serving) -> None:
    found = events(place, recorded.CLAUDE_CODE)
    starts = [each["content_block"] for each in found if each["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use"]
    assert starts[2]["name"] == "look" and starts[2]["id"]
    parts = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
    said = ["", "", ""]
    for each in found:
        if each["type"] == "content_block_delta":
            said[each["index"]] += each["delta"][parts[each["delta"]["type"]]]
    assert (said[0].strip(), said[1].strip(), json.loads(said[2])) == ("Let me see.", "Looking.", {"at": "sky"})
    assert [each["type"] for each in found[:2]] == ["message_start", "ping"]
    assert [each["type"] for each in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    assert found[-2]["usage"]["output_tokens"] == len(SCRIPT.split(" "))


def test_what_claude_code_s_model_reads(place: Serving) -> None:
    asked = recorded.CLAUDE_CODE.changed(model="words", stream=False, tools=[])
    assert whole(place, asked)["content"][0]["text"].split("|")[:-1] == [
        "[system]You are an agent.\nBe brief.",
        f"[user]{recorded.REMINDER}\nLook up.",
        '[assistant](Up.)Two looks.look{"at": "sky"}Bash{"command": "date"}',
        "[tool]blue",
        "[tool]Exit code 1",
        "[user]And now?",
    ]


def test_claude_code_beside_its_loop(place: Serving) -> None:
    title = whole(place, recorded.CLAUDE_TITLE)
    assert (title["model"], json.loads(title["content"][0]["text"])) == ("claude-haiku-any", {"title": "Sky"})
    assert whole(place, recorded.CLAUDE_PROBE)["stop_reason"] == "max_tokens"
    status, _, text = post(place, recorded.CLAUDE_SEARCH)
    error = json.loads(text)
    assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert "'tools[0].type'" in error["error"]["message"] and "web_search_20250305" in error["error"]["message"]


# Codex


def test_codex(place: Serving) -> None:
    found = events(place, recorded.CODEX)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert [each["type"] for each in found[:2]] == ["response.created", "response.in_progress"]
    response = found[-1]["response"]
    assert (found[-1]["type"], response["status"], response["store"]) == ("response.completed", "completed", False)
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert done == response["output"]
    thought, message, call = done
    assert (thought["type"], thought["content"][0]["text"].strip()) == ("reasoning", "Let me see.")
    assert message["content"][0]["text"].strip() == "Looking."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "look", {"at": "sky"})
    assert response["usage"]["output_tokens"] == len(SCRIPT.split(" "))


def test_codex_goes_on(place: Serving) -> None:
    """It keeps the conversation itself, and sends thoughts back in the only form that it keeps."""
    again = recorded.codex_next(events(place, recorded.CODEX)[-1]["response"]["output"])
    said = whole(place, again.changed(model="words", stream=False, tools=[]))
    assert said["output"][0]["content"][0]["text"].split("|")[-3:-1] == [
        '[assistant](Let me see.)Looking.look{"at": "sky"}',
        '[tool]{"output": "blue"}',
    ]
    assert events(place, again)[-1]["type"] == "response.completed"
    broken = recorded.CODEX.changed(input=[{"type": "reasoning", "summary": [], "encrypted_content": "nerite:?"}])
    status, _, text = post(place, broken)
    assert (status, json.loads(text)["error"]["param"]) == (400, "input[0].encrypted_content")
    foreign = recorded.CODEX.changed(input=[{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}])
    assert post(place, foreign)[0] == 200, "thoughts of another server mean nothing here"


@pytest.mark.parametrize(
    ("model", "kind", "holds", "read"),
    [
        ("sheller", "local_shell_call", {"action": {"type": "exec", **SHELL}}, f"local_shell{json.dumps(SHELL)}"),
        (
            "patcher",
            "custom_tool_call",
            {"name": "apply_patch", "input": PATCH},
            "apply_patch" + json.dumps({"input": PATCH}),
        ),
    ],
)
def test_tools_of_codex_that_are_no_functions(place: Serving, model: str, kind: str, holds: Any, read: str) -> None:
    asked = recorded.CODEX.changed(model=model)
    streamed = events(place, asked)
    added, done = (
        [each["item"] for each in streamed if each["type"] == f"response.output_item.{what}"][-1]
        for what in ("added", "done")
    )
    assert (added["type"], added["status"], done["status"]) == (kind, "in_progress", "completed")
    for call in (done, whole(place, asked.changed(stream=False))["output"][-1]):
        assert call["type"] == kind
        for name, value in holds.items():
            assert call[name] == (value if isinstance(value, str) else {**call[name], **value})
    output = {"type": f"{kind}_output", "call_id": done["call_id"], "output": "done"}
    again = recorded.CODEX.changed(model="words", tools=[], stream=False, input=[done, output])
    said = whole(place, again)["output"][0]["content"][0]["text"].split("|")
    assert said[1:3] == [f"[assistant]{read}", "[tool]done"]


def test_responses_that_are_kept(place: Serving) -> None:
    first = whole(place, recorded.CODEX.changed(model="words", stream=False, store=True, tools=[]))
    path = f"/v1/responses/{first['id']}"
    eventually(lambda: place.ask("GET", path)[0] == 200)
    asked = AgentRequest("/v1/responses", {"model": "words", "input": "And?", "previous_response_id": first["id"]}, {})
    assert "[user]Look up.|[assistant]" in whole(place, asked)["output"][0]["content"][0]["text"]
    assert place.json("GET", f"{path}/input_items")["data"][-1]["content"][0]["text"] == "Look up."
    assert place.json("DELETE", path)["deleted"]


def test_responses_that_another_server_keeps(place: Serving) -> None:
    """They cannot be found. The client learns what to do about that."""
    asked = AgentRequest("/v1/responses", {"model": "words", "input": "And?", "previous_response_id": "resp_1"}, {})
    status, _, text = post(place, asked)
    error = json.loads(text)["error"]
    assert (status, error["code"]) == (400, "previous_response_not_found")
    assert "several need a common one" in error["message"]
    status, _, body = place.ask("GET", "/v1/responses/resp_1")
    assert (status, "several need a common one" in body.decode()) == (404, True)


# Open WebUI


def test_open_webui(place: Serving) -> None:
    listed = place.json("GET", "/v1/models")
    assert (listed["object"], sorted(each["id"] for each in listed["data"])) == ("list", MODELS)
    found = events(place, recorded.OPEN_WEBUI)
    deltas = [each["choices"][0]["delta"] for each in found if each["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas).strip() == "Let me see."
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Looking."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert (calls[0]["name"], json.loads("".join(call.get("arguments", "") for call in calls))) == (
        "look",
        {"at": "sky"},
    )
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == len(SCRIPT.split(" "))
    reasons = [each["choices"][0]["finish_reason"] for each in found if each["choices"]]
    assert reasons[-1] == "tool_calls"


def test_open_webui_names_a_chat(place: Serving) -> None:
    said = whole(place, recorded.WEBUI_TITLE)["choices"][0]["message"]["content"]
    assert said.startswith("[user]### Task:")


def test_a_file_is_read(place: Serving) -> None:
    """Open WebUI puts the text of files into the prompt; what it says about them besides is passed over."""
    asked = recorded.OPEN_WEBUI.changed(model="words", stream=False, stream_options=None, tools=[])
    assert "The sky is blue." in whole(place, asked)["choices"][0]["message"]["content"]
