"""What agents speak: Anthropic's Messages API and OpenAI's Responses API, with their clients and front processes."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serving import Serving, eventually, serving
from text_models import engine

TEMPLATE = (
    "{% for each in messages %}[{{ each.role }}]{% if each.reasoning_content %}({{ each.reasoning_content }})"
    "{% endif %}{{ each.content }}{% for call in each.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}|{% endfor %}"
)
THINKING = TEMPLATE + "{% if tools %}<tool_call>{% endif %}<think>"
SCRIPT = 'Let me see. </think>Looking. <tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
KEY = "k"
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=1b2c3;"
OF_CLAUDE_CODE: dict[str, Any] = {
    "model": "claude-any",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": BILLING},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Look up.", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Up.", "signature": "x"},
                {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "sky"}, "caller": "direct"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "blue", "is_error": False},
                {"type": "text", "text": "And now?"},
            ],
        },
    ],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA, "eager_input_streaming": True}],
    "thinking": {"type": "adaptive"},
    "metadata": {"user_id": "user_1"},
    "context_management": {"edits": []},
}
OF_CODEX: dict[str, Any] = {
    "model": "thinker",
    "instructions": "You are an agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look up."}]},
    ],
    "tools": [
        {"type": "function", "name": "look", "description": "Looks.", "strict": False, "parameters": SCHEMA},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "one",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("agents")
    models = folder / "models"
    (engine(models, "thinker", SCRIPT) / "chat_template.jinja").write_text(THINKING)
    (engine(models, "words") / "chat_template.jinja").write_text(TEMPLATE)
    flags = [
        f"--http-restricted-api=inference:authorization=Bearer {KEY}",
        "--model-alias=claude-*=thinker",
        "--model-alias=echo=words",
        f"--responses={folder / 'responses.db'}",
        "--front-processes=2",
    ]
    with serving(models, folder / "log", *flags) as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=KEY, max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture
def agent(server: Serving) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=f"http://{server.http}", api_key=KEY, max_retries=0, timeout=30) as made:
        yield made


def ask(server: Serving, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    status, _, answer = server.ask("POST", path, body, **({"Authorization": f"Bearer {KEY}"} | headers))
    return status, answer


def events(text: bytes) -> list[Any]:
    """Return the data of events, each of which has the name that its data has."""
    found = []
    for event in text.decode().strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


# Anthropic


def test_messages(server: Serving) -> None:
    status, body = ask(server, "/v1/messages", {**OF_CLAUDE_CODE, "stream": False})
    message = json.loads(body)
    assert (status, message["type"], message["role"], message["model"]) == (
        200,
        "message",
        "assistant",
        "claude-any",
    )
    thought, text, call = message["content"]
    assert (thought["type"], thought["thinking"], text["text"]) == ("thinking", "Let me see.", "Looking.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"at": "sky"})
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("tool_use", len(SCRIPT.split(" ")))


def test_a_stream_of_messages(server: Serving) -> None:
    _, text = ask(server, "/v1/messages", OF_CLAUDE_CODE)
    found = events(text)
    kinds = [each["type"] for each in found if each["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", "ping", *block, *block, *block, "message_delta", "message_stop"]
    assert found[0]["message"]["usage"]["input_tokens"] > 0
    starts = [each for each in found if each["type"] == "content_block_start"]
    assert [each["index"] for each in starts] == [0, 1, 2]
    arguments = "".join(each["delta"].get("partial_json", "") for each in found if "delta" in each)
    assert json.loads(arguments) == {"at": "sky"}
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_what_models_get_of_messages(server: Serving) -> None:
    _, body = ask(server, "/v1/messages", {**OF_CLAUDE_CODE, "model": "words", "stream": False, "tools": []})
    assert json.loads(body)["content"][0]["text"].split("|")[:-1] == [
        "[system]You are an agent.",
        "[user]Look up.",
        '[assistant](Up.)look{"at": "sky"}',
        "[tool]blue",
        "[user]And now?",
    ]


def test_an_answer_that_is_begun(server: Serving) -> None:
    messages = [
        {"role": "user", "content": "Say"},
        {"role": "assistant", "content": [{"type": "text", "text": "I am"}]},
    ]
    _, body = ask(server, "/v1/messages", {"model": "words", "max_tokens": 50, "messages": messages})
    assert json.loads(body)["content"][0]["text"] == "[user]Say|[assistant]I am", "the template's end is left out"


def test_thoughts_that_nobody_asked_for(server: Serving) -> None:
    asked = {name: value for name, value in OF_CLAUDE_CODE.items() if name != "thinking"}
    _, body = ask(server, "/v1/messages", {**asked, "stream": False})
    assert [block["type"] for block in json.loads(body)["content"]] == ["text", "tool_use"]


@pytest.mark.parametrize(
    ("changes", "status", "kind", "says"),
    [
        ({"model": "gpt"}, 404, "not_found_error", "Unknown model: gpt"),
        ({"max_tokens": None}, 400, "invalid_request_error", "Missing required parameter: 'max_tokens'"),
        ({"messages": []}, 400, "invalid_request_error", "'messages'"),
        ({"messages": [{"role": "tool", "content": ""}]}, 400, "invalid_request_error", "'messages[0].role'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0].type"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
        ({"top_p": 2}, 400, "invalid_request_error", "'top_p'"),
        (
            {"messages": [{"role": "user", "content": "x" * 70_000}], "max_tokens": None},
            400,
            "invalid_request_error",
            "",
        ),
    ],
)
def test_errors_in_anthropic_s_format(
    server: Serving, changes: dict[str, Any], status: int, kind: str, says: str
) -> None:
    got, body = ask(server, "/v1/messages", {**OF_CLAUDE_CODE, **changes})
    error = json.loads(body)
    assert (got, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert says in error["error"]["message"]


def test_the_keys_of_both_kinds_of_clients(server: Serving) -> None:
    asked = {**OF_CLAUDE_CODE, "stream": False}
    assert server.ask("POST", "/v1/messages", asked, x_api_key=KEY)[0] == 200
    assert server.ask("POST", "/v1/messages", asked, x_api_key="other")[0] == 401
    status, _, body = server.ask("POST", "/v1/messages", asked)
    assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")
    assert server.ask("POST", "/v1/chat/completions", {}, x_api_key=KEY)[0] == 401


def test_a_large_body(server: Serving) -> None:
    messages = [{"role": "user", "content": "x" * 100_000}]
    status, body = ask(server, "/v1/messages", {"model": "words", "max_tokens": 5, "messages": messages})
    assert (status, json.loads(body)["content"][0]["text"].strip()) == (200, f"[user]{'x' * 100_000}|")


def test_anthropic_s_client(agent: Any) -> None:
    asked = {name: value for name, value in OF_CLAUDE_CODE.items() if name not in ("stream", "context_management")}
    message = agent.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    with agent.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "Looking."
        final = stream.get_final_message()
    assert (final.stop_reason, final.content[2].input) == ("tool_use", {"at": "sky"})
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="Unknown model: gpt"):
        agent.messages.create(**{**asked, "model": "gpt"})


# OpenAI's Responses


def test_responses(client: openai.OpenAI) -> None:
    asked = {name: value for name, value in OF_CODEX.items() if name != "stream"}
    response = client.responses.create(**asked)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    call: Any = response.output[2]
    assert (call.name, json.loads(call.arguments), response.status) == ("look", {"at": "sky"}, "completed")
    assert response.output_text == "Looking." and response.usage is not None
    assert (response.instructions, response.parallel_tool_calls) == ("You are an agent.", False)
    cut = client.responses.create(model="echo", input="one two three", max_output_tokens=2)
    assert (cut.status, cut.output_text) == ("incomplete", "[user]one two")
    assert cut.incomplete_details is not None and cut.incomplete_details.reason == "max_output_tokens"


def test_a_stream_of_responses(client: openai.OpenAI, server: Serving) -> None:
    _, text = ask(server, "/v1/responses", OF_CODEX)
    found = events(text)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    kinds = [each["type"] for each in found if not each["type"].endswith("delta")]
    item = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(*item, "response.reasoning_text.done", *done),
        *(*item, "response.output_text.done", *done),
        *("response.output_item.added", "response.function_call_arguments.done", "response.output_item.done"),
        "response.completed",
    ]
    with client.responses.stream(**{name: value for name, value in OF_CODEX.items() if name != "stream"}) as stream:
        final = stream.get_final_response()
    assert [each.type for each in final.output] == ["reasoning", "message", "function_call"]
    assert found[-1]["response"]["output"][1]["content"][0]["text"] == "Looking."


def test_what_models_get_of_responses(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": "Look up."},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Up."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "sky"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "blue"},
    ]
    response = client.responses.create(model="words", instructions="Be brief.", input=items, store=False)
    assert response.output_text.split("|")[:-1] == [
        "[system]Be brief.",
        "[user]Look up.",
        '[assistant](Up.)Looking.look{"at": "sky"}',
        "[tool]blue",
    ]


def test_responses_that_are_kept(client: openai.OpenAI, server: Serving) -> None:
    first = client.responses.create(model="words", input="one", instructions="Be brief.")
    second = client.responses.create(model="words", input="two", previous_response_id=first.id)
    said = second.output_text
    assert said.startswith("[user]one|[assistant]") and said.endswith("[user]two|")
    assert first.output_text in said
    assert "[system]" not in second.output_text.partition("[assistant]")[0], "instructions hold for one response"
    large = client.responses.create(model="words", input="x" * 70_000, previous_response_id=second.id)
    assert large.output_text.count("[user]") > 3
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert next(iter(client.responses.input_items.list(second.id))).type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="words", input="two", previous_response_id=first.id)
    assert refused.value.code == "previous_response_not_found"
    unkept = client.responses.create(model="words", input="one", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_tenant_has_a_share_of_what_is_kept(tmp_path: Path) -> None:
    (engine(tmp_path / "models", "words") / "chat_template.jinja").write_text(TEMPLATE)
    policy = tmp_path / "policy.toml"
    policy.write_text('[tenants.acme]\nkeys = ["a"]\nstored_responses = 2\n[tenants.bob]\nkeys = ["b"]\n')
    flags = f"--responses={tmp_path / 'responses.db'}", f"--policy-file={policy}"
    with serving(tmp_path / "models", tmp_path / "log", *flags) as server:
        acme, bob = (
            openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=key, max_retries=0, timeout=30) for key in "ab"
        )
        with acme, bob:
            kept = [acme.responses.create(model="words", input="one") for _ in range(2)]
            acme.responses.create(model="words", input="of this one, the server learns that there is no room")
            eventually(lambda: "is not kept: tenant 'acme' stores 2 responses, and may store 2" in server.text)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as refused:
                    acme.responses.create(model="words", input="one", stream=stream)
                assert refused.value.body is not None
                assert "delete responses, or send store: false" in str(refused.value)
                assert refused.value.response.headers["x-should-retry"] == "false"
            assert acme.responses.create(model="words", input="one", store=False).output_text
            assert bob.responses.retrieve(bob.responses.create(model="words", input="one").id).output_text
            acme.responses.delete(kept[0].id)
            assert acme.responses.retrieve(acme.responses.create(model="words", input="one").id).output_text


@pytest.mark.parametrize(
    ("flag", "what"),
    [("--responses-storage-number=1", "1 responses"), ("--responses-storage-bytes=1500", "1500 bytes of responses")],
)
def test_the_flags_of_what_is_kept(tmp_path: Path, flag: str, what: str) -> None:
    (engine(tmp_path / "models", "words") / "chat_template.jinja").write_text(TEMPLATE)
    with (
        serving(tmp_path / "models", tmp_path / "log", f"--responses={tmp_path / 'responses.db'}", flag) as server,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="any", max_retries=0, timeout=30) as anybody,
    ):
        for _ in range(2):
            anybody.responses.create(model="words", input="one")
        eventually(lambda: f"is not kept: all {what} that this server keeps are there" in server.text)
        with pytest.raises(openai.RateLimitError, match=f"all {what} that this server keeps are there"):
            anybody.responses.create(model="words", input="x" * 2000)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_responses_that_are_wrong(client: openai.OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**OF_CODEX, **changes, "stream": False})
    assert refused.value.param == param


# What is passed over


def test_unknown_fields_are_logged_once(server: Serving, client: openai.OpenAI) -> None:
    answered: Any = {"role": "assistant", "content": "a", "annotations": [], "made_up": 1}
    for _ in range(3):
        messages: Any = [answered, {"role": "user", "content": "b"}]
        client.chat.completions.create(model="words", messages=messages)
    told = [line for line in server.log.read_text().splitlines() if "'messages[].made_up'" in line]
    assert 1 <= len(told) <= 2, "once in each front process"
    assert "is unknown here and passed over" in told[0]


def test_names_that_stand_for_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo", "thinker", "words"]
    assert client.models.retrieve("claude-haiku").id == "claude-haiku"
    assert client.completions.create(model="echo", prompt="one").model == "echo"


def test_a_client_that_goes_during_a_look_into_the_database(server: Serving) -> None:
    body = json.dumps({"model": "words", "input": "a", "previous_response_id": "resp_none"})
    connection = http.client.HTTPConnection(server.http, timeout=10)
    connection.request("POST", "/v1/responses", body, {"Authorization": f"Bearer {KEY}"})
    connection.close()
    status, _ = ask(server, "/v1/responses", {"model": "words", "input": "a"})
    assert status == 200
