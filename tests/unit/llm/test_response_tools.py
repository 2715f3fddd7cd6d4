"""Tools of the Responses API that are no functions: what the model is told of them, and what the client gets back."""

from __future__ import annotations

from typing import Any

import pytest

from nerite.llm.openai.errors import ApiError
from nerite.llm.openai.fields import Fields
from nerite.llm.openai.responses.tools import call_item, call_of, function_of
from nerite.llm.openai.tool_calls import ToolCall

KINDS = {"local_shell": "local_shell", "patch": "custom"}


def test_what_the_model_is_told() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    tool = Fields({"type": "custom", "name": "patch", "description": "Edits.", "format": grammar})
    made = function_of(tool, "custom")
    assert made["name"] == "patch" and made["parameters"]["required"] == ["input"]
    assert made["description"] == "Edits.\nThe input has this form (lark):\nstart: /a+/"
    assert "description" not in function_of(Fields({"type": "custom", "name": "patch"}), "custom")
    assert function_of(Fields({"type": "local_shell"}), "local_shell")["parameters"]["required"] == ["command"]


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("local_shell", '{"command": ["ls"]}', "local_shell_call"),
        ("patch", '{"input": "a"}', "custom_tool_call"),
        ("other", '{"input": "a"}', "function_call"),
        ("local_shell", '{"command": "ls"}', "function_call"),
        ("local_shell", '{"command": []}', "function_call"),
        ("local_shell", '{"comm', "function_call"),
        ("local_shell", "[]", "function_call"),
        ("patch", "{}", "function_call"),
    ],
)
def test_the_item_of_a_call(name: str, arguments: str, kind: str) -> None:
    item = call_item(ToolCall("c1", name), arguments, "completed", KINDS)
    assert (item["type"], item["call_id"], item["status"]) == (kind, "c1", "completed")
    if kind == "function_call":
        assert (item["name"], item["arguments"]) == (name, arguments)


@pytest.mark.parametrize(("name", "arguments"), [("local_shell", '{"command":["ls"]}'), ("patch", '{"input":"a"}')])
def test_there_and_back(name: str, arguments: str) -> None:
    item = call_item(ToolCall("c1", name), arguments, "completed", KINDS)
    call = call_of(Fields(item), item["type"])
    assert (call["id"], call["function"]) == ("c1", {"name": name, "arguments": arguments})


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"action": {"command": [1]}}, "action.command"),
        ({"action": {"command": "ls"}}, "action.command"),
        ({"call_id": None}, "call_id"),
    ],
)
def test_items_that_are_wrong(changes: dict[str, Any], param: str) -> None:
    item = {"call_id": "c1", "action": {"type": "exec", "command": ["ls"]}, **changes}
    with pytest.raises(ApiError) as refused:
        call_of(Fields(item), "local_shell_call")
    assert refused.value.param == param


def test_the_id_of_an_old_shell_call() -> None:
    item = {"id": "lsh_1", "action": {"command": ["ls"]}}
    assert call_of(Fields(item), "local_shell_call")["id"] == "lsh_1"
