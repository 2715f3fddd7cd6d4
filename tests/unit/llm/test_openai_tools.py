"""Parsers of tool calls: whatever the pieces in which text comes, the same comes out, and arguments are JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.llm.openai import tool_parsers
from nerite.llm.openai.tool_calls import (
    BrokenCall,
    JsonReader,
    ReasoningText,
    ToolArguments,
    ToolCall,
    ToolParser,
    joined_calls,
    new_id,
)
from nerite.llm.openai.tool_parsers import FilteredEvents, GuidedCall, GuidedCalls

ARGUMENTS = '{"where": "Rome, \\"Italy\\" {[", "days": [1, -2.5e3, true, null, {}], "deep": {"a": {"b": []}}}'
SIMPLE = '{"a": 1}'


def read(parser: ToolParser, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """Return text, and the name and the arguments of each call."""
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    text, calls = "", []
    for event in events:
        if isinstance(event, ToolCall):
            assert event.id
            calls.append((event.name, ""))
        elif isinstance(event, ToolArguments):
            calls[-1] = calls[-1][0], calls[-1][1] + event.text
        else:
            text += event.text if isinstance(event, ReasoningText) else event
    return text, calls


def call(name: str = "look", arguments: str = ARGUMENTS, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


_BAR = "\uff5c"
DEEPSEEK = "<|tool▁calls▁begin|><|tool▁call▁begin|>%s<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", _BAR)
COMPACT = '{"a":1}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text.", "Just text.", []),
    ("hermes", " spaces stay \n", " spaces stay \n", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", f"<tool_call>\n{call()}\n</tool_call>", "", [("look", ARGUMENTS)]),
    ("hermes", f"I see.\n<tool_call>{call()}</tool_call>\n", "I see.", [("look", ARGUMENTS)]),
    (
        "hermes",
        f"<tool_call>{call()}</tool_call>\n<tool_call>{call('b', SIMPLE)}</tool_call> Done.",
        "Done.",
        [("look", ARGUMENTS), ("b", SIMPLE)],
    ),
    ("hermes", f"<tool_call>{call()}<tool_call>{call('b', SIMPLE)}", "", [("look", ARGUMENTS), ("b", SIMPLE)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>', "", [("late", SIMPLE)]),
    ("hermes", '<tool_call>{"name": "none"}</tool_call>', "", [("none", "{}")]),
    ("hermes", '<tool_call>{"name": "q", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("q", SIMPLE)]),
    ("hermes", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "q"}</tool_call>', "", [("q", SIMPLE)]),
    ("hermes", '<tool_call>{"name": "n", "arguments": {"a": "1\n2"}}', "", [("n", '{"a": "1\\n2"}')]),
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("llama3", "Just text.", "Just text.", []),
    ("llama3", call(key="parameters"), "", [("look", ARGUMENTS)]),
    ("llama3", f"<|python_tag|>{call(key='parameters')}", "", [("look", ARGUMENTS)]),
    ("llama3", f"\n {call()}; {call('b', SIMPLE)}", "", [("look", ARGUMENTS), ("b", SIMPLE)]),
    ("llama3", f"First. <|python_tag|>{call()}", "First.", [("look", ARGUMENTS)]),
    ("llama3", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    ("llama3", '{"type": "function", "name": "t", "parameters": {"a": 1}}', "", [("t", SIMPLE)]),
    ("llama3", '{"a": [1, 2]} is JSON', '{"a": [1, 2]} is JSON', []),
    ("llama3", f"{call()}\nThat is all.", "That is all.", [("look", ARGUMENTS)]),
    ("llama3", "  ", "  ", []),
    ("mistral", "Just [TOOL] text.", "Just [TOOL] text.", []),
    ("mistral", f"[TOOL_CALLS][{call()}, {call('b', SIMPLE)}]", "", [("look", ARGUMENTS), ("b", SIMPLE)]),
    ("mistral", f"[TOOL_CALLS] [{call()}] ", "", [("look", ARGUMENTS)]),
    ("mistral", f"[TOOL_CALLS]look{ARGUMENTS}", "", [("look", ARGUMENTS)]),
    (
        "mistral",
        f"Hm. [TOOL_CALLS]look[ARGS]{ARGUMENTS}[TOOL_CALLS]b[ARGS]{SIMPLE}",
        "Hm.",
        [("look", ARGUMENTS), ("b", SIMPLE)],
    ),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    (
        "deepseek",
        "Hm. " + DEEPSEEK % f"function<{_BAR}tool▁sep{_BAR}>look\n```json\n{SIMPLE}\n```",
        "Hm.",
        [("look", COMPACT)],
    ),
    ("deepseek", DEEPSEEK % f"look<{_BAR}tool▁sep{_BAR}>{SIMPLE}", "", [("look", COMPACT)]),
    ("deepseek", DEEPSEEK % "nothing", DEEPSEEK % "nothing", []),
    ("granite", f"<|tool_call|>[{call()}]", "", [("look", ARGUMENTS)]),
    ("granite", "<|tool_call|> and text", "<|tool_call|> and text", []),
    (
        "phi4",
        f"Hm. <|tool_call|>[{call()}, {call('b', SIMPLE)}]<|/tool_call|>",
        "Hm.",
        [("look", ARGUMENTS), ("b", SIMPLE)],
    ),
    ("functools", f"functools[{call()}]", "", [("look", ARGUMENTS)]),
    (
        "command",
        '<|START_RESPONSE|>Hm.<|END_RESPONSE|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", '
        f'"parameters": {ARGUMENTS}}}]<|END_ACTION|>',
        "Hm.",
        [("look", ARGUMENTS)],
    ),
    (
        "glm45",
        "Hm.\n<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "Hm.",
        [("look", COMPACT)],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=a>\nsome\ntext\n</parameter>\n</function>\n</tool_call>",
        "",
        [("look", '{"a":"some\\ntext"}')],
    ),
    ("qwen3_coder", "<tool_call>no</tool_call>", "<tool_call>no</tool_call>", []),
    (
        "functiongemma",
        "<start_function_call>call:look{where:<escape>Rome, {x}<escape>,days:3}<end_function_call>",
        "",
        [("look", '{"where":"Rome, {x}","days":3}')],
    ),
    ("pythonic", "[look(a=1), b(c='d')]", "", [("look", COMPACT), ("b", '{"c":"d"}')]),
    ("pythonic", "[1] is a list", "[1] is a list", []),
    ("pythonic", "[look(a)]", "[look(a)]", []),
    (
        "harmony",
        f"{THOUGHT}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "Hm.",
        [("look", ARGUMENTS)],
    ),
    ("harmony", f"{THOUGHT}<|channel|>final<|message|>Hello<|return|>", "Hm.Hello", []),
    ("harmony", "No message", "No message", []),
]


@pytest.mark.parametrize(("family", "text", "said", "calls"), CASES)
def test_in_one_piece_and_byte_by_byte(family: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert read(tool_parsers.ALL[family].parser({}), text) == (said, calls)
    assert read(tool_parsers.ALL[family].parser({}), *text) == (said, calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


@given(st.data())
def test_in_any_pieces(data: st.DataObject) -> None:
    family, text, said, calls = data.draw(st.sampled_from(CASES))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(tool_parsers.ALL[family].parser({}), *pieces) == (said, calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.booleans(), st.sampled_from(["hermes", "mistral"]))
def test_any_arguments(arguments: dict[str, Any], ascii: bool, family: str) -> None:
    text = json.dumps({"arguments": arguments, "name": "f"}, ensure_ascii=ascii)
    text = f"<tool_call>{text}</tool_call>" if family == "hermes" else f"[TOOL_CALLS][{text}]"
    ((name, joined),) = read(tool_parsers.ALL[family].parser({}), *text)[1]
    assert (name, json.loads(joined)) == ("f", arguments)


@given(st.text(alphabet='{}[]",:\\ue12.-tfn al\n', max_size=30), st.integers(1, 31))
def test_what_the_reader_takes_is_json(text: str, size: int) -> None:
    text, reader, taken = "{" + text, JsonReader(), ""
    try:
        for at in range(0, len(text), size):
            taken += reader.take_all(text[at : at + size])[1]
    except BrokenCall:
        with pytest.raises(ValueError):
            json.loads(text, strict=False)
        return
    if reader.done:
        json.loads(taken)


def test_arguments_leave_as_they_come() -> None:
    parser = tool_parsers.ALL["hermes"].parser({})
    assert parser.feed('<tool_call>{"name": "f", "arguments"') == []
    (begun, *rest) = parser.feed(': {"text": "lo')
    assert isinstance(begun, ToolCall)
    assert "".join(each.text for each in rest if isinstance(each, ToolArguments)) == '{"text": "lo'
    assert joined_calls(parser.feed("ng")) == [ToolArguments("ng")]


def test_what_is_joined() -> None:
    call = ToolCall("i", "f")
    events = ["a", "b", call, ToolArguments("1"), ToolArguments("2"), "c", call]
    assert joined_calls(events) == ["ab", call, ToolArguments("12"), "c", call]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {a: 1}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1], }',
        '<tool_call>{"name": "f", "arguments": {"a": 01}}',
        '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}',
        '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}',
        '<tool_call>{"name": "f", "arguments": "no"}',
    ],
)
def test_a_call_that_began_and_is_broken(text: str) -> None:
    with pytest.raises(BrokenCall):
        read(tool_parsers.ALL["hermes"].parser({}), text)


def test_calls_that_the_model_has_to_write() -> None:
    assert read(GuidedCall("f", new_id), *f" {ARGUMENTS} and more") == ("", [("f", ARGUMENTS)])
    text = f"[{call('a', SIMPLE, 'parameters')}, {call(key='parameters')}]"
    assert read(GuidedCalls(new_id), *text) == ("", [("a", SIMPLE), ("look", ARGUMENTS)])
    for parser in (GuidedCall("f", new_id), GuidedCalls(new_id)):
        with pytest.raises(BrokenCall):
            parser.feed("Sorry")


def test_ids() -> None:
    assert len(tool_parsers.ALL["mistral"].new_id()) == 9
    assert tool_parsers.ALL["hermes"].new_id().startswith("call_")


@pytest.mark.parametrize(
    "arguments",
    [json.dumps({"text": "once " * 100_000}), json.dumps({"n": [1] * 100_000}), json.dumps({"n": "\n" * 100_000})],
    ids=["text", "numbers", "escapes"],
)
@pytest.mark.parametrize("form", ["plain", "quoted", "early", "other"])
def test_any_length_takes_its_time(arguments: str, form: str) -> None:
    """Seconds, and not minutes or hours, as it would if what came were copied each time."""
    text = {
        "plain": f'{{"name": "f", "arguments": {arguments}}}',
        "quoted": f'{{"name": "f", "arguments": {json.dumps(arguments)}}}',
        "early": f'{{"arguments": {arguments}, "name": "f"}}',
        "other": f'{{"note": {arguments}, "name": "f", "arguments": {arguments}}}',
    }[form]
    began = time.monotonic()
    for size in (4, 4096):
        parser = tool_parsers.ALL["hermes"].parser({})
        text_in_pieces = ["<tool_call>", *(text[at : at + size] for at in range(0, len(text), size)), "</tool_call>"]
        events = [event for piece in text_in_pieces for event in parser.feed(piece)]
        _, whole = joined_calls(events + parser.finish())
        assert isinstance(whole, ToolArguments) and json.loads(whole.text) == json.loads(arguments)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("family", tool_parsers.ALL)
def test_white_space_waits_for_a_call_only_so_long(family: str) -> None:
    parser = tool_parsers.ALL[family].parser({})
    said = [event for _ in range(2000) for event in parser.feed("  ")]
    assert len("".join(map(str, said))) > 2000
    assert read(tool_parsers.ALL[family].parser({}), " " * 4000) == (" " * 4000, [])


@pytest.mark.parametrize(
    ("schema", "value"),
    [({"type": "string"}, "3"), ({"type": "integer"}, 3), ({}, 3)],
)
def test_values_without_quotes_have_the_type_of_their_schema(schema: dict[str, Any], value: Any) -> None:
    text = "<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    parser = tool_parsers.ALL["glm45"].parser({"look": {"properties": {"a": schema}}})
    ((_, arguments),) = read(parser, text)[1]
    assert json.loads(arguments) == {"a": value}


@pytest.mark.parametrize(("single", "names"), [(True, ["a"]), (False, ["a", "b"])])
def test_only_the_first_call(single: bool, names: list[str]) -> None:
    text = f"<tool_call>{call('a', SIMPLE)}</tool_call><tool_call>{call('b', SIMPLE)}</tool_call> Done."
    parser = FilteredEvents(tool_parsers.ALL["hermes"].parser({}), single=single, thoughts=True)
    said, calls = read(parser, *text)
    assert (said, [name for name, _ in calls]) == ("Done.", names)


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ tools }}<tool_call>{}</tool_call>", "hermes"),
        ("{{ tools }}<tool_call><function=x>", "qwen3_coder"),
        ("{{ tools }}<tool_call><arg_key>", "glm45"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|start_header_id|>", "llama3"),
        ("{{ tools }}<|channel|>", "harmony"),
        (f"{{{{ tools }}}}<{_BAR}tool▁calls▁begin{_BAR}>", "deepseek"),
        ("{{ messages }}<tool_call>", ""),
        ("{{ tools }}", ""),
    ],
)
def test_families_are_known_by_their_template(template: str, family: str) -> None:
    assert tool_parsers.family_of(template) == family
