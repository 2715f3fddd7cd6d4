"""Requests as agents send them, written from their public protocols: Claude Code, Codex and Open WebUI.

Each is a whole request with the headers and fields that the agent sends, also those that mean nothing here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=1b2c3;"
"""A text of the system prompt that differs in each request."""
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA_URL = "http://json-schema.org/draft-07/schema#"


class AgentRequest(NamedTuple):
    """A request of an agent."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    def changed(self, **changes: Any) -> AgentRequest:
        """Return the request with other fields in its body."""
        return self._replace(body={**self.body, **changes})


def _schema(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "$schema": SCHEMA_URL,
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


LOOK: dict[str, Any] = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
"""The arguments of the tool that models of these tests call."""
TEXT: dict[str, Any] = {"type": "string"}
TODOS = {
    "type": "array",
    "description": "The updated list",
    "items": _schema(
        ("content", "status"),
        content={"type": "string", "minLength": 1},
        status={"type": "string", "enum": ["pending", "in_progress", "completed"]},
    ),
}


def _claude_tools(count: int = 24) -> list[dict[str, Any]]:
    """Return the tools of Claude Code: its own, and those of MCP servers, with long descriptions and large schemas."""
    tools = [
        {"name": "look", "description": "Looks.", "input_schema": LOOK, "eager_input_streaming": True},
        {
            "name": "Bash",
            "description": "Executes a command in a shell. " * 200,
            "input_schema": _schema(
                ("command",),
                command={**TEXT, "description": "The command to execute"},
                timeout={"type": "number", "description": "Optional timeout in milliseconds (max 600000)"},
                run_in_background={"type": "boolean", "default": False},
            ),
        },
        {"name": "TodoWrite", "description": "Writes a list.", "input_schema": _schema(("todos",), todos=TODOS)},
        {
            "name": "WebFetch",
            "description": "Fetches.",
            "input_schema": _schema(("url", "prompt"), url={"type": "string", "format": "uri"}, prompt=TEXT),
        },
    ]
    query = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}],
        "description": "What to search for. " * 20,
    }
    where = {"type": "object", "propertyNames": TEXT, "additionalProperties": {"type": ["string", "number"]}}
    found = _schema(("query",), query=query, where=where, limit={"type": "integer", "exclusiveMinimum": 0})
    for number in range(count):
        tools.append({"name": f"mcp__server__search_{number}", "description": "Searches.", "input_schema": found})
    return tools


CLAUDE_HEADERS = {
    "accept": "application/json",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "content-type": "application/json",
    "user-agent": "claude-cli/2.1.0 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
REMINDER = "<system-reminder>\nThe list of tasks is empty.\n</system-reminder>"
CLAUDE_SYSTEM = [
    {"type": "text", "text": BILLING},
    {"type": "text", "text": "You are an agent.", **CACHED},
    {"type": "text", "text": "Be brief.", **CACHED},
]
CLAUDE_METADATA = {"user_id": "user_0a1b_account_2c3d_session_4e5f"}
CLAUDE_CODE = AgentRequest(
    "/v1/messages?beta=true",
    {
        "model": "claude-any",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": REMINDER},
                    {"type": "text", "text": "Look up.", "cache_control": {"type": "ephemeral"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Up.", "signature": ""},
                    {"type": "text", "text": "Two looks."},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sky"}, "caller": "direct"},
                    {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"command": "date"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "blue"}]},
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": "Exit code 1", "is_error": True},
                    {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
        "system": CLAUDE_SYSTEM,
        "tools": _claude_tools(),
        "metadata": CLAUDE_METADATA,
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    },
    CLAUDE_HEADERS,
)
"""The main loop: the second turn of a conversation with two calls."""
CLAUDE_TITLE = AgentRequest(
    "/v1/messages?beta=true",
    {
        "model": "claude-haiku-any",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Look up."}]}],
        "system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "Name the conversation."}],
        "tools": [],
        "metadata": CLAUDE_METADATA,
        "max_tokens": 400,
        "temperature": 1,
        "output_config": {
            "format": {"type": "json_schema", "schema": _schema(("title",), title={"type": ["string", "null"]})}
        },
        "stream": False,
    },
    CLAUDE_HEADERS | {"anthropic-beta": "structured-outputs-2025-12-15"},
)
"""Its small model names the conversation."""
CLAUDE_PROBE = AgentRequest(
    "/v1/messages?beta=true",
    {
        "model": "claude-haiku-any",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "quota"}],
        "metadata": CLAUDE_METADATA,
    },
    CLAUDE_HEADERS,
)
"""Does the key work?"""
CLAUDE_COUNT = AgentRequest(
    "/v1/messages/count_tokens?beta=true",
    {"model": "claude-any", "messages": [{"role": "user", "content": "foo"}], "tools": _claude_tools(2)},
    CLAUDE_HEADERS | {"anthropic-beta": "claude-code-20250219,token-counting-2024-11-01"},
)
"""How many tokens do the tools take?"""
CLAUDE_SEARCH = CLAUDE_PROBE.changed(
    max_tokens=32000, tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
)
"""A search that Anthropic's servers would run."""


