"""Tools of the Responses API that the client runs itself, as functions: its shell, and those that take plain text.

Models call functions only. A call of such a tool is returned as the item that the client expects, and its items in a
conversation are calls of the function again. Pure.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

import orjson

from nerite.llm.openai.fields import Fields, wrong_value
from nerite.llm.openai.tool_calls import ToolCall

Item = dict[str, Any]

CUSTOM: Final = "custom"
LOCAL_SHELL: Final = "local_shell"
KINDS: Final = (CUSTOM, LOCAL_SHELL)
"""Types of such tools."""
_MAX_COMMAND: Final = 4096
"""Words of a command in a conversation."""
_TEXT: Final = {"type": "string"}
_SHELL: Final[Mapping[str, Any]] = {
    "name": LOCAL_SHELL,
    "description": "Runs a command on the user's machine, and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": _TEXT, "description": "The program, and its arguments."},
            "working_directory": _TEXT,
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}


def function_of(tool: Fields, kind: str) -> dict[str, Any]:
    """Return the function that a tool of one of ``KINDS`` is to the model. Raises ``ApiError``."""
    if kind == LOCAL_SHELL:
        return dict(_SHELL)
    texts = [tool.text("description", "")]
    form = tool.object("format")
    if form.text("type", "text") == "grammar":
        texts.append(f"The input has this form ({form.name('syntax')}):\n{form.text('definition')}")
    function: dict[str, Any] = {
        "name": tool.name("name"),
        "parameters": {"type": "object", "properties": {"input": _TEXT}, "required": ["input"]},
    }
    if description := "\n".join(filter(None, texts)):
        function["description"] = description
    return function


def call_of(item: Fields, kind: str) -> dict[str, Any]:
    """Return the call that an item stands for, with which the model called a tool. Raises ``ApiError``."""
    if kind == "function_call":
        return _call(item, item.name("name"), item.text("arguments", "{}"))
    if kind == "custom_tool_call":
        return _call(item, item.name("name"), _json({"input": item.text("input")}))
    action = item.object("action")
    command = action.array("command", _MAX_COMMAND)
    if not all(isinstance(word, str) for word in command):
        raise wrong_value(action.path("command"), "an array of strings", command)
    more = {name: action[name] for name in ("working_directory", "timeout_ms") if name in action}
    return _call(item, LOCAL_SHELL, _json({"command": command, **more}))


def _call(item: Fields, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id(item), "type": "function", "function": function}


def call_id(item: Fields) -> str:
    """Return the id of a call in its item, or in the item of what came of it; shells once had only that of the item."""
    return item.name("call_id" if "call_id" in item or "id" not in item else "id")


def call_item(call: ToolCall, arguments: str, status: str, kinds: Mapping[str, str]) -> Item:
    """Return the item for a call of the model. ``kinds`` has the types of tools that are no functions, by name.

    What is no call of such a tool, by its arguments, is returned as that of a function: the client tells the model.
    """
    kind = kinds.get(call.name, "")
    if kind and isinstance(given := _loaded(arguments), dict):
        if kind == CUSTOM and isinstance(text := given.get("input"), str):
            return _item("ctc", "custom_tool_call", call, status) | {"name": call.name, "input": text}
        if kind == LOCAL_SHELL and (action := _action(given)):
            return _item("lsh", "local_shell_call", call, status) | {"action": action}
    return _item("fc", "function_call", call, status) | {"name": call.name, "arguments": arguments}


def _item(prefix: str, kind: str, call: ToolCall, status: str) -> Item:
    return {"id": f"{prefix}_{secrets.token_hex(24)}", "type": kind, "call_id": call.id, "status": status}


def _action(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a shell is to do; nothing if ``given`` is no command."""
    command = given.get("command")
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        return {}
    where, limit = given.get("working_directory"), given.get("timeout_ms")
    return {
        "type": "exec",
        "command": command,
        "env": {},
        "working_directory": where if isinstance(where, str) else None,
        "timeout_ms": limit if type(limit) is int else None,
        "user": None,
    }


def _loaded(arguments: str) -> Any:
    """Return arguments; None if they end too early, because the model reached its limit."""
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