CODEX_HEADERS = {
    "accept": "text/event-stream",
    "content-type": "application/json",
    "conversation_id": "0199-a",
    "openai-beta": "responses=experimental",
    "originator": "codex_cli_rs",
    "session_id": "0199-a",
    "user-agent": "codex_cli_rs/0.60.0 (Debian 13; x86_64) xterm",
    "version": "0.60.0",
}
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look", "description": "Looks.", "strict": False, "parameters": LOOK},
    {
        "type": "function",
        "name": "shell",
        "description": "Runs a shell command and returns its output.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "array", "items": {"type": "string"}, "description": "The command to execute"},
                "workdir": TEXT,
                "timeout_ms": {"type": "number"},
                "with_escalated_permissions": {"type": "boolean"},
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {"type": "local_shell"},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files. Do not wrap the patch in JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
    },
    {"type": "web_search", "external_web_access": False},
]
CODEX = AgentRequest(
    "/v1/responses",
    {
        "model": "thinker",
        "instructions": "You are an agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "<environment_context>\n  <cwd>/</cwd>\n"}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look up."}]},
        ],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-a",
        "text": {"verbosity": "medium"},
    },
    CODEX_HEADERS,
)
"""The first turn."""


def codex_next(output: list[dict[str, Any]]) -> AgentRequest:
    """Return the next turn: with the items of the answer, and what the tools have returned.

    Codex sends thoughts back as ``encrypted_content`` alone, and no ids or states of items.
    """
    items = []
    for item in output:
        sent = {name: value for name, value in item.items() if name not in ("id", "status")}
        if item["type"] == "reasoning":
            sent["content"] = None
        items.append(sent)
        if item["type"] == "function_call":
            items.append({"type": "function_call_output", "call_id": item["call_id"], "output": '{"output": "blue"}'})
    return CODEX.changed(input=[*CODEX.body["input"], *items])


WEBUI_HEADERS = {
    "accept": "*/*",
    "content-type": "application/json",
    "user-agent": "Python/3.11 aiohttp/3.12",
    "x-openwebui-chat-id": "5f0c",
    "x-openwebui-user-email": "a@example.com",
    "x-openwebui-user-id": "7d1e",
    "x-openwebui-user-name": "A%20B",
    "x-openwebui-user-role": "user",
}
SOURCES = '<context>\n<source id="1" name="sky.txt">The sky is blue.</source>\n</context>'
OPEN_WEBUI = AgentRequest(
    "/v1/chat/completions",
    {
        "stream": True,
        "model": "thinker",
        "messages": [
            {"role": "system", "content": "You are helpful."},
            {"role": "user", "content": f"### Task:\nAnswer from the context.\n{SOURCES}\nLook up."},
        ],
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": LOOK}}],
        "files": [{"type": "file", "id": "3a", "name": "sky.txt", "collection_name": "file-3a", "status": "uploaded"}],
        "features": {"web_search": False, "image_generation": False, "code_interpreter": False},
        "session_id": "k1",
        "chat_id": "5f0c",
        "id": "91",
        "background_tasks": {"title_generation": True, "tags_generation": True},
    },
    WEBUI_HEADERS,
)
"""A chat with a file, whose text Open WebUI has put into the prompt, and a tool."""
WEBUI_TITLE = AgentRequest(
    "/v1/chat/completions",
    {
        "model": "words",
        "messages": [{"role": "user", "content": '### Task:\nName the chat, as JSON: { "title": "..." }'}],
        "stream": False,
        "max_completion_tokens": 1000,
        "metadata": {"task": "title_generation", "chat_id": "5f0c"},
    },
    WEBUI_HEADERS,
)
"""The name of a chat."""
